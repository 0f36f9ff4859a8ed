"""Cases for reductions over dims."""

import math

import torch

from isthmus._graph.names import aten
from tests.support import b8, bf16, c64, case, f16, f32, f64, fails, i32, i64, u8, values

NAN = values([[1.0, math.nan, 2.0], [3.0, -1.0, -4.0]])
TIES = values([[2, 5, 5, 1], [7, 7, 0, 0]])


def _turned(t: torch.Tensor) -> torch.Tensor:
    return t.transpose(0, -1)


CASES = [
    case(aten.sum.default, f32(3, 4).then(_turned)),
    case(aten.sum.default, b8(7)),
    case(aten.sum.dim_IntList, f32(3, 4, 5).then(_turned), [-1, 0], True),
    case(aten.sum.dim_IntList, i32(3, 4), [1]),
    case(aten.sum.dim_IntList, bf16(5, 300), [-1]),
    case(aten.sum.dim_IntList, f32(0, 4), [0], id="empty"),
    case(aten.sum.dim_IntList, f32(3, 4), [], id="no dims are all dims"),
    case(aten.sum.dim_IntList, f32(3, 4), None, dtype=torch.float64),
    case(aten.sum.dim_IntList, f32(), [-1], id="0-dim"),
    case(aten.sum.default, f32(4), dtype=torch.bool),
    case(aten.mean.default, f32(3, 4)),
    case(aten.mean.dim, bf16(3, 4), [-1], True),
    case(aten.mean.dim, f32(0, 4), [0], id="empty"),
    case(aten.nansum.default, NAN),
    case(aten.nansum.default, NAN, [-1], True, id="dim"),
    case(aten.nansum.default, i32(3, 4), [0]),
    case(aten.prod.default, f32(3, 4)),
    case(aten.prod.dim_int, f32(3, 4).then(_turned), -1),
    case(aten.prod.dim_int, b8(3, 4), 0, True),
    case(aten.prod.dim_int, bf16(3, 4), 0),
    case(aten.prod.dim_int, f32(0, 4), 0, id="empty"),
    case(aten.aminmax.default, f32(3, 4)),
    case(aten.aminmax.default, NAN, dim=-1, keepdim=True),
    case(aten.count_nonzero.default, f32(3, 4).between(-1, 1)),
    case(aten.count_nonzero.default, b8(3, 4), -1),
    case(aten.count_nonzero.dim_IntList, i64(3, 4), [0, -1]),
    case(aten.logsumexp.default, f32(3, 4).between(80, 120), [-1]),
    case(aten.logsumexp.default, bf16(3, 4), [0, 1], True),
    case(aten.logsumexp.default, i64(3, 4), [1]),
    case(aten.logsumexp.default, values([[-math.inf, -math.inf], [math.inf, 1.0]]), [1], id="infinite"),
    case(aten.logsumexp.default, f32(0, 3), [0], id="empty"),
    case(aten.trace.default, f32(3, 4)),
    case(aten.trace.default, i32(4, 2)),
    fails(aten.sum.dim_IntList, f32(3), [2], error=IndexError, match="Dimension out of range"),
    fails(aten.mean.default, i64(3), error=RuntimeError, match="dtype"),
]
for _op in (aten.amax.default, aten.amin.default):
    CASES += [
        case(_op, f32(3, 4, 2).then(_turned), [-1, 0]),
        case(_op, NAN, [1], True, id="nan"),
        case(_op, b8(3, 4), [0]),
        case(_op, u8(3, 4), []),
        fails(_op, f32(0, 3), [0], error=IndexError, match="non-zero size"),
    ]
for _op in (aten.max.default, aten.min.default):
    CASES += [
        case(_op, f32(3, 4).then(_turned)),
        case(_op, NAN, id="nan"),
        case(_op, b8(3)),
        case(_op, bf16()),
        fails(_op, f32(0), error=RuntimeError, match="Expected reduction dim to be specified"),
    ]
for _op in (aten.max.dim, aten.min.dim):
    CASES += [
        case(_op, f32(3, 4, 2).then(_turned), -2),
        case(_op, NAN, 1, True, id="nan"),
        case(_op, TIES, 1, id="ties"),
        case(_op, b8(3, 4), 0),
        case(_op, f32(), 0, id="0-dim"),
        fails(_op, f32(0, 3), 0, error=IndexError, match="non-zero size"),
        fails(_op, f32(3), 1, error=IndexError, match="Dimension out of range"),
    ]
for _op in (aten.argmax.default, aten.argmin.default):
    CASES += [
        case(_op, f32(3, 4).then(_turned)),
        case(_op, f32(3, 4).then(_turned), None, True),
        case(_op, NAN, -1, True, id="nan"),
        case(_op, TIES, 1, id="ties"),
        case(_op, i32(), 0, id="0-dim"),
        fails(_op, f32(0), error=IndexError, match="Expected reduction dim"),
    ]
for _packet in (aten.all, aten.any):
    CASES += [
        case(_packet.default, b8(3, 4)),
        case(_packet.default, f32(0), id="empty"),
        case(_packet.default, u8(3)),
        case(_packet.dim, f32(3, 4).then(_turned), -1, True),
        case(_packet.dim, u8(3, 4), 0),
        case(_packet.dims, i64(3, 4), [0, -1]),
        case(_packet.dims, b8(3, 4), None),
        case(_packet.dims, b8(3, 4), [], id="no dims are no dims"),
    ]
for _name in ("var", "std", "var_mean", "std_mean"):
    _op = getattr(aten, _name).correction
    CASES += [
        case(_op, f32(3, 4, 5).then(_turned), [-1, 0]),
        case(_op, f32(3, 4), None, correction=0),
        case(_op, f32(3, 4), [1], correction=0.5, keepdim=True),
        case(_op, bf16(3, 40), [-1]),
        case(_op, f64(1), id="one element leaves nan"),
        case(_op, c64(6)),
        case(_op, f32(0, 3), [0], id="empty"),
        fails(_op, i64(3), error=RuntimeError, match="floating point"),
    ]
for _p in (0, 1, 2, 3, -1.5, math.inf, -math.inf):
    CASES += [
        case(aten.linalg_vector_norm.default, f32(3, 4).then(_turned), _p, [-1]),
        case(aten.norm.ScalarOpt_dim, f32(3, 4), _p, [0], True),
    ]
CASES += [
    case(aten.linalg_vector_norm.default, bf16(3, 40)),
    case(aten.linalg_vector_norm.default, c64(5), 2),
    case(aten.linalg_vector_norm.default, f16(5), 2, dtype=torch.float64),
    case(aten.linalg_vector_norm.default, f32(), 2, id="0-dim"),
    case(aten.norm.Scalar, f32(3, 4)),
    case(aten.norm.Scalar, f32(3, 4), 1),
    case(aten.norm.ScalarOpt_dim, f32(3, 4), None, [-1]),
    case(aten.norm.ScalarOpt_dtype, f32(3, 4), 2, dtype=torch.float64),
    case(aten.norm.ScalarOpt_dim_dtype, bf16(3, 4), 2, [0], False, dtype=torch.float32),
    fails(aten.linalg_vector_norm.default, i64(3), error=RuntimeError, match="floating point or complex"),
]
