"""Cases for elementwise ops of one tensor, special functions and complex parts."""

import math

import torch

from isthmus._graph.names import aten
from tests.support import b8, bf16, c64, c128, case, f32, f64, fails, i8, i32, i64, u8, values

EDGE = values([math.nan, math.inf, -math.inf, 0.0, -0.0, 1.0, -1.0, 2.5, -2.5])
EDGE64 = values(EDGE().tolist(), dtype=torch.float64)


def _turned(t: torch.Tensor) -> torch.Tensor:
    return t.t()


CASES = []
_FLOATING = (
    "acos acosh asin asinh atan atanh cos cosh digamma erf erfc erfinv exp exp2 expm1 lgamma log log10 log1p "
    "log2 reciprocal rsqrt sigmoid sin sinh sqrt tan tanh i0 special_i0e special_i1 special_i1e special_entr "
    "special_log_ndtr special_ndtri sinc"
)
for _name in _FLOATING.split():
    _op = getattr(aten, _name).default
    CASES += [
        case(_op, f32(3, 4).then(_turned)),
        case(_op, f64(3, 4).between(0.1, 0.9)),
        case(_op, EDGE, id="edge"),
        case(_op, i64(5)),
        case(_op, b8(3)),
        case(_op, f32(0), id="empty"),
    ]
for _name in ("ceil", "floor", "trunc", "round", "sign", "sgn", "neg", "abs", "relu"):
    _op = getattr(aten, _name).default
    CASES += [
        case(_op, f32(3, 4).then(_turned)),
        case(_op, EDGE, id="edge"),
        case(_op, bf16(5)),
        case(_op, i8(5)),
        case(_op, u8(5)),
        case(_op, f64(), id="0-dim"),
    ]
for _name in ("isinf", "isnan", "isneginf", "isposinf", "logical_not", "signbit"):
    _op = getattr(aten, _name).default
    CASES += [case(_op, EDGE, id="edge"), case(_op, i64(4)), case(_op, b8(3))]
for _name in (
    "acos",
    "atan",
    "cos",
    "exp",
    "log",
    "log10",
    "log1p",
    "reciprocal",
    "rsqrt",
    "sigmoid",
    "sin",
    "sqrt",
    "tanh",
):
    CASES.append(case(getattr(aten, _name).default, c128(4)))
for _name in ("abs", "angle", "sgn", "neg", "conj_physical", "isnan", "isinf"):
    CASES.append(case(getattr(aten, _name).default, c64(4)))
CASES += [
    case(aten.bitwise_not.default, b8(4)),
    case(aten.bitwise_not.default, i32(4)),
    case(aten.frac.default, f32(3, 4).then(_turned)),
    case(aten.frac.default, bf16(4)),
    case(aten.angle.default, EDGE, id="edge"),
    case(aten.angle.default, i64(4)),
    case(aten.complex.default, f32(3, 1), f32(4)),
    case(aten.complex.default, EDGE64, EDGE64, id="edge"),
    case(aten.polar.default, f32(3, 4).then(_turned), f32(4, 3)),
    case(aten.polar.default, f64(0), f64(0), id="empty"),
    case(aten.nan_to_num.default, EDGE, id="edge"),
    case(aten.nan_to_num.default, EDGE64, 1.0, 2.0, -3.0),
    case(aten.nan_to_num.default, i64(3)),
    case(aten.nan_to_num.default, values([math.nan, math.inf], dtype=torch.bfloat16), id="bf16"),
    case(aten.heaviside.default, EDGE, values(0.5)),
    case(aten.heaviside.default, i64(5), i64(5)),
    fails(aten.heaviside.default, f32(3), f64(3), error=RuntimeError, match="different dtypes"),
    case(aten.round.decimals, f32(9).between(-30, 30), decimals=1),
    case(aten.round.decimals, f64(9).between(-300, 300), decimals=-1),
    case(aten.frexp.Tensor, f32(3, 4).then(_turned)),
    case(aten.frexp.Tensor, values([0.0, -0.0, 8.0, 0.1], dtype=torch.float64)),
    case(aten.xlogy.Tensor, values([0.0, 0.0, 0.0, 1.0]), values([0.0, math.nan, 2.0, 0.0]), id="edge"),
    case(aten.xlogy.Tensor, i64(3), i64(3).between(1, 3)),
    case(aten.xlogy.Scalar_Other, f32(3), 2),
    case(aten.xlogy.Scalar_Self, 0, f32(3)),
    case(aten.special_xlog1py.default, f32(4), f32(4).between(0, 2)),
    case(aten.special_xlog1py.other_scalar, i64(4), 2),
    case(aten.special_xlog1py.self_scalar, 0.0, values([-1.0, math.nan])),
    case(aten.special_zeta.default, f32(4).between(1.5, 4), f32(4).between(0.5, 4)),
    case(aten.special_zeta.default, values([2.0, 3.0, 2.5, 0.5, 1.0]), values([-8.4, -1.5, -1.5, 1.0, 0.0])),
    case(aten.special_zeta.other_scalar, values([1.0, 2.0, 3.0]), 1),
    case(aten.special_zeta.self_scalar, 2.0, f64(4).between(0.5, 4)),
    case(aten.igamma.default, f32(5).between(0.1, 4), f32(5).between(0.1, 4)),
    case(aten.igamma.default, values([0.0, 1.0, 2.0]), values([1.0, 0.0, math.inf]), id="edge"),
    case(aten.igammac.default, f64(5).between(0.1, 4), f64(5).between(0.1, 4)),
    case(aten.igammac.default, values([0.0, 1.0, 2.0]), values([1.0, 0.0, math.inf]), id="edge"),
    case(aten.copysign.Scalar, f32(4), -0.0),
    case(aten.copysign.Scalar, i64(4), -2),
    case(aten.histc.default, f32(30), 5),
    case(aten.histc.default, f32(30), 4, -1.5, 2),
    case(aten.histc.default, values([1.0, 1.0]), 3, id="one value"),
]
for _n in (0, 1, 2, 3):
    CASES += [
        case(aten.polygamma.default, _n, f32(5).between(0.2, 4)),
        case(aten.polygamma.default, _n, values([-8.478, -0.5, 0.0, 3.0])),
        case(aten.polygamma.default, _n, i64(4).between(1, 4)),
    ]
for _packet in (aten.bitwise_left_shift, aten.bitwise_right_shift):
    CASES += [
        case(_packet.Tensor, i64(6), i64(6).between(0, 5)),
        case(_packet.Tensor, i8(6), values([0, 1, 7, 8, 100, -1], dtype=torch.int8), id="wide"),
        case(_packet.Tensor_Scalar, u8(6), 2),
        case(_packet.Scalar_Tensor, 5, i32(6).between(0, 5)),
    ]
for _packet in (aten.__lshift__, aten.__rshift__):
    CASES += [case(_packet.Scalar, i64(6), 2), case(_packet.Tensor, i32(6), i32(6).between(0, 5))]
CASES += [
    fails(
        aten.bitwise_left_shift.Tensor, f32(2), f32(2), error=NotImplementedError, match="not implemented for"
    )
]
