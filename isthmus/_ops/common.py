"""What every family of lowerings shares: the array type, torch's promotion rules, casts, accumulation dtypes, dims.

``cast`` is the one conversion between dtypes: XLA saturates and flushes where torch's CPU kernels wrap and round, so a
plain ``astype`` to an integer, from a bool or to a float8 gives other numbers. ``promote`` asks torch itself.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
import torch
from jax import lax
from jax.typing import DTypeLike

from isthmus._graph.promotion import Promotion, elementwise_dtypes
from isthmus._runtime import compiler
from isthmus._runtime.dtypes import to_jax_dtype, to_torch_dtype

Array = jax.Array
DType = np.dtype[np.generic]  # type: ignore[explicit-any]  # numpy's own default
HostArray = npt.NDArray[Any]  # type: ignore[explicit-any]  # of any dtype, for which numpy has no other word
"""A numpy array: what a lowering computes while it is traced, such as windows and weights that sizes decide."""
ArrayFunction = Callable[..., Array]  # type: ignore[explicit-any]  # the schemas differ
"""A function that returns one array, whatever the schema of its op calls for."""
Ints = Sequence[int]
# ml_dtypes adds them to numpy; which there are depends on JAX's version.
FLOAT8 = frozenset(np.dtype(getattr(jnp, name)) for name in dir(jnp) if name.startswith("float8_"))
DEFAULT = Promotion.DEFAULT
NO_OPMATH = Promotion.NO_OPMATH
INT_TO_FLOAT = Promotion.INT_TO_FLOAT
ALWAYS_BOOL = Promotion.ALWAYS_BOOL
COMPLEX_TO_FLOAT = Promotion.COMPLEX_TO_FLOAT
BOOL_TO_LONG = Promotion.BOOL_TO_LONG

Dtypes = tuple[type, ...]
"""Scalar types as ``jnp.issubdtype`` takes them: what a lowering's ``dtypes=`` admits."""
FLOATING: Dtypes = (jnp.floating,)
INEXACT: Dtypes = (jnp.inexact,)
REAL: Dtypes = (jnp.floating, jnp.integer, np.bool_)
FLOAT32_OR_64: Dtypes = (np.float32, np.float64)
LAPACK: Dtypes = (np.float32, np.float64, np.complex64, np.complex128)


@dataclass(frozen=True)
class Number:
    """A Python number known only at run time: a 0-dim array, and the type it takes part in promotion as."""

    value: Array
    kind: type


Scalar = Number | bool | int | float | complex
"""A ``Scalar`` argument: a ``Number`` in a program, a Python number where one lowering calls another."""
Operand = Array | Scalar


def promote(*operands: Operand | None, kind: Promotion = DEFAULT) -> tuple[DType, DType]:
    """Return torch's (computation dtype, result dtype) for these arrays and numbers; None takes no part."""
    stand_ins = [_stand_in(operand) for operand in operands if operand is not None]
    compute, result = elementwise_dtypes(*stand_ins, type_promotion_kind=kind)
    return to_jax_dtype(compute), to_jax_dtype(result)


def _stand_in(operand: Operand) -> torch.Tensor | bool | int | float | complex:
    if isinstance(operand, Number):
        return operand.kind(1)  # type: ignore[no-any-return]
    if isinstance(operand, (bool, int, float, complex)):
        return operand
    return torch.empty((1,) * operand.ndim, dtype=to_torch_dtype(operand.dtype), device="meta")


def is_bool(operand: Operand) -> bool:
    """Return whether an array or a number is of truth values."""
    if isinstance(operand, Number):
        return operand.kind is bool
    return isinstance(operand, bool) or getattr(operand, "dtype", None) == jnp.bool_


