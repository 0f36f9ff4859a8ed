"""States of torch's Adam and SGD as optax's, and back: the moments by the names of the parameters, and the count."""

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

# The fields of optax's states, and what torch calls them.
_ADAM = {"mu": "exp_avg", "nu": "exp_avg_sq"}
_TRACE = {"trace": "momentum_buffer"}


def to_optax(transformation: Any, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> Any:
    """Return the state of an optax transformation that goes on where ``torch.optim.Adam``, ``AdamW`` or ``SGD`` is.

    Its trees are the model's parameters, nested as ``isthmus.checkpoint.save`` writes them.
    """
    optax = importlib.import_module("optax")
    names = {parameter: name for name, parameter in model.named_parameters()}
    rows = {name: optimizer.state[p] for p, name in names.items() if optimizer.state.get(p)}
    known = {
        optax.ScaleByAdamState: lambda state: _adam(state, rows),
        optax.TraceState: lambda state: _filled(state, _TRACE, rows),
        optax.ScaleByScheduleState: lambda state: state._replace(count=_count(state.count, rows)),
    }
    params = {name: to_jax(p.detach()) for p, name in names.items()}
    with x64_if_needed(list(params.values())):
        first = transformation.init(nest(params))
        _only_state(first, optimizer)
        return _converted(first, known)


def _converted(first: Any, known: Mapping[type, Callable[[Any], Any]]) -> Any:
    def convert(state: Any) -> Any:
        if type(state) in known:
            return known[type(state)](state)
        raise IsthmusError(
            "isthmus.checkpoint.to_optax: the transformation has state other than that of Adam, momentum and schedules"
        )

    return jax.tree.map(convert, first, is_leaf=lambda value: type(value) in known)


def _adam(state: Any, rows: Mapping[str, Any]) -> Any:
    return _filled(state, _ADAM, rows)._replace(count=_count(state.count, rows))


def _filled(state: Any, fields: Mapping[str, str], rows: Mapping[str, Any]) -> Any:
    """Return a state with torch's moments; a parameter torch has none for keeps the zeros it starts with."""
    return state._replace(
        **{field: _tree(getattr(state, field), called, rows) for field, called in fields.items()}
    )


def _tree(zeros: Any, called: str, rows: Mapping[str, Any]) -> Any:
    def of(path: Any, zero: Any) -> Any:
        row = rows.get(jax.tree_util.keystr(path, simple=True, separator="."))
        if row is None:
            return zero
        if row.get(called) is None:
            raise IsthmusError(f"isthmus.checkpoint.to_optax: torch's optimizer has no {called}")
        return to_jax(row[called].detach()).astype(zero.dtype)

    return jax.tree_util.tree_map_with_path(of, zeros)


def _count(zero: Any, rows: Mapping[str, Any]) -> Any:
    """Return the steps made, which optax counts once and torch's Adam for each parameter."""
    counts = {float(row["step"]) if "step" in row else None for row in rows.values()} or {0.0}
    if len(counts) > 1 or None in counts:
        raise IsthmusError(
            f"isthmus.checkpoint.to_optax: optax counts steps, and torch's parameters made {counts} of them"
        )
    return jax.numpy.asarray(int(counts.pop() or 0), zero.dtype)


def _only_state(state: Any, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Return the one state of moments in an optax state by its fields; it must be what torch's optimizer keeps."""
    found, fields = list(_states(state)), _fields_of(optimizer)
    if [fields.keys() & one.keys() for one in found] != ([fields.keys()] if fields else []):
        kept = ", ".join(fields.values()) or "nothing"
        raise IsthmusError(
            f"isthmus.checkpoint: for torch's {kept} the optax state must have one state with "
            f"{', '.join(fields) or 'nothing'}; it has {[sorted(one) for one in found]}"
        )
    return found[0] if found else {}


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
    """Let ``torch.optim.Adam``, ``AdamW`` or ``SGD`` go on where an optax state is, or what ``load`` made of one."""
    fields, called = _only_state(state, optimizer), _fields_of(optimizer)
    names = {parameter: name for name, parameter in model.named_parameters()}
    rows: dict[int, dict[str, torch.Tensor]] = {}
    for n, parameter in enumerate(p for group in optimizer.param_groups for p in group["params"]):
        if parameter not in names:
            raise IsthmusError(
                "isthmus.checkpoint.from_optax: the optimizer has a parameter that the model has not"
            )
        rows[n] = {t: _tensor_at(fields[o], names[parameter], parameter) for o, t in called.items()}
        if "count" in fields:
            rows[n]["step"] = torch.tensor(float(fields["count"]))
    optimizer.load_state_dict({**optimizer.state_dict(), "state": rows})


def _states(tree: Any) -> Iterator[dict[str, Any]]:
    """Yield the states of Adam and of momentum by their fields, whether named tuples or dicts."""
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
    """Return what a nested dict has under a dotted name."""
    for part in name.split("."):
        if not isinstance(tree, Mapping) or part not in tree:
            raise IsthmusError(f"isthmus.checkpoint.from_optax: the optax state has nothing for {name}")
        tree = tree[part]
    found = tree if isinstance(tree, torch.Tensor) else from_jax(tree)
    if found.shape != like.shape:
        raise IsthmusError(
            f"isthmus.checkpoint.from_optax: {name} is {tuple(like.shape)}, in the optax state {tuple(found.shape)}"
        )
    return found  # type: ignore[no-any-return]
