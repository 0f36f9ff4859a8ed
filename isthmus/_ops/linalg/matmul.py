"""Matrix products, in the precision torch was told to use."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import torch

from isthmus._graph.names import aten
from isthmus._ops.common import accumulation_dtype, cast, keyword_signature, product_dtype, promote
from isthmus._ops.registry import lowering

Array = Any
_PRECISION = {
    "highest": jax.lax.Precision.HIGHEST,
    "high": jax.lax.Precision.HIGH,
    "medium": jax.lax.Precision.DEFAULT,
}


def precision() -> Any:
    """Return XLA's name for ``torch.get_float32_matmul_precision()``."""
    return _PRECISION[torch.get_float32_matmul_precision()]


def product(a: Array, b: Array, dtype: Any = None) -> Array:
    """Multiply matrices with torch's accumulation: half types in float32."""
    if jnp.issubdtype(a.dtype, jnp.bool_):
        return jnp.matmul(a.astype(jnp.int32), b.astype(jnp.int32)) != 0
    found = product_dtype(a.dtype) if dtype is None else dtype
    return jnp.matmul(a, b, precision=precision(), preferred_element_type=found)


@lowering(aten.mm.default, matmul=True)
def mm(self: Array, mat2: Array) -> Array:
    """Matrix times matrix."""
    return cast(product(self, mat2), self.dtype)


@lowering(aten.bmm.default, matmul=True)
def bmm(self: Array, mat2: Array) -> Array:
    """A batch of matrix products."""
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


def _plus(op: Any, names: tuple[str, str]) -> None:
    first, second = names

    def lowered(**values: Any) -> Array:
        base, beta, alpha = values["self"], values.get("beta", 1), values.get("alpha", 1)
        plain = all(isinstance(factor, int) and factor == 1 for factor in (alpha, beta))
        # What is scaled or summed up is rounded afterwards.
        dtype = None if plain and op is not aten.addbmm.default else accumulation_dtype(base.dtype)
        found = product(values[first], values[second], dtype)
        if op is aten.addbmm.default:
            found = found.sum(0)
        wide = found.dtype
        if not (isinstance(alpha, int) and alpha == 1):
            found = found * cast(alpha, wide)
        if isinstance(beta, int) and beta == 1:
            return cast(found + cast(base, wide), base.dtype)
        factor = cast(beta, wide)
        # A zero beta ignores the base altogether, nan and infinity in it included.
        scaled = jnp.where(factor == 0, jnp.zeros((), wide), factor * cast(base, wide))
        return cast(found + scaled, base.dtype)

    lowered.__signature__ = keyword_signature(["self", first, second, "beta", "alpha"])  # type: ignore[attr-defined]
    lowered.__doc__ = f"beta * self + alpha * ({first} @ {second})"
    lowering(op, matmul=True)(lowered)


_plus(aten.addmm.default, ("mat1", "mat2"))
_plus(aten.baddbmm.default, ("batch1", "batch2"))
_plus(aten.addbmm.default, ("batch1", "batch2"))
_plus(aten.addmv.default, ("mat", "vec"))


@lowering(aten.addr.default)
def addr(self: Array, vec1: Array, vec2: Array, beta: Any = 1, alpha: Any = 1) -> Array:
    """beta * self + alpha * (vec1 outer vec2), rounded once."""
    wide, dtype = promote(self, vec1, vec2)
    found = cast(alpha, wide) * cast(vec1, wide)[:, None] * cast(vec2, wide)[None, :]
    factor = cast(beta, wide)
    # A zero beta ignores the base altogether, nan and infinity in it included.
    scaled = jnp.where(factor == 0, jnp.zeros((), wide), factor * cast(self, wide))
    return cast(scaled + found, dtype)


@lowering(aten.linear.default, matmul=True)
def linear(input: Array, weight: Array, bias: Array | None = None) -> Array:
    """``input @ weight.T + bias`` in one program."""
    found = product(input, weight.swapaxes(0, -1))
    if bias is not None:
        found = found + bias.astype(found.dtype)
    return cast(found, input.dtype)


@lowering(aten.linear_backward.default, matmul=True)
def linear_backward(self: Array, grad_output: Array, weight: Array, output_mask: list[bool]) -> Any:
    """The gradients of ``linear`` for input, weight and bias."""
    grads: list[Any] = [None, None, None]
    flat_grad = grad_output.reshape(-1, weight.shape[0]) if weight.ndim > 1 else grad_output.reshape(-1, 1)
    flat_self = self.reshape(-1, self.shape[-1])
    if output_mask[0]:
        matrix = weight if weight.ndim > 1 else weight[None]
        grads[0] = cast(product(flat_grad, matrix.conj()), self.dtype).reshape(self.shape)
    if output_mask[1] or output_mask[2]:  # torch gives both if either is asked for
        grads[1] = cast(product(flat_grad.T, flat_self.conj()), weight.dtype).reshape(weight.shape)
        wide = accumulation_dtype(grad_output.dtype)
        total = flat_grad.astype(wide).sum(0)
        grads[2] = cast(total, grad_output.dtype).reshape(weight.shape[:-1])
    return tuple(grads)


@lowering(aten.outer.default)
def outer(self: Array, vec2: Array) -> Array:
    """Every product of an element of one vector with one of the other."""
    return self[:, None] * vec2[None, :]
