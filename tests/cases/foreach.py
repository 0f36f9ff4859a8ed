"""Cases for ops on lists of tensors."""

import torch

from isthmus._graph.names import aten
from tests.support import b8, bf16, case, f16, f32, f64, fails, i64

LIST = [f32(3, 4), f32(5), f32(2, 3).then(lambda t: t.t())]
POSITIVE = [t.between(0.5, 3) for t in LIST]
HALVES = [bf16(3, 4), f16(4)]
MIXED = [f32(3), f64(2, 2), i64(4)]

CASES = [
    case(aten._foreach_add.Scalar, LIST, 2),
    case(aten._foreach_add.Scalar, MIXED, 2.5),
    case(aten._foreach_add.ScalarList, LIST, [1.0, 2, -3.5]),
    case(aten._foreach_add.List, LIST, POSITIVE),
    case(aten._foreach_add.List, LIST, POSITIVE, alpha=-0.5),
    case(aten._foreach_add.List, MIXED, [i64(3), f32(2, 2), i64(4)], alpha=2),
    case(aten._foreach_add.Tensor, LIST, f32(), alpha=3),
    case(aten._foreach_sub.Scalar, LIST, 2),
    case(aten._foreach_sub.ScalarList, LIST, [1.0, 2, -3.5]),
    case(aten._foreach_sub.List, LIST, POSITIVE, alpha=2),
    case(aten._foreach_lerp.List, LIST, POSITIVE, [t.between(0, 1) for t in LIST]),
    case(aten._foreach_lerp.Scalar, LIST, POSITIVE, 0.9),
    case(aten._foreach_lerp.Scalar, HALVES, HALVES, 0.3),
    case(aten._foreach_lerp.ScalarList, LIST, POSITIVE, [0.1, 0.5, 0.9]),
    case(aten._foreach_pow.List, POSITIVE, LIST),
    case(aten._foreach_pow.Scalar, POSITIVE, 0.5),
    case(aten._foreach_pow.ScalarList, POSITIVE, [2, 0.5, -1.0]),
    case(aten._foreach_pow.ScalarAndTensor, 0.9, LIST),
    case(aten._foreach_norm.Scalar, LIST),
    case(aten._foreach_norm.Scalar, LIST, 1),
    case(aten._foreach_norm.Scalar, LIST, float("inf")),
    case(aten._foreach_norm.Scalar, [f32(0), f32()], 2, id="empty"),
    case(aten._foreach_norm.Scalar, HALVES, 2, torch.float32),
    case(aten._foreach_max.default, LIST),
    case(aten._foreach_copy.default, LIST, POSITIVE),
    case(aten._foreach_clone.default, LIST),
    case(aten._foreach_mm.default, [f32(3, 4), f32(2, 2)], [f32(4, 2), f32(2, 5)]),
    case(aten._foreach_zero.default, LIST),
    case(aten._foreach_add.Scalar, [f32(0), f32()], 1.0, id="empty and 0-dim"),
    case(aten._foreach_add.Scalar, [b8(3)], True),
    fails(
        aten._foreach_add.List,
        LIST,
        LIST[:2],
        error=RuntimeError,
        match="must have the same number of tensors",
    ),
    fails(aten._foreach_add.List, [f32(3)], [f32(4)], error=RuntimeError, match="must match the size"),
    fails(aten._foreach_add.ScalarList, LIST, [1.0], error=RuntimeError, match="same number of"),
    fails(aten._foreach_add_.Scalar, [i64(3)], 2.5, error=RuntimeError, match="can't be cast"),
]
for _name in ("mul", "div", "maximum", "minimum", "clamp_min", "clamp_max"):
    _packet = getattr(aten, f"_foreach_{_name}")
    CASES += [
        case(_packet.List, LIST, POSITIVE),
        case(_packet.Scalar, LIST, 0.7),
        case(_packet.Scalar, MIXED, 2),
        case(_packet.Scalar, HALVES, 0.7),
        case(_packet.ScalarList, LIST, [0.5, 2, 1.5]),
    ]
for _name in ("mul", "div"):
    CASES += [case(getattr(aten, f"_foreach_{_name}").Tensor, LIST, f32().between(1, 2))]
for _name in ("addcmul", "addcdiv"):
    _packet = getattr(aten, f"_foreach_{_name}")
    CASES += [
        case(_packet.Scalar, LIST, POSITIVE, POSITIVE, id="without value"),
        case(_packet.Scalar, LIST, POSITIVE, POSITIVE, -0.5),
        case(_packet.ScalarList, LIST, POSITIVE, POSITIVE, [0.5, 2, 1.5]),
        case(_packet.Scalar, HALVES, HALVES, [t.between(1, 2) for t in HALVES], 0.1),
    ]
for _name in [
    "abs",
    "atan",
    "ceil",
    "cos",
    "cosh",
    "erf",
    "erfc",
    "exp",
    "expm1",
    "floor",
    "frac",
    "lgamma",
    "log",
    "log10",
    "log1p",
    "log2",
    "neg",
    "reciprocal",
    "round",
    "rsqrt",
    "sigmoid",
    "sign",
    "sin",
    "sinh",
    "sqrt",
    "tan",
    "tanh",
    "trunc",
]:
    _op = getattr(aten, f"_foreach_{_name}").default
    CASES += [case(_op, POSITIVE), case(_op, [bf16(5).between(0.5, 3)])]
for _name in ("acos", "asin"):
    CASES += [
        case(getattr(aten, f"_foreach_{_name}").default, [f32(4).between(-1, 1), f64(3).between(-1, 1)])
    ]
