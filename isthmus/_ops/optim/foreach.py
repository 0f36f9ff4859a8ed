"""Ops on lists of tensors: one program maps the lowering of the single-tensor op over the list."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import jax.numpy as jnp
from torch._ops import OpOverload

from isthmus._graph.names import Missing, aten
from isthmus._graph.schema import schema_of
from isthmus._ops.common import Array, Operand, Scalar, accumulation_dtype, cast
from isthmus._ops.elementwise import keyword_signature
from isthmus._ops.known_schemas import arguments_of
from isthmus._ops.registry import lowering, registry


def single(op: OpOverload, values: tuple[object, ...], keywords: Mapping[str, object]) -> Array:
    """Lower one call of a single-tensor op, looked up late: its family may be filed after this one."""
    return registry[op](schema_of(op).bind(values, dict(keywords)))  # type: ignore[no-any-return]


def _foreach(name: str, op: OpOverload | Missing, **order: str) -> None:
    """File ``_foreach_<name>``: each call takes the next item of every list, and the rest as it is.

    ``order`` names keywords of ``op`` for arguments that are not in the order of its schema.
    """
    packet, overload = name.split(".")
    listed = getattr(getattr(aten, f"_foreach_{packet}"), overload)
    if isinstance(listed, Missing) or isinstance(op, Missing):
        lowering(listed)(lambda: None)
        return
    arguments = arguments_of(listed)
    names = [a.name for a in arguments]
    lists = {a.name for a in arguments if a.kind in ("tensors", "scalars")}

    def lowered(**values: Sequence[Operand]) -> list[Array]:
        count = max(len(values[name]) for name in lists)
        results = []
        for index in range(count):
            call = {n: values[n][index] if n in lists else values[n] for n in names if n in values}
            keywords = {order[n]: call.pop(n) for n in list(call) if n in order}
            results.append(single(op, tuple(call.values()), keywords))
        return results

    lowered.__doc__ = f"``{op}`` of each tensor of the list."
    lowered.__signature__ = keyword_signature(names)  # type: ignore[attr-defined]
    lowering(listed, static=("ord",) if "ord" in names else ())(lowered)


UNARY = (
    "abs acos asin atan ceil cos cosh erf erfc exp expm1 floor frac lgamma log log10 log1p log2 neg reciprocal round "
    "rsqrt sigmoid sign sin sinh sqrt tan tanh trunc zero"
)
for _name in UNARY.split():
    _foreach(f"{_name}.default", getattr(aten, _name).default)

for _name in ("add", "sub"):
    _with_number = getattr(aten, _name).Scalar
    _foreach(f"{_name}.List", getattr(aten, _name).Tensor, alpha="alpha")
    _foreach(f"{_name}.Scalar", _with_number)
    _foreach(f"{_name}.ScalarList", _with_number)
_foreach("add.Tensor", aten.add.Tensor, alpha="alpha")
for _name in ("mul", "div"):
    for _overload, _single in {
        "List": "Tensor",
        "Tensor": "Tensor",
        "Scalar": "Scalar",
        "ScalarList": "Scalar",
    }.items():
        _foreach(f"{_name}.{_overload}", getattr(getattr(aten, _name), _single))
for _name, _clamp in {
    "clamp_min": aten.clamp_min,
    "clamp_max": aten.clamp_max,
    "maximum": aten.clamp_min,
    "minimum": aten.clamp_max,
}.items():
    _foreach(f"{_name}.Scalar", _clamp.default)
    _foreach(f"{_name}.ScalarList", _clamp.default)
_foreach("clamp_min.List", aten.maximum.default)
_foreach("clamp_max.List", aten.minimum.default)
_foreach("maximum.List", aten.maximum.default)
_foreach("minimum.List", aten.minimum.default)
_foreach("pow.List", aten.pow.Tensor_Tensor)
_foreach("pow.Scalar", aten.pow.Tensor_Scalar)
_foreach("pow.ScalarList", aten.pow.Tensor_Scalar)
_foreach("pow.ScalarAndTensor", aten.pow.Scalar)
_foreach("lerp.List", aten.lerp.Tensor)
_foreach("lerp.Scalar", aten.lerp.Scalar)
_foreach("lerp.ScalarList", aten.lerp.Scalar)
for _name in ("addcmul", "addcdiv"):
    _foreach(f"{_name}.Scalar", getattr(aten, _name).default, value="value")
    _foreach(f"{_name}.ScalarList", getattr(aten, _name).default, scalars="value")
_foreach("copy.default", aten.copy.default)
_foreach("clone.default", aten.clone.default, memory_format="memory_format")
_foreach("mm.default", aten.mm.default)
_foreach("max.default", aten.max.default)
_foreach("norm.Scalar", aten.linalg_vector_norm.default, dtype="dtype")


@lowering(aten._amp_foreach_non_finite_check_and_unscale.default)
def non_finite_check_and_unscale(
    self: list[Array], found_inf: Array, inv_scale: Array
) -> tuple[list[Array], Array]:
    """Gradients times ``inv_scale``, and 1 if any of them is not finite."""
    bad = [jnp.any(~jnp.isfinite(grad)) for grad in self]
    flag = jnp.any(jnp.stack(bad)) if bad else jnp.zeros((), bool)
    return [_unscale(g, inv_scale) for g in self], jnp.where(flag, jnp.ones((), found_inf.dtype), found_inf)


def _unscale(grad: Array, inv_scale: Array) -> Array:
    acc_dtype = accumulation_dtype(grad.dtype)
    return cast(grad.astype(acc_dtype) * cast(inv_scale, acc_dtype).reshape(()), grad.dtype)


_SCALING = ("scale_growth_factor", "scale_backoff_factor", "growth_interval")


@lowering(aten._amp_update_scale.default, dynamic=_SCALING)
def update_scale(
    self: Array,
    growth_tracker: Array,
    found_inf: Array,
    scale_growth_factor: Scalar,
    scale_backoff_factor: Scalar,
    growth_interval: Scalar,
) -> tuple[Array, Array]:
    """A smaller scale after a step that overflowed, a larger one after enough that did not."""
    overflowed = found_inf.reshape(self.shape) != 0
    steps = growth_tracker + 1
    due = steps == cast(growth_interval, growth_tracker.dtype)
    # torch multiplies in double precision and stores a float.
    scale64 = self.astype(jnp.float64)
    grown = cast(scale64 * cast(scale_growth_factor, jnp.float64), self.dtype)
    shrunk = cast(scale64 * cast(scale_backoff_factor, jnp.float64), self.dtype)
    grows = due.reshape(self.shape) & jnp.isfinite(grown)
    scale = jnp.where(overflowed, shrunk, jnp.where(grows, grown, self))
    return scale, jnp.where(overflowed.reshape(steps.shape) | due, jnp.zeros_like(steps), steps)
