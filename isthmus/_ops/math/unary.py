"""Elementwise ops of one tensor, and complex numbers."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp

from isthmus._graph.names import aten
from isthmus._ops.common import ALWAYS_BOOL, COMPLEX_TO_FLOAT, FLOATING, INT_TO_FLOAT, Array, cast, promote
from isthmus._ops.elementwise import elementwise
from isthmus._ops.math import complex_functions
from isthmus._ops.math.gamma import digamma
from isthmus._ops.registry import lowering


def _is_inexact(x: Array) -> bool:
    return bool(jnp.issubdtype(x.dtype, jnp.inexact))


def _sign(x: Array) -> Array:
    # jnp.sign keeps a nan; torch's sign of a nan is 0.
    if x.dtype == jnp.bool_:
        return x
    return (x > 0).astype(x.dtype) - (x < 0).astype(x.dtype)


def _keep_integers(function: Callable[[Array], Array]) -> Callable[[Array], Array]:
    return lambda x: function(x) if _is_inexact(x) else x


@elementwise(aten.abs.default, promote_as=COMPLEX_TO_FLOAT)
def _abs(x: Array) -> Array:
    return x if x.dtype == jnp.bool_ else complex_functions.absolute(x)


def _sinc(x: Array) -> Array:
    # sin of an infinity is nan, but not after XLA's GPU compiler has fused the division into it.
    return jnp.where(jnp.isinf(x), jnp.full_like(x, jnp.nan), jnp.sinc(x))


@elementwise(aten.erfinv.default, promote_as=INT_TO_FLOAT, dtypes=FLOATING)
def _erfinv(x: Array) -> Array:
    # XLA's float32 approximation is 50 ulps off near the ends, where torch's is exact.
    return jax.lax.erf_inv(x.astype(jnp.float64)).astype(x.dtype)


FLOATING_RESULT = {
    aten.acos.default: complex_functions.acos,
    aten.acosh.default: complex_functions.acosh,
    aten.asin.default: complex_functions.asin,
    aten.asinh.default: complex_functions.asinh,
    aten.atan.default: complex_functions.atan,
    aten.atanh.default: complex_functions.atanh,
    aten.cos.default: complex_functions.cos,
    aten.cosh.default: complex_functions.cosh,
    aten.digamma.default: digamma,
    aten.erf.default: jax.lax.erf,
    aten.erfc.default: jax.lax.erfc,
    aten.exp.default: complex_functions.exp,
    aten.exp2.default: complex_functions.exp2,
    aten.expm1.default: complex_functions.expm1,
    aten.lgamma.default: jax.lax.lgamma,
    aten.log.default: complex_functions.log,
    aten.log10.default: complex_functions.log10,
    aten.log1p.default: complex_functions.log1p,
    aten.log2.default: complex_functions.log2,
    aten.reciprocal.default: lambda x: 1 / x,
    aten.rsqrt.default: complex_functions.rsqrt,
    aten.sigmoid.default: complex_functions.sigmoid,
    aten.sin.default: complex_functions.sin,
    aten.sinc.default: _sinc,
    aten.sinh.default: complex_functions.sinh,
    aten.sqrt.default: complex_functions.sqrt,
    aten.tan.default: complex_functions.tan,
    aten.tanh.default: complex_functions.tanh,
}
SAME_DTYPE = {
    aten.bitwise_not.default: jnp.bitwise_not,
    aten.ceil.default: _keep_integers(jnp.ceil),
    aten.conj_physical.default: jnp.conj,
    aten.floor.default: _keep_integers(jnp.floor),
    aten.neg.default: jnp.negative,
    aten.relu.default: lambda x: jnp.where(x < 0, jnp.zeros_like(x), x),
    aten.round.default: _keep_integers(jnp.round),
    aten.sign.default: _sign,
    aten.trunc.default: _keep_integers(jnp.trunc),
    aten.frac.default: lambda x: x - jnp.trunc(x),
}
BOOLEAN = {
    aten.isinf.default: jnp.isinf,
    aten.isnan.default: jnp.isnan,
    aten.isneginf.default: lambda x: jnp.isneginf(x) if _is_inexact(x) else jnp.zeros(x.shape, bool),
    aten.isposinf.default: lambda x: jnp.isposinf(x) if _is_inexact(x) else jnp.zeros(x.shape, bool),
    aten.logical_not.default: jnp.logical_not,
    aten.signbit.default: lambda x: jnp.signbit(x) if _is_inexact(x) else x < 0,
}

for _op, _fn in FLOATING_RESULT.items():
    elementwise(_op, promote_as=INT_TO_FLOAT)(_fn)
for _op, _fn in SAME_DTYPE.items():
    elementwise(_op)(_fn)
for _op, _fn in BOOLEAN.items():
    elementwise(_op, promote_as=ALWAYS_BOOL)(_fn)


# Complex numbers: made of parts, and taken apart


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
        # The quotient is taken of a safe divisor first: 0 / 0 would reach the gradient through the choice.
        length = jnp.abs(x)
        return jnp.where(length == 0, jnp.zeros((), x.dtype), x / jnp.where(length == 0, 1, length))
    return _sign(x)
