"""``isthmus.train_step``: forward, backward and the optimizer's step as one program.

The step is plain torch code (``_step``) under ``isthmus.jit``: the first call records it lazily, later calls replay the
program. Three things are arranged so that the first recording is one that can be replayed:

- step counts of torch's optimizers, which torch keeps on the CPU, live on the device (``capturable``);
- the optimizer's state exists before the first step, since a recording that makes it is not one that reads it;
- gradients are dropped at the end (``p.grad`` is None), so that they need not leave the program.

With ``accumulate=n`` the n parts of a batch are unrolled into the same program. ``remat`` is in ``remat.py``.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from isthmus._device.torch_glue.pytree import tree_flatten, tree_map, tree_unflatten
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
        model: a module on "jax".
        loss_fn: ``loss_fn(model, *batch)`` returns the loss, or a tuple that begins with it.
        optimizer: an optimizer of torch's, or an ``isthmus.optax.Optimizer``, of the model's parameters.
        accumulate: split the batch along its first dimension into so many parts and average their gradients and
            losses.
        remat: modules of the model, or their classes, that save their arguments alone for backward and compute the
            rest again.

    Returns:
        ``step(*batch)``: the result of ``loss_fn``, detached. With ``accumulate``, scalars are averaged (integers
        added), and other tensors joined along their first dimension.

    Example:
        >>> import isthmus, torch
        >>> model = torch.nn.Linear(2, 1).to("jax")
        >>> sgd = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> step = isthmus.train_step(model, lambda model, x: model(x).square().mean(), sgd)
        >>> x = torch.ones(4, 2, device="jax")
        >>> first, second = step(x).item(), step(x).item()
        >>> second < first
        True
    """
    if not isinstance(optimizer, Optimizer):
        raise TypeError(
            f"train_step: optimizer is a {type(optimizer).__name__}, not a torch.optim.Optimizer; a transformation of "
            f"optax's becomes one by isthmus.optax.Optimizer(model.parameters(), transformation)"
        )
    _move_step_counts(optimizer)
    _create_state(optimizer)
    modules = list(dict.fromkeys(_modules_of(model, remat)))
    install.install()
    # jit looks for a step's modules and optimizers in the arguments of a partial, as in closures.
    return Jitted(functools.partial(_step, model, loss_fn, optimizer, accumulate, modules), True, ())


def _step(
    model: nn.Module,
    loss_fn: Callable[..., Any],
    optimizer: Optimizer,
    accumulate: int,
    remat: list[nn.Module],
    *args: Any,
    **kwargs: Any,
) -> Any:
    optimizer.zero_grad(set_to_none=True)
    results = []
    for part_args, part_kwargs in _split((args, kwargs), accumulate):
        with rematerialized(remat):
            out = loss_fn(model, *part_args, **part_kwargs)
            loss = out[0] if isinstance(out, tuple) else out
            if not isinstance(loss, Tensor):
                raise TypeError(
                    f"train_step: loss_fn returned a {type(loss).__name__}; it must return the loss, or a tuple that "
                    f"begins with it"
                )
            (loss / accumulate if accumulate > 1 else loss).backward()
        results.append(tree_map(_detached, out))
    optimizer.step()
    # A gradient that a parameter holds at the end would be an output of the program.
    optimizer.zero_grad(set_to_none=True)
    return results[0] if accumulate == 1 else tree_map(_joined, *results)


def _detached(value: Any) -> Any:
    return value.detach() if isinstance(value, Tensor) else value


def _joined(*values: Any) -> Any:
    """Return the results of the parts as one: floating-point scalars averaged, integers added, tensors concatenated."""
    if not isinstance(values[0], Tensor):
        return values[0]
    if values[0].dim():
        return torch.cat(values)
    return torch.stack(values).mean(0) if values[0].is_floating_point() else torch.stack(values).sum(0)


def _split(batch: Any, count: int) -> list[Any]:
    """Return a batch in parts along its first dimension; scalars and other values are in every part."""
    if count == 1:
        return [batch]
    leaves, spec = tree_flatten(batch)
    chunks = [
        _chunks(leaf, count) if isinstance(leaf, Tensor) and leaf.dim() else [leaf] * count for leaf in leaves
    ]
    return [tree_unflatten([parts[n] for parts in chunks], spec) for n in range(count)]


def _chunks(tensor: Tensor, count: int) -> list[Tensor]:
    if len(tensor) % count:
        raise ValueError(
            f"train_step: a batch of {len(tensor)} cannot be split into {count} parts of one size"
        )
    return list(tensor.chunk(count))


def _modules_of(model: nn.Module, remat: Modules) -> Iterator[nn.Module]:
    """Yield the modules that ``remat`` names, by class or one by one; each must be in the model."""
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


def _move_step_counts(optimizer: Optimizer) -> None:
    """Move a torch optimizer's step counts to the device, where a program can change them."""
    for group in optimizer.param_groups:
        if not group.get("capturable", True):
            group["capturable"] = True
        for parameter in group["params"]:
            step = optimizer.state.get(parameter, {}).get("step")
            if isinstance(step, Tensor):
                optimizer.state[parameter]["step"] = step.to(parameter.device)


def _create_state(optimizer: Optimizer) -> None:
    """Create the state that the first step would create, for optimizers whose state is known."""
    if hasattr(optimizer, "start"):  # isthmus.optax.Optimizer
        optimizer.start()
    if type(optimizer) not in (torch.optim.Adam, torch.optim.AdamW):
        return
    # As Adam's _init_group does (torch 2.13), for parameters that a first backward may give a gradient.
    for group in optimizer.param_groups:
        for parameter in [p for p in group["params"] if p.requires_grad and not optimizer.state.get(p)]:
            moments = ["exp_avg", "exp_avg_sq", *["max_exp_avg_sq"] * group["amsgrad"]]
            state = optimizer.state[parameter]
            state["step"] = torch.zeros((), dtype=torch.float32, device=parameter.device)
            state |= {
                name: torch.zeros_like(parameter, memory_format=torch.preserve_format) for name in moments
            }
