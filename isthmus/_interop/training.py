"""A whole training step as one program: forward, backward and the optimizer's step, of torch's or of optax's."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils import _pytree as pytree

from isthmus._interop.remat import rematerialized
from isthmus._lazy import install
from isthmus._lazy.jit import Jitted
from isthmus.errors import IsthmusError

Modules = type[nn.Module] | Iterable[type[nn.Module] | nn.Module]


def train_step(
    model: nn.Module,
    loss_fn: Callable[..., Any],
    optimizer: Optimizer,
    *,
    accumulate: int = 1,
    remat: Modules = (),
) -> Callable[..., Any]:
    """Return a function of a batch that trains the model one step, as one program, and returns the loss.

    Arguments:
        model: the model, on "jax".
        loss_fn: ``loss_fn(model, *batch)`` returns the loss, or a tuple that begins with it.
        optimizer: a ``torch.optim.Optimizer``, or ``isthmus.optax.Optimizer``.
        accumulate: into how many parts the batch is split along its first dimension; their gradients and losses are
            averaged.
        remat: modules, or classes of modules, that save their arguments alone for backward and compute the rest again.

    Returns:
        A function of the batch that returns what ``loss_fn`` does.

    Example:
        >>> import torch, isthmus
        >>> model = torch.nn.Linear(1, 1, bias=False).to("jax")
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> def loss_fn(model, x, y):
        ...     return torch.nn.functional.mse_loss(model(x), y)
        >>> step = isthmus.train_step(model, loss_fn, optimizer)
        >>> x = torch.ones(4, 1, device="jax")
        >>> losses = [step(x, 3 * x).item() for _ in range(20)]
        >>> losses[-1] < 0.01 < losses[0]
        True
    """
    if not isinstance(optimizer, Optimizer):
        raise TypeError(
            f"train_step: optimizer is a {type(optimizer).__name__}, not a torch.optim.Optimizer; a transformation of "
            f"optax's becomes one by isthmus.optax.Optimizer(model.parameters(), transformation)"
        )
    _count_on_device(optimizer)
    _start(optimizer)
    chosen = list(dict.fromkeys(_chosen(model, remat)))
    # As a partial function, so that jit finds what belongs to the step.
    install.install()
    return Jitted(functools.partial(_step, model, loss_fn, optimizer, accumulate, chosen), True, ())


def _step(
    model: nn.Module,
    loss_fn: Callable[..., Any],
    optimizer: Optimizer,
    accumulate: int,
    chosen: list[nn.Module],
    *args: Any,
    **kwargs: Any,
) -> Any:
    optimizer.zero_grad(set_to_none=True)
    parts = []
    for some, named in _split((args, kwargs), accumulate):
        with rematerialized(chosen):
            found = loss_fn(model, *some, **named)
            loss = found[0] if isinstance(found, tuple) else found
            if not isinstance(loss, Tensor):
                raise TypeError(
                    f"train_step: loss_fn returned a {type(loss).__name__}; it must return the loss, or a tuple that "
                    f"begins with it"
                )
            (loss / accumulate if accumulate > 1 else loss).backward()
        parts.append(pytree.tree_map(_detached, found))
    optimizer.step()
    # Gradients that nobody can see need not leave the program.
    optimizer.zero_grad(set_to_none=True)
    return parts[0] if accumulate == 1 else pytree.tree_map(_average, *parts)


def _detached(value: Any) -> Any:
    return value.detach() if isinstance(value, Tensor) else value


def _average(*values: Any) -> Any:
    """Return what the parts of a batch gave as one: the mean of numbers, the sum of integers, tensors in a row."""
    if not isinstance(values[0], Tensor):
        return values[0]
    if values[0].dim():
        return torch.cat(values)
    return torch.stack(values).mean(0) if values[0].is_floating_point() else torch.stack(values).sum(0)


def _split(batch: Any, count: int) -> list[Any]:
    """Return a batch in parts of its first dimension."""
    if count == 1:
        return [batch]
    leaves, spec = pytree.tree_flatten(batch)
    parts = [
        _chunks(leaf, count) if isinstance(leaf, Tensor) and leaf.dim() else [leaf] * count for leaf in leaves
    ]
    return [pytree.tree_unflatten([part[n] for part in parts], spec) for n in range(count)]


def _chunks(tensor: Tensor, count: int) -> list[Tensor]:
    if len(tensor) % count:
        raise ValueError(
            f"train_step: a batch of {len(tensor)} cannot be split into {count} parts of one size"
        )
    return list(tensor.chunk(count))


def _chosen(model: nn.Module, remat: Modules) -> Iterator[nn.Module]:
    named = [remat] if isinstance(remat, type) else list(remat)
    classes = tuple(one for one in named if isinstance(one, type))
    inside = set(model.modules())
    yield from [module for module in model.modules() if isinstance(module, classes)]
    for module in named:
        if isinstance(module, type):
            if not any(isinstance(part, module) for part in inside):
                raise IsthmusError(f"train_step: the model has no {module.__name__} to rematerialize")
        elif module not in inside:
            raise IsthmusError(f"train_step: {type(module).__name__} is not a part of the model")
        else:
            yield module


def _count_on_device(optimizer: Optimizer) -> None:
    """Keep the step counts of a torch optimizer where a program can change them."""
    for group in optimizer.param_groups:
        if not group.get("capturable", True):
            group["capturable"] = True
        for parameter in group["params"]:
            step = optimizer.state.get(parameter, {}).get("step")
            if isinstance(step, Tensor):
                optimizer.state[parameter]["step"] = step.to(parameter.device)


def _start(optimizer: Optimizer) -> None:
    """Make the state that the first step would make, so that the first recording is the one that lasts."""
    if hasattr(optimizer, "start"):
        optimizer.start()
    if type(optimizer) not in (torch.optim.Adam, torch.optim.AdamW):
        return
    for group in optimizer.param_groups:
        for parameter in [p for p in group["params"] if p.requires_grad and not optimizer.state.get(p)]:
            moments = ["exp_avg", "exp_avg_sq", *["max_exp_avg_sq"] * group["amsgrad"]]
            state = optimizer.state[parameter]
            state["step"] = torch.zeros((), dtype=torch.float32, device=parameter.device)
            state |= {
                name: torch.zeros_like(parameter, memory_format=torch.preserve_format) for name in moments
            }