def cast(operand: Operand | HostArray, dtype: DTypeLike) -> Array:
    """Return an array or a number as an array of ``dtype``, converted as torch converts."""
    array = operand.value if isinstance(operand, Number) else jnp.asarray(operand)
    dtype = np.dtype(dtype)
    if array.dtype == dtype:
        return array
    if dtype in FLOAT8 or array.dtype in FLOAT8:
        return _through_float32(array, dtype)
    if array.dtype == np.bool_ and jnp.issubdtype(dtype, jnp.inexact):
        # XLA takes a product with a converted bool for a choice, so that inf * False would be 0, not nan.
        return jnp.where(array, jnp.ones((), dtype), jnp.zeros((), dtype))
    if jnp.issubdtype(array.dtype, jnp.complexfloating) and not jnp.issubdtype(dtype, jnp.complexfloating):
        array = array.real if dtype != np.bool_ else array != 0
    if jnp.issubdtype(array.dtype, jnp.floating) and jnp.issubdtype(dtype, jnp.integer):
        return _truncated(array, dtype)
    return array.astype(dtype)


def _truncated(array: Array, dtype: DType) -> Array:
    """Return floats as integers, where they do not fit as x86 converts them; XLA saturates and makes 0 of a nan.

    The processor has instructions for int32 and int64, which give the least integer for all that is out of range,
    nan included. Smaller types are the low bits of one of them; an uint32 and an uint8 are those of an int64.
    """
    integer_dtype = np.dtype(np.int32 if dtype.name in ("int8", "int16", "uint16", "int32") else np.int64)
    limit = 2.0 ** (8 * integer_dtype.itemsize - 1)
    if array.dtype.itemsize < 4:
        array = array.astype(jnp.float32)  # a float16 has no such limit
    # A comparison with nan is false, so nan takes the least integer too.
    inside = (array >= -limit) & (array < limit)
    whole = jnp.where(inside, array.astype(integer_dtype), jnp.iinfo(integer_dtype).min).astype(dtype)
    if dtype != np.uint64:
        return whole
    # Above int64 the compiler subtracts its limit first; what is out of range then is 0.
    return jnp.where(
        array >= limit, jnp.where(array < 2 * limit, array.astype(dtype), jnp.zeros((), dtype)), whole
    )


def _through_float32(array: Array, dtype: DType) -> Array:
    """Return float8s as another type or another type as float8s: torch converts by way of float32, and saturates."""
    if array.dtype not in FLOAT8:
        floats = cast(array, jnp.float32)
    elif array.dtype.name == "float8_e8m0fnu" and dtype.name in ("float64", "complex128", "bool"):
        # XLA flushes 2**-127, a denormal float32; so the exponent is put where a float64 has its own.
        bits = (lax.bitcast_convert_type(array, jnp.uint8).astype(jnp.uint64) + (1023 - 127)) << 52
        floats = jnp.where(jnp.isnan(array), jnp.nan, lax.bitcast_convert_type(bits, jnp.float64))
    else:
        floats = array.astype(jnp.float32)
        if jnp.issubdtype(dtype, jnp.integer) and array.dtype.name.endswith(("fnu", "fnuz")):
            # Their only nan is a constant to torch's compiler, which makes 0 of it.
            floats = jnp.where(jnp.isnan(floats), 0, floats)
    if dtype not in FLOAT8:
        return cast(floats, dtype)
    if dtype.name == "float8_e8m0fnu":
        return _exponents(floats, array)
    if dtype.name.endswith("fnuz"):
        # XLA joins two conversions to one, and that makes nan of negative numbers that round to 0: it has no -0.
        floats = jnp.where(abs(floats) <= float(jnp.finfo(dtype).smallest_subnormal) / 2, 0.0, floats)
    if dtype.name == "float8_e4m3fn":
        largest = float(jnp.finfo(dtype).max)
        if _saturates():
            floats = jnp.where(jnp.isnan(floats), floats, jnp.clip(floats, -largest, largest))
        else:
            # Past 464, half a step above the largest, there is only nan. XLA joins the conversion with one from
            # float16 before it, and that makes -0 of 496.
            floats = jnp.where(jnp.abs(floats) > 464, jnp.copysign(jnp.inf, floats), floats)
    return floats.astype(dtype)


