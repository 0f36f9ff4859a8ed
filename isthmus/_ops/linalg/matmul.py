"""Matrix products, in the precision that ``torch.set_float32_matmul_precision`` asks for."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import torch
from jax.typing import DTypeLike

from isthmus._graph.names import aten
from isthmus._ops.common import Array, Scalar, accumulation_dtype, cast, product_dtype, promote
from isthmus._ops.linalg.transposed_products import written_out
from isthmus._ops.registry import lowering

# For float32: all its digits, about half of them (TF32 or three bfloat16 passes), or one bfloat16 pass.
_PRECISION = {
    "highest": jax.lax.Precision.HIGHEST,
    "high": jax.lax.Precision.HIGH,
    "medium": jax.lax.Precision.DEFAULT,
}


def precision() -> jax.lax.Precision:
    """Return XLA's name for ``torch.get_float32_matmul_precision()``."""
    return _PRECISION[torch.get_float32_matmul_precision()]


def product(a: Array, b: Array, dtype: DTypeLike | None = None) -> Array:
    """Multiply matrices with torch's accumulation: half types in float32."""
    if jnp.issubdtype(a.dtype, jnp.bool_):
        # How many pairs hold, then whether any does.
        return jnp.matmul(a.astype(jnp.int32), b.astype(jnp.int32)) != 0
    out_dtype = product_dtype(a.dtype) if dtype is None else dtype
    return jnp.matmul(a, b, precision=precision(), preferred_element_type=out_dtype)


def einsum(formula: str, a: Array, b: Array, dtype: DTypeLike) -> Array:
    """``jnp.einsum`` in torch's precision, accumulated in ``dtype``."""
    return jnp.einsum(formula, a, b, precision=precision(), preferred_element_type=dtype)


@lowering(aten.mm.default, aten.bmm.default, matmul=True)
def mm(self: Array, mat2: Array) -> Array:
    """Matrix times matrix, or a batch of such products."""
    return cast(product(self, mat2), self.dtype)


@lowering(aten.mv.default, matmul=True)
def mv(self: Array, vec: Array) -> Array:
    """Matrix times vector."""
    return cast(product(self, vec), self.dtype)


@lowering(aten.dot.default, matmul=True)
def dot(self: Array, tensor: Array) -> Array:
    """The inner product of two vectors."""
    return cast(product(self, tensor), self.dtype)


@lowering(aten.vdot.default, matmul=True)
def vdot(self: Array, other: Array) -> Array:
    """The inner product with the first vector conjugated."""
    return cast(product(jnp.conj(self), other), self.dtype)


def _added(self: Array, products: Array, beta: Scalar, alpha: Scalar) -> Array:
    """Return ``beta * self + alpha * products`` in the dtype of ``self``, rounded once."""
    dtype = products.dtype
    if not _is_one(alpha):
        products = products * cast(alpha, dtype)
    if _is_one(beta):
        return cast(products + cast(self, dtype), self.dtype)
    factor = cast(beta, dtype)
    # A zero beta ignores the base altogether, nan and infinity in it included.
    scaled = jnp.where(factor == 0, jnp.zeros((), dtype), factor * cast(self, dtype))
    return cast(products + scaled, self.dtype)


def _is_one(factor: Scalar) -> bool:
    return isinstance(factor, int) and factor == 1


def _product_for_sum(self: Array, a: Array, b: Array, beta: Scalar, alpha: Scalar) -> Array:
    # What is scaled is rounded afterwards.
    plain = _is_one(alpha) and _is_one(beta)
    return product(a, b, None if plain else accumulation_dtype(self.dtype))


@lowering(aten.addmm.default, matmul=True)
def addmm(self: Array, mat1: Array, mat2: Array, beta: Scalar = 1, alpha: Scalar = 1) -> Array:
    """``beta * self + alpha * (mat1 @ mat2)``."""
    return _added(self, _product_for_sum(self, mat1, mat2, beta, alpha), beta, alpha)


@lowering(aten.baddbmm.default, matmul=True)
def baddbmm(self: Array, batch1: Array, batch2: Array, beta: Scalar = 1, alpha: Scalar = 1) -> Array:
    """``beta * self + alpha * (batch1 @ batch2)``."""
    return _added(self, _product_for_sum(self, batch1, batch2, beta, alpha), beta, alpha)


@lowering(aten.addbmm.default, matmul=True)
def addbmm(self: Array, batch1: Array, batch2: Array, beta: Scalar = 1, alpha: Scalar = 1) -> Array:
    """``beta * self + alpha * (batch1 @ batch2).sum(0)``, rounded after the sum."""
    return _added(self, product(batch1, batch2, accumulation_dtype(self.dtype)).sum(0), beta, alpha)


@lowering(aten.addmv.default, matmul=True)
def addmv(self: Array, mat: Array, vec: Array, beta: Scalar = 1, alpha: Scalar = 1) -> Array:
    """``beta * self + alpha * (mat @ vec)``."""
    return _added(self, _product_for_sum(self, mat, vec, beta, alpha), beta, alpha)


@lowering(aten.addr.default)
def addr(self: Array, vec1: Array, vec2: Array, beta: Scalar = 1, alpha: Scalar = 1) -> Array:
    """beta * self + alpha * (vec1 outer vec2), rounded once."""
    compute, result = promote(self, vec1, vec2)
    products = cast(alpha, compute) * cast(vec1, compute)[:, None] * cast(vec2, compute)[None, :]
    factor = cast(beta, compute)
    # A zero beta ignores the base altogether, nan and infinity in it included.
    scaled = jnp.where(factor == 0, jnp.zeros((), compute), factor * cast(self, compute))
    return cast(scaled + products, result)


@lowering(aten.linear.default, matmul=True)
def linear(input: Array, weight: Array, bias: Array | None = None) -> Array:
    """``input @ weight.T + bias`` in one program."""
    out = product(input, weight.swapaxes(0, -1))
    if bias is not None:
        out = out + bias.astype(out.dtype)
    return cast(out, input.dtype)


@lowering(aten.linear_backward.default, matmul=True)
def linear_backward(
    self: Array, grad_output: Array, weight: Array, output_mask: list[bool]
) -> tuple[Array | None, ...]:
    """The gradients of ``linear`` for input, weight and bias."""
    grads: list[Array | None] = [None, None, None]
    flat_grad = grad_output.reshape(-1, weight.shape[0]) if weight.ndim > 1 else grad_output.reshape(-1, 1)
    flat_self = self.reshape(-1, self.shape[-1])
    if output_mask[0]:
        matrix = weight if weight.ndim > 1 else weight[None]
        grads[0] = cast(product(flat_grad, matrix.conj()), self.dtype).reshape(self.shape)
    if output_mask[1] or output_mask[2]:  # torch gives both if either is asked for
        transposed = written_out(flat_grad.T, flat_self)
        grads[1] = cast(product(transposed, flat_self.conj()), weight.dtype).reshape(weight.shape)
        acc_dtype = accumulation_dtype(grad_output.dtype)
        total = flat_grad.astype(acc_dtype).sum(0)
        grads[2] = cast(total, grad_output.dtype).reshape(weight.shape[:-1])
    return tuple(grads)


@lowering(aten.outer.default)
def outer(self: Array, vec2: Array) -> Array:
    """Every product of an element of one vector with one of the other."""
    return self[:, None] * vec2[None, :]
