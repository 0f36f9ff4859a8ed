"""``isthmus.checkpoint.to_optax`` and ``from_optax``: the state of torch's Adam, AdamW and SGD as optax's, and back.

Both libraries keep the same numbers under other names and in another shape. torch has a row for each parameter, optax a
pytree of the parameters for each moment::

    torch   optimizer.state[weight] = {"step": 3, "exp_avg": m, "exp_avg_sq": v}
    optax   ScaleByAdamState(count=3, mu={"0": {"weight": m}}, nu={"0": {"weight": v}})

Transformations are chains, so an optax state is searched for the one state with moments. A state that ``load`` read has
lost its classes (named tuples are dicts then), so ``from_optax`` goes by the names of the fields alone.
Settings such as the learning rate are no part of either state.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import torch

from isthmus._interop.arrays import from_jax, to_jax
from isthmus._interop.checkpoints import nest
from isthmus._interop.traced_functions import x64_if_needed
from isthmus.errors import IsthmusError

# The fields of optax's states, and torch's names for them.
_ADAM = {"mu": "exp_avg", "nu": "exp_avg_sq"}
_TRACE = {"trace": "momentum_buffer"}


def to_optax(transformation: Any, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> Any:
    """Return the state with which an optax transformation continues the training of a torch optimizer.

    Arguments:
        transformation: the ``optax.GradientTransformation`` that is to go on, such as ``optax.adam(1e-3)``.
        model: the module that the optimizer's parameters belong to.
        optimizer: ``torch.optim.Adam``, ``AdamW`` or ``SGD``.

    Returns:
        The transformation's state. Its trees have the model's parameters, nested as ``isthmus.checkpoint.save`` writes
        them: ``{"0": {"weight": ...}}``.

    Example:
        >>> import optax, isthmus, torch
        >>> model = torch.nn.Linear(2, 1).to("jax")
        >>> adam = torch.optim.Adam(model.parameters())
        >>> model(torch.ones(1, 2, device="jax")).sum().backward()
        >>> adam.step()
        >>> int(isthmus.checkpoint.to_optax(optax.adam(1e-3), model, adam)[0].count)
        1
    """
    optax = importlib.import_module("optax")
    names = {parameter: name for name, parameter in model.named_parameters()}
    rows = {name: optimizer.state[p] for p, name in names.items() if optimizer.state.get(p)}
    converters = {
        optax.ScaleByAdamState: lambda state: _adam(state, rows),
        optax.TraceState: lambda state: _with_moments(state, _TRACE, rows),
        optax.ScaleByScheduleState: lambda state: state._replace(count=_count(state.count, rows)),
    }
    params = {name: to_jax(p.detach()) for p, name in names.items()}
    with x64_if_needed(list(params.values())):
        initial = transformation.init(nest(params))
        _moments_state(initial, optimizer)  # raises where the optimizer has other moments
        return _converted(initial, converters)


def _converted(initial: Any, converters: Mapping[type, Callable[[Any], Any]]) -> Any:
    """Return an optax state with each state of a known class replaced by what its converter returns."""

    def convert(state: Any) -> Any:
        if type(state) in converters:
            return converters[type(state)](state)
        # A leaf outside of the known classes: its value in torch is not known.
        raise IsthmusError(
            "isthmus.checkpoint.to_optax: the transformation has state other than that of Adam, momentum and schedules"
        )

    return jax.tree.map(convert, initial, is_leaf=lambda value: type(value) in converters)


def _adam(state: Any, rows: Mapping[str, Any]) -> Any:
    return _with_moments(state, _ADAM, rows)._replace(count=_count(state.count, rows))


def _with_moments(state: Any, fields: Mapping[str, str], rows: Mapping[str, Any]) -> Any:
    """Return a state with torch's moments; a parameter torch has none for keeps the zeros it starts with."""
    return state._replace(
        **{field: _moment(getattr(state, field), name, rows) for field, name in fields.items()}
    )


def _moment(zeros: Any, torch_name: str, rows: Mapping[str, Any]) -> Any:
    """Return one moment of every parameter, in the pytree of ``zeros``."""

    def of_parameter(path: Any, zero: jax.Array) -> jax.Array:
        row = rows.get(jax.tree_util.keystr(path, simple=True, separator="."))
        if row is None:
            return zero
        if row.get(torch_name) is None:
            raise IsthmusError(f"isthmus.checkpoint.to_optax: torch's optimizer has no {torch_name}")
        # optax may keep a moment in another dtype than the parameter (mu_dtype).
        array: jax.Array = to_jax(row[torch_name].detach()).astype(zero.dtype)
        return array

    return jax.tree_util.tree_map_with_path(of_parameter, zeros)


