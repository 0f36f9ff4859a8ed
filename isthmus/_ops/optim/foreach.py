"""Ops on lists of tensors: one program maps the lowering of the single-tensor op over the list."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import jax.numpy as jnp

from isthmus._graph.names import Missing, aten
from isthmus._graph.private import Op
from isthmus._graph.schema import schema_of
from isthmus._ops.common import Array, Operand, Scalar, accumulation_dtype, cast
from isthmus._ops.elementwise import keyword_signature
from isthmus._ops.known_schemas import arguments_of
from isthmus._ops.registry import lowering, registry


def single(op: Op, values: tuple[object, ...], keywords: Mapping[str, object]) -> Array:
    """Lower one call of a single-tensor op, looked up late: its family may be imported after this one."""
    return registry[op](schema_of(op).bind(values, dict(keywords)))  # type: ignore[no-any-return]


def _foreach(op: Op | Missing, *names: str, **order: str) -> None:
    """Register each ``_foreach_<name>``: each call takes the next item of every list, and the rest as it is.

    ``order`` names keywords of ``op`` for arguments that are not in the order of its schema.
    """
    for name in names:
        packet, overload = name.split(".")
        listed = getattr(getattr(aten, f"_foreach_{packet}"), overload)
        if isinstance(listed, Missing) or isinstance(op, Missing):
            lowering(listed)(lambda: None)
        else:
            _register_list(listed, op, order)


def _register_list(listed: Op, op: Op, order: dict[str, str]) -> None:
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

    lowered.__signature__ = keyword_signature(names)  # type: ignore[attr-defined]
    lowering(listed, static=("ord",) if "ord" in names else ())(lowered)


UNARY = (
    "abs acos asin atan ceil cos cosh erf erfc exp expm1 floor frac lgamma log log10 log1p log2 neg reciprocal round "
    "rsqrt sigmoid sign sin sinh sqrt tan tanh trunc zero"
)
for _name in UNARY.split():
    _foreach(getattr(aten, _name).default, f"{_name}.default")
_foreach(aten.add.Tensor, "add.List", "add.Tensor", alpha="alpha")
_foreach(aten.sub.Tensor, "sub.List", alpha="alpha")
for _name in ("add", "sub", "mul", "div"):
    _foreach(getattr(aten, _name).Scalar, f"{_name}.Scalar", f"{_name}.ScalarList")
_foreach(aten.mul.Tensor, "mul.List", "mul.Tensor")
_foreach(aten.div.Tensor, "div.List", "div.Tensor")
for _name in ("clamp_min", "maximum"):
    _foreach(aten.clamp_min.default, f"{_name}.Scalar", f"{_name}.ScalarList")
    _foreach(aten.maximum.default, f"{_name}.List")
for _name in ("clamp_max", "minimum"):
    _foreach(aten.clamp_max.default, f"{_name}.Scalar", f"{_name}.ScalarList")
    _foreach(aten.minimum.default, f"{_name}.List")
_foreach(aten.pow.Tensor_Tensor, "pow.List")
_foreach(aten.pow.Tensor_Scalar, "pow.Scalar", "pow.ScalarList")
_foreach(aten.pow.Scalar, "pow.ScalarAndTensor")
_foreach(aten.lerp.Tensor, "lerp.List")
_foreach(aten.lerp.Scalar, "lerp.Scalar", "lerp.ScalarList")
for _name in ("addcmul", "addcdiv"):
    # The list of numbers comes last in the list's schema; of the single op it is the keyword ``value``.
    _foreach(getattr(aten, _name).default, f"{_name}.Scalar", value="value")
    _foreach(getattr(aten, _name).default, f"{_name}.ScalarList", scalars="value")
_foreach(aten.copy.default, "copy.default")
_foreach(aten.clone.default, "clone.default", memory_format="memory_format")
_foreach(aten.mm.default, "mm.default")
_foreach(aten.max.default, "max.default")
_foreach(aten.linalg_vector_norm.default, "norm.Scalar", dtype="dtype")


@lowering(aten._amp_foreach_non_finite_check_and_unscale.default)
def non_finite_check_and_unscale(
    self: list[Array], found_inf: Array, inv_scale: Array
) -> tuple[list[Array], Array]:
    """Gradients times ``inv_scale``, and 1 if any of them is not finite."""
    bad = [jnp.any(~jnp.isfinite(grad)) for grad in self]
    flag = jnp.any(jnp.stack(bad)) if bad else jnp.zeros((), bool)
    dtypes = [accumulation_dtype(grad.dtype) for grad in self]
    pairs = zip(self, dtypes, strict=True)
    grads = [cast(g.astype(d) * cast(inv_scale, d).reshape(()), g.dtype) for g, d in pairs]
    return grads, jnp.where(flag, jnp.ones((), found_inf.dtype), found_inf)


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
    # A scale that would overflow stays as it is.
    grown = cast(scale64 * cast(scale_growth_factor, jnp.float64), self.dtype)
    shrunk = cast(scale64 * cast(scale_backoff_factor, jnp.float64), self.dtype)
    grows = due.reshape(self.shape) & jnp.isfinite(grown)
    scale = jnp.where(overflowed, shrunk, jnp.where(grows, grown, self))
    return scale, jnp.where(overflowed.reshape(steps.shape) | due, jnp.zeros_like(steps), steps)