@functools.cache
def _saturates() -> bool:
    """Return whether torch makes the largest float8_e4m3fn of what is larger; older versions made nan of it."""
    return not torch.tensor(1e4).to(torch.float8_e4m3fn).float().isnan().item()


def _exponents(floats: Array, array: Array) -> Array:
    """Return float32s as powers of two, rounded to the nearest, ties up; the sign is dropped, as torch does."""
    # A float8_e8m0fnu is the exponent field of a float32 and nothing else.
    bits = lax.bitcast_convert_type(floats, jnp.uint32)
    exponent = (bits >> 23) & 0xFF
    guard, rest = (bits & 0x400000) != 0, (bits & 0x3FFFFF) != 0
    # A tie goes up unless the exponent is 0, where the float32 is denormal.
    up = guard & (rest | (exponent > 0)) & (exponent < 0xFF)
    rounded = (exponent + up).astype(jnp.uint8)
    if array.dtype == np.float64:
        # XLA flushes what is denormal as a float32; torch rounds it, to 2**-127 or 2**-126.
        rounded = jnp.where(abs(array) < 2.0**-126, abs(array) > 2.0**-127 + 2.0**-150, rounded).astype(
            jnp.uint8
        )
    return lax.bitcast_convert_type(rounded, jnp.float8_e8m0fnu)


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
    # XLA cannot tell that the divisor is the same for every element once it depends on ``a``.
    if not b.ndim and jnp.issubdtype(a.dtype, jnp.floating) and not _linear.wanted:
        b = jnp.where(jnp.isnan(a), jnp.ones_like(b), b)
    return jnp.true_divide(a, b)


def accumulation_dtype(dtype: DTypeLike) -> DType:
    """Return the dtype torch accumulates ``dtype`` in: at least float32."""
    dtype = np.dtype(dtype)
    # Complex types stay as they are: JAX has no half of them.
    if dtype in (np.dtype(jnp.bfloat16), np.dtype(np.float16)):
        return np.dtype(np.float32)
    return dtype


def product_dtype(dtype: DTypeLike) -> DType:
    """Return the dtype products of matrices and convolutions of ``dtype`` are asked for.

    Accelerators accumulate half types in float32 whatever the result is, and round it as they store it. On the CPU
    XLA accumulates in the dtype of the result.
    """
    return accumulation_dtype(dtype) if compiler.platform() == "cpu" else np.dtype(dtype)


@functools.cache
def _dimension() -> type:
    from jax import export

    # JAX's class of symbolic dimensions has no public name.
    return type(export.symbolic_shape("n")[0])


def is_dimension(value: object) -> bool:
    """Return whether a size is a symbol of JAX's, known only when a program for many sizes runs."""
    return isinstance(value, _dimension())


def numbers(*sizes: object) -> ModuleType:
    """Return the module that computes with these sizes: numpy, or ``jax.numpy`` where one of them is a symbol."""
    return jnp if any(map(is_dimension, sizes)) else np


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


def each_dim(value: Ints, n: int) -> list[int]:
    """Return one value per spatial dim: torch lets one stand for all."""
    return list(value) * n if len(value) == 1 else list(value)


def transpose_of(function: Callable[[Array], Array], shape: Ints, dtype: DTypeLike, grad: Array) -> Array:
    """Return the transpose of a linear function of an array of this shape and dtype, applied to ``grad``."""
    like = jax.ShapeDtypeStruct(tuple(shape), dtype)  # type: ignore[no-untyped-call]
    (out,) = jax.linear_transpose(function, like)(grad)
    return out


def rounded(x: Array, dtype: DTypeLike) -> Array:
    """Return ``x`` with the precision of ``dtype``: a conversion there and back may be left out by XLA."""
    info = jnp.finfo(dtype)
    if accumulation_dtype(dtype) == dtype:
        return x
    return jax.lax.reduce_precision(x, info.nexp, info.nmant)
