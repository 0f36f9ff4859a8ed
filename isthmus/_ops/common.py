"""What families of lowerings share: promotion by torch's own rules, accumulation dtypes, dims."""

from __future__ import annotations

import contextlib
import inspect
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
import numpy as np
import torch
from torch._ops import OpOverload
from torch._prims_common import ELEMENTWISE_TYPE_PROMOTION_KIND as Promotion
from torch._prims_common import elementwise_dtypes

from isthmus._graph.names import Missing
from isthmus._ops.known_schemas import arguments_of
from isthmus._ops.registry import lowering
from isthmus._runtime import compiler
from isthmus._runtime.dtypes import to_jax_dtype, to_torch_dtype
from isthmus.errors import Unsupported

Array = Any
DEFAULT = Promotion.DEFAULT
NO_OPMATH = Promotion.NO_OPMATH
INT_TO_FLOAT = Promotion.INT_TO_FLOAT
ALWAYS_BOOL = Promotion.ALWAYS_BOOL
COMPLEX_TO_FLOAT = Promotion.COMPLEX_TO_FLOAT
BOOL_TO_LONG = Promotion.BOOL_TO_LONG


@dataclass(frozen=True)
class Number:
    """A Python number known only at run time: a 0-dim array, and the type it takes part in promotion as."""

    value: Array
    kind: type


def promote(*operands: Any, kind: Promotion = DEFAULT) -> tuple[np.dtype[Any], np.dtype[Any]]:
    """Return torch's (computation dtype, result dtype) for these arrays and numbers."""
    stand_ins = [_stand_in(operand) for operand in operands if operand is not None]
    compute, result = elementwise_dtypes(*stand_ins, type_promotion_kind=kind)
    return to_jax_dtype(compute), to_jax_dtype(result)


def _stand_in(operand: Any) -> Any:
    if isinstance(operand, Number):
        return operand.kind(1)
    if isinstance(operand, (bool, int, float, complex)):
        return operand
    return torch.empty((1,) * operand.ndim, dtype=to_torch_dtype(operand.dtype), device="meta")


def is_bool(operand: Any) -> bool:
    """Return whether an array or a number is of truth values."""
    if isinstance(operand, Number):
        return operand.kind is bool
    return isinstance(operand, bool) or getattr(operand, "dtype", None) == jnp.bool_


def cast(operand: Any, dtype: Any) -> Array:
    """Return an array or a number as an array of ``dtype``, converted as torch converts."""
    array = operand.value if isinstance(operand, Number) else jnp.asarray(operand)
    dtype = np.dtype(dtype)
    if array.dtype == dtype:
        return array
    if array.dtype == np.bool_ and jnp.issubdtype(dtype, jnp.inexact):
        # XLA takes a product with a converted bool for a choice, so that inf * False would be 0, not nan.
        return jnp.where(array, jnp.ones((), dtype), jnp.zeros((), dtype))
    if jnp.issubdtype(array.dtype, jnp.complexfloating) and not jnp.issubdtype(dtype, jnp.complexfloating):
        array = array.real if dtype != np.bool_ else array != 0
    if (
        jnp.issubdtype(array.dtype, jnp.floating)
        and jnp.issubdtype(dtype, jnp.integer)
        and dtype.itemsize < 8
    ):
        # torch truncates through int64 and wraps; XLA saturates.
        array = array.astype(jnp.int64)
    return array.astype(dtype)


class _Linear(threading.local):
    wanted = False


_linear = _Linear()


@contextlib.contextmanager
def linear() -> Iterator[None]:
    """Let lowerings of linear ops be linear to JAX's eyes, at the price of a rounding, to be transposed."""
    before, _linear.wanted = _linear.wanted, True
    try:
        yield
    finally:
        _linear.wanted = before


def divide(a: Array, b: Array) -> Array:
    """Divide, rounding once: by a number XLA would multiply by its reciprocal, and 287 / 41 be less than 7."""
    if not b.ndim and jnp.issubdtype(a.dtype, jnp.floating) and not _linear.wanted:
        b = jnp.where(jnp.isnan(a), jnp.ones_like(b), b)
    return jnp.true_divide(a, b)


def ordered(fn: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function of numbers that have an order; JAX has one for complex numbers, torch refuses them."""

    def checked(*given: Any) -> Array:
        if any(jnp.iscomplexobj(x) for x in given if x is not None):
            raise Unsupported("an order of complex numbers, which torch refuses as well")
        return fn(*given)

    return checked


def elementwise(
    op: OpOverload | Missing,
    function: Callable[..., Any],
    *,
    promote_as: Promotion = DEFAULT,
    static: Sequence[str] = (),
) -> None:
    """File ``function`` for ``op``: it gets the operands in the computation dtype, in the schema's order.

    Operands are the tensors and numbers of the schema; arguments named in ``static`` follow by keyword.
    """
    if isinstance(op, Missing):
        lowering(op)(function)
        return
    arguments = arguments_of(op)
    operands = [a.name for a in arguments if a.kind in ("tensor", "scalar") and a.name not in static]

    def lowered(**values: Any) -> Array:
        given = [values.pop(name) for name in operands if name in values]
        compute, result = promote(*given, kind=promote_as)
        inputs = [None if g is None else cast(g, compute) for g in given]
        return cast(function(*inputs, **values), result)

    lowered.__doc__ = function.__doc__
    lowered.__signature__ = keyword_signature([*operands, *static])  # type: ignore[attr-defined]
    lowered.__wrapped_function__ = function  # type: ignore[attr-defined]
    lowering(op, static=static)(lowered)


def keyword_signature(names: Sequence[str]) -> inspect.Signature:
    """Return a signature of these keyword parameters, for a lowering written as ``**values``."""
    kind = inspect.Parameter.KEYWORD_ONLY
    return inspect.Signature([inspect.Parameter(name, kind) for name in names])


def accumulation_dtype(dtype: Any) -> np.dtype[Any]:
    """Return the dtype torch accumulates ``dtype`` in: at least float32."""
    dtype = np.dtype(dtype)
    if dtype in (np.dtype(jnp.bfloat16), np.dtype(np.float16)):
        return np.dtype(np.float32)
    return dtype


def product_dtype(dtype: Any) -> np.dtype[Any]:
    """Return the dtype products of matrices and convolutions of ``dtype`` are asked for.

    Accelerators accumulate half types in float32 whatever the result is, and round it as they store it. On the CPU
    XLA accumulates in the dtype of the result.
    """
    return accumulation_dtype(dtype) if compiler.platform() == "cpu" else np.dtype(dtype)


def wrap_dim(dim: int, ndim: int) -> int:
    """Return ``dim`` counted from the front; a 0-dim tensor has one dim to name."""
    count = max(ndim, 1)
    if not -count <= dim < count:
        expected = f"expected to be in range of [{-count}, {count - 1}]"
        raise IndexError(f"Dimension out of range ({expected}, but got {dim})")
    return dim % count


def wrap_dims(dim: int | Sequence[int] | None, ndim: int) -> tuple[int, ...]:
    """Return the named dims, all of them where none is named."""
    if dim is None or (not isinstance(dim, int) and len(dim) == 0):
        return tuple(range(ndim))
    dims = (dim,) if isinstance(dim, int) else tuple(dim)
    return tuple(wrap_dim(d, ndim) for d in dims) if ndim else ()
