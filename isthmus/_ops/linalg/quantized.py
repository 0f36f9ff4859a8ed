"""Products of matrices held in eight bits: accumulated wide, scaled, then rounded once."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import torch
from jax.typing import DTypeLike

from isthmus._graph.names import aten
from isthmus._ops.common import Array, cast
from isthmus._ops.registry import lowering
from isthmus.errors import Unsupported

_FLOAT8 = {np.dtype(t) for t in (jnp.float8_e4m3fn, jnp.float8_e5m2)}
_TENSORWISE, _ROWWISE = 0, 1  # torch.nn.functional.ScalingType


def _product(a: Array, b: Array, dtype: DTypeLike) -> Array:
    """Multiply matrices of narrow types as they are, accumulating in ``dtype``."""
    return jax.lax.dot_general(a, b, (((1,), (0,)), ((), ())), preferred_element_type=dtype)


@lowering(aten._int_mm.default)
def int_mm(self: Array, mat2: Array) -> Array:
    """The int32 product of 8-bit integers."""
    if self.dtype not in (np.int8, np.uint8) or mat2.dtype != np.int8:
        raise Unsupported(f"no 8-bit product of {self.dtype} and {mat2.dtype}")
    return _product(self, mat2, jnp.int32)


@lowering(aten._weight_int8pack_mm.default, matmul=True)
def weight_int8pack_mm(self: Array, mat2: Array, scales: Array) -> Array:
    """Multiply by the transpose of an int8 weight whose rows have a scale each."""
    if mat2.dtype != np.int8 or self.dtype.itemsize > 4 or scales.dtype != self.dtype:
        raise Unsupported(f"no product of {self.dtype} and {mat2.dtype} with scales in {scales.dtype}")
    # In float32 every product of an int8 and a half type is exact.
    operands = self.astype(jnp.float32), mat2.T.astype(jnp.float32)
    products = jnp.matmul(*operands, precision="highest", preferred_element_type=jnp.float32)
    return cast(products * scales.astype(jnp.float32), self.dtype)


def _check_scales(a: Array, b: Array, scale_a: Array, scale_b: Array) -> None:
    """Leave to the CPU, which may refuse them, types and scales other than one or one per row and column."""
    if a.dtype not in _FLOAT8 or b.dtype not in _FLOAT8:
        raise Unsupported(f"no scaled product of {a.dtype} and {b.dtype}")
    # A tensor of one row has one scale in either reading, and both give the same product.
    single = scale_a.size == 1 and scale_b.size == 1
    rowwise = scale_a.shape == (a.shape[0], 1) and scale_b.shape == (1, b.shape[1])
    if not (single or rowwise) or scale_a.dtype != np.float32 or scale_b.dtype != np.float32:
        raise Unsupported(f"no scales of {scale_a.dtype}{scale_a.shape} and {scale_b.dtype}{scale_b.shape}")


def _scaled(a: Array, b: Array, scale_a: Array, scale_b: Array, bias: Array | None) -> Array:
    if scale_a.size == 1 and scale_b.size == 1:
        scale_a, scale_b = scale_a.reshape(()), scale_b.reshape(())
    out = _product(a, b, jnp.float32) * scale_a * scale_b
    return out if bias is None else out + bias.astype(jnp.float32)


@lowering(aten._scaled_mm.default, ignores=("use_fast_accum",))
def scaled_mm(
    self: Array,
    mat2: Array,
    scale_a: Array,
    scale_b: Array,
    bias: Array | None = None,
    scale_result: Array | None = None,
    out_dtype: DTypeLike | None = None,
) -> Array:
    """The product of 8-bit floats, scaled as a whole or by row and column; fast accumulation is a permission."""
    _check_scales(self, mat2, scale_a, scale_b)
    dtype = self.dtype if out_dtype is None else np.dtype(out_dtype)
    out = _scaled(self, mat2, scale_a, scale_b, bias)
    if scale_result is not None and dtype in _FLOAT8:
        out = out / scale_result.astype(jnp.float32).reshape(())
    if dtype == np.dtype(jnp.float8_e4m3fn):
        # This float has no infinity; where a plain cast gives nan, the product keeps the largest value.
        largest = torch.finfo(torch.float8_e4m3fn).max
        out = jnp.clip(out, -largest, largest)
    return cast(out, dtype)


@lowering(aten._scaled_mm_v2.default, ignores=("use_fast_accum",))
def scaled_mm_v2(
    self: Array,
    mat2: Array,
    scale_a: list[Array],
    recipe_a: list[int],
    swizzle_a: list[int],
    scale_b: list[Array],
    recipe_b: list[int],
    swizzle_b: list[int],
    bias: Array | None,
    out_dtype: DTypeLike,
) -> Array:
    """The same with the kind of each scale spelled out; only one per tensor or row is known here."""
    recipes = [*recipe_a, *recipe_b]
    if recipes not in ([_TENSORWISE] * 2, [_ROWWISE] * 2) or any(swizzle_a) or any(swizzle_b):
        raise Unsupported(f"no scales by the recipes {recipes}")
    if (scale_a[0].size == 1 and scale_b[0].size == 1) != (recipes[0] == _TENSORWISE):
        raise Unsupported("the scales do not fit their recipe")
    return scaled_mm(self, mat2, scale_a[0], scale_b[0], bias, None, out_dtype)