def _count(zero: Any, rows: Mapping[str, Any]) -> Any:
    """Return the number of steps, which optax counts once and torch's Adam for each parameter."""
    counts = {float(row["step"]) if "step" in row else None for row in rows.values()} or {0.0}
    if len(counts) > 1 or None in counts:
        raise IsthmusError(
            f"isthmus.checkpoint.to_optax: optax counts steps, and torch's parameters made {counts} of them"
        )
    return jax.numpy.asarray(int(counts.pop() or 0), zero.dtype)


def _moments_state(state: Any, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Return the one state with moments in an optax state, by its fields, or {} for an optimizer without moments.

    Its moments must be those of torch's optimizer.
    """
    states, fields = list(_states(state)), _fields_of(optimizer)
    if [fields.keys() & one.keys() for one in states] != ([fields.keys()] if fields else []):
        moments = ", ".join(fields.values()) or "nothing"
        raise IsthmusError(
            f"isthmus.checkpoint: for torch's {moments} the optax state must have one state with "
            f"{', '.join(fields) or 'nothing'}; it has {[sorted(one) for one in states]}"
        )
    return states[0] if states else {}


def _fields_of(optimizer: torch.optim.Optimizer) -> dict[str, str]:
    """Return the moments an optimizer keeps, by their names in optax and in torch."""
    group = optimizer.param_groups[0]
    if isinstance(optimizer, (torch.optim.Adam, torch.optim.AdamW)) and not group["amsgrad"]:
        return _ADAM
    if isinstance(optimizer, torch.optim.SGD):
        return _TRACE if group["momentum"] else {}
    kind = type(optimizer).__name__ + (" with amsgrad" if group.get("amsgrad") else "")
    raise IsthmusError(
        f"isthmus.checkpoint: {kind} has no state in common with optax; Adam, AdamW and SGD have"
    )


def from_optax(state: Any, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Load an optax state into a torch optimizer, which then continues the training.

    Arguments:
        state: the state of a transformation with the moments of the optimizer, or what ``load`` read of one. Its trees
            have the model's parameters, nested: ``{"0": {"weight": ...}}``.
        model: the module that the optimizer's parameters belong to.
        optimizer: ``torch.optim.Adam``, ``AdamW`` or ``SGD``; it is changed.

    Example:
        >>> import jax.numpy as jnp, optax, torch, isthmus
        >>> model = torch.nn.Linear(2, 1).to("jax")
        >>> optimizer = torch.optim.Adam(model.parameters())
        >>> params = {"weight": jnp.ones((1, 2)), "bias": jnp.ones(1)}
        >>> isthmus.checkpoint.from_optax(optax.adam(1e-3).init(params), model, optimizer)
        >>> optimizer.state[model.bias]["exp_avg"].tolist()
        [0.0]
    """
    moments, torch_names = _moments_state(state, optimizer), _fields_of(optimizer)
    names = {parameter: name for name, parameter in model.named_parameters()}
    rows: dict[int, dict[str, torch.Tensor]] = {}
    for n, parameter in enumerate(p for group in optimizer.param_groups for p in group["params"]):
        if parameter not in names:
            raise IsthmusError(
                "isthmus.checkpoint.from_optax: the optimizer has a parameter that the model has not"
            )
        rows[n] = {
            torch_name: _tensor_at(moments[field], names[parameter], parameter)
            for field, torch_name in torch_names.items()
        }
        if "count" in moments:
            rows[n]["step"] = torch.tensor(float(moments["count"]))
    optimizer.load_state_dict({**optimizer.state_dict(), "state": rows})


def _states(tree: Any) -> Iterator[dict[str, Any]]:
    """Yield the states of Adam and of momentum, named tuples or dicts, as dicts of their fields."""
    if hasattr(tree, "_asdict"):
        tree = tree._asdict()
    if isinstance(tree, Mapping):
        if _ADAM.keys() <= tree.keys() or _TRACE.keys() <= tree.keys():
            yield dict(tree)
            return
        tree = list(tree.values())
    if isinstance(tree, (list, tuple)):
        for inner in tree:
            yield from _states(inner)


def _tensor_at(tree: Any, name: str, like: torch.Tensor) -> torch.Tensor:
    """Return the tensor that a nested dict has under a dotted name; its shape must be that of ``like``."""
    for part in name.split("."):
        if not isinstance(tree, Mapping) or part not in tree:
            raise IsthmusError(f"isthmus.checkpoint.from_optax: the optax state has nothing for {name}")
        tree = tree[part]
    tensor: torch.Tensor = tree if isinstance(tree, torch.Tensor) else from_jax(tree)
    if tensor.shape != like.shape:
        raise IsthmusError(
            f"isthmus.checkpoint.from_optax: {name} is {tuple(like.shape)}, in the optax state {tuple(tensor.shape)}"
        )
    return tensor
