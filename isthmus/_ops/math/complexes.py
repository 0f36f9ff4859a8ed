"""Complex numbers: made of parts, and taken apart."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from isthmus._graph.names import aten
from isthmus._ops.common import INT_TO_FLOAT, Array, cast, promote
from isthmus._ops.elementwise import elementwise
from isthmus._ops.registry import lowering


@lowering(aten.complex.default)
def complex(real: Array, imag: Array) -> Array:
    """A complex number of its two parts."""
    return jax.lax.complex(*jnp.broadcast_arrays(real, imag))


@lowering(aten.polar.default)
def polar(abs: Array, angle: Array) -> Array:
    """A complex number of its length and its angle."""
    length, turn = jnp.broadcast_arrays(abs, angle)
    return jax.lax.complex(length * jnp.cos(turn), length * jnp.sin(turn))


@lowering(aten.angle.default)
def angle(self: Array) -> Array:
    """The angle of a complex number; of a real one pi below zero, 0 elsewhere, nan for nan."""
    if jnp.iscomplexobj(self):
        return jnp.arctan2(self.imag, self.real)
    compute, result = promote(self, kind=INT_TO_FLOAT)
    x = cast(self, compute)
    angles = jnp.where(x < 0, jnp.asarray(jnp.pi, compute), jnp.zeros((), compute))
    return cast(jnp.where(jnp.isnan(x), x, angles), result)


@elementwise(aten.sgn.default)
def _sgn(x: Array) -> Array:
    """The complex number of length one in the same direction, 0 for 0; the sign of a real number."""
    if jnp.iscomplexobj(x):
        length = jnp.abs(x)
        return jnp.where(length == 0, jnp.zeros((), x.dtype), x / jnp.where(length == 0, 1, length))
    if x.dtype == jnp.bool_:
        return x
    return (x > 0).astype(x.dtype) - (x < 0).astype(x.dtype)
