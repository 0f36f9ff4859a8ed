"""Cases for elementwise ops of two operands."""

import math

from isthmus._graph.names import aten
from tests.support import b8, bf16, c64, case, f32, f64, fails, i32, i64, u8, values

CASES = [
    case(aten.add.Tensor, f32(3, 4), f32(4)),
    case(aten.add.Tensor, f32(3, 4), f32(3, 4), alpha=2.5),
    case(aten.add.Tensor, i64(3), i32(3), alpha=-2),
    case(aten.add.Tensor, bf16(3, 4), f32(), id="0-dim does not promote"),
    case(aten.add.Tensor, b8(5), b8(5)),
    case(aten.add.Tensor, c64(3), f64(3)),
    case(aten.add.Tensor, f32(0, 4), f32(4), id="empty"),
    case(aten.add.Tensor, f32(3, 4).then(lambda t: t.t()), f32(4, 3)),
    case(aten.sub.Tensor, u8(4), u8(4)),
    case(aten.mul.Tensor, bf16(3, 4), bf16(3, 4)),
    case(aten.div.Tensor, i64(3, 4), i64(3, 4).between(1, 4)),
    fails(aten.add.Tensor, f32(3), f32(4), error=RuntimeError, match="must match the size"),
    fails(aten.sub.Tensor, b8(3), b8(3), error=RuntimeError, match="[Ss]ubtraction"),
]
for _mode in (None, "trunc", "floor"):
    CASES += [
        case(aten.div.Tensor_mode, f32(20), f32(20), rounding_mode=_mode),
        case(aten.div.Tensor_mode, i32(20), i32(20).between(1, 4), rounding_mode=_mode),
        case(aten.div.Tensor_mode, i32(20), i32(20).between(-4, -1), rounding_mode=_mode),
    ]
for _op in (aten.remainder.Tensor, aten.fmod.Tensor, aten.floor_divide.default):
    CASES += [
        case(_op, f32(20), f32(20)),
        case(_op, i64(20), i64(20).between(1, 4)),
        case(_op, i64(20), i64(20).between(-4, -1)),
    ]
for _op in (aten.eq.Tensor, aten.lt.Tensor, aten.ge.Tensor, aten.maximum.default, aten.logical_and.default):
    CASES += [case(_op, f32(4, 5), f32(5)), case(_op, i64(4), f32(4)), case(_op, b8(4), b8(4))]
for _op in (aten.pow.Tensor_Tensor,):
    CASES += [case(_op, f32(10).between(0.1, 3), f32(10)), case(_op, i64(10), i64(10).between(0, 4))]
CASES += [
    case(aten.pow.Tensor_Scalar, f32(5), 2),
    case(aten.pow.Tensor_Scalar, bf16(5), 3),
    case(aten.pow.Tensor_Scalar, i64(5), 3),
    case(aten.pow.Scalar, 2.0, f32(5)),
    case(aten.clamp.default, f32(10), -1.0, 1.0),
    case(aten.clamp.default, i64(10), 0),
    case(aten.clamp.default, i64(10), 0.5),
    case(aten.where.self, b8(3, 4), f32(4), f64(3, 4)),
    case(aten.masked_fill.Scalar, f32(3, 4), b8(3, 4), -1e9),
    case(aten.addcmul.default, f32(3), f32(3), f32(3), value=0.5),
    case(aten.addcdiv.default, f32(3), f32(3), f32(3).between(1, 2), value=0.5),
    case(aten.lerp.Scalar, f32(5), f32(5), 0.3),
    case(aten.lerp.Scalar, f32(5), f32(5), 0.9),
    case(aten.lerp.Tensor, bf16(5), bf16(5), bf16(5).between(0, 1)),
]

_EXTREME = values([math.inf, -math.inf, math.nan, 2.0])
_NEVER = values([False, False, False, False])


def _floor_of_quotient(x, number):
    return (x / number).floor()


CASES += [
    case(aten.mul.Tensor, _EXTREME, _NEVER, id="infinity and nan by False"),
    case(aten.mul.Tensor, _NEVER, _EXTREME.then(lambda t: t.double()), id="False by infinity and nan"),
    # Rounded twice, 41 * 7 / 41 is less than 7.
    case(_floor_of_quotient, values([287.0, 329.0, 385.0, 427.0, 82.0]), 41.0),
    case(_floor_of_quotient, values([329.0, 47.0, 94.0]), 47.0),
]
CASES += [
    fails(op, f32(5, 1), f32(5, 5), error=RuntimeError, match="doesn't match the broadcast shape")
    for op in (
        aten.add_.Tensor,
        aten.atan2_.default,
        aten.pow_.Tensor,
        aten.eq_.Tensor,
        aten.copysign_.Tensor,
    )
]
