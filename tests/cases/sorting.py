"""Cases for order: sorting, ranks, searching."""

import math

import torch

from isthmus._graph.names import aten
from tests.support import b8, bf16, case, f32, f64, fails, i32, i64, u8, values

NAN = values([1.0, math.nan, 2.0, -0.0, 0.0, -math.inf, math.inf, math.nan])
ONE_NAN = values([1.0, math.nan, 2.0, -3.0, math.inf, -math.inf])
NANS = values([[0.0, 1.0, math.nan], [0.0, math.nan, math.nan]])
EDGES = values([-2.0, -1.0, 0.0, 0.0, 1.5])


def _turned(t: torch.Tensor) -> torch.Tensor:
    return t.t()


# Numbers so small that a CPU takes them for zero where it computes.
TINY = values([1.0, 1e-40, -1e-40, 5e-41, -2.0, 3e-41])
ENDS = values([5, 2**31 - 1, -(2**31), 0, -1, 5], dtype=torch.int32)

CASES = [
    case(aten.sort.default, f32(4, 5).then(_turned), 0),
    case(aten.sort.default, f32(4, 5), -1, True),
    case(aten.sort.default, f32(), 0, id="0-dim"),
    case(aten.sort.default, f32(0, 3), 0, id="empty"),
    case(aten.sort.stable, NAN, stable=True, id="nan"),
    case(aten.sort.stable, NAN, stable=True, descending=True, id="nan descending"),
    case(aten.sort.stable, i64(20), stable=True),
    case(aten.sort.stable, i64(20), stable=True, descending=True),
    case(aten.sort.stable, b8(9), stable=True, dim=0),
    case(aten.sort.stable, bf16(4, 30), stable=True, dim=-1),
    case(aten.sort.stable, u8(20).between(0, 255), stable=True, descending=True),
    fails(aten.sort.default, f32(3), 2, error=IndexError, match="Dimension out of range"),
    case(aten.sort.stable, TINY, stable=True, id="tiny"),
    case(aten.sort.stable, TINY, stable=True, descending=True, id="tiny descending"),
    case(aten.sort.stable, ENDS, stable=True, id="ends of the range"),
    case(aten.sort.stable, ENDS, stable=True, descending=True, id="ends of the range descending"),
    case(aten.topk.default, TINY, 3, id="tiny"),
    case(aten.topk.default, TINY, 3, -1, False, id="tiny least"),
    case(aten.topk.default, ENDS, 3, 0, False, id="ends of the range"),
    case(aten.topk.default, f32(4, 9).then(_turned), 3, 0),
    case(aten.topk.default, f32(4, 9), 3, -1, False),
    case(aten.topk.default, ONE_NAN, 4, id="nan"),
    case(aten.topk.default, ONE_NAN, 6, 0, False, id="nan last"),
    case(aten.topk.default, f64(9), 4),
    case(aten.topk.default, values([3, -7, 9, 2**40, -(2**50)]), 3),
    case(aten.topk.default, values([3, 200, 9], dtype=torch.uint8), 3, 0, False, id="unsigned"),
    case(aten.topk.default, values([1.5, -2.0, 0.25, 8.0], dtype=torch.bfloat16), 2, 0, False, id="bf16"),
    case(aten.topk.default, f32(4), 0, id="none"),
    case(aten.topk.default, f32(), 1, id="0-dim"),
    fails(aten.topk.default, f32(3), 4, error=RuntimeError, match="k out of range"),
    case(aten.kthvalue.default, f32(4, 5).then(_turned), 2, 0),
    case(aten.kthvalue.default, ONE_NAN, 6, -1, True, id="nan"),
    case(aten.kthvalue.default, values([5, 1, 3]), 2),
    fails(aten.kthvalue.default, f32(3), 4, error=RuntimeError, match="k out of range"),
    case(aten.median.default, f32(3, 5)),
    case(aten.median.default, i64(6)),
    case(aten.median.default, ONE_NAN, id="nan"),
    case(aten.median.default, f32(0), id="empty"),
    case(aten.median.dim, f32(4, 5).then(_turned), 0, True),
    case(aten.median.dim, ONE_NAN, -1, id="nan"),
    case(aten.median.dim, f32(), 0, id="0-dim"),
    case(aten.nanmedian.default, ONE_NAN, id="nan"),
    case(aten.nanmedian.dim, ONE_NAN, -1, True, id="nan"),
    case(aten.nanmedian.dim, f32(4, 5), 0),
    case(aten.mode.default, values([[3, 1, 1, 3, 2], [5, 4, 4, 5, 5]])),
    case(aten.mode.default, values([[3.0, 1.0], [3.0, 2.0], [1.0, 2.0]]), 0, True),
]
for _right in (False, True):
    CASES += [
        case(aten.searchsorted.Tensor, EDGES, f32(3, 4), right=_right),
        case(aten.searchsorted.Tensor, EDGES, EDGES, right=_right, out_int32=True),
        case(
            aten.searchsorted.Tensor, f32(2, 3, 6).then(lambda t: t.sort().values), f32(2, 3, 4), right=_right
        ),
        case(aten.searchsorted.Scalar, EDGES, 0.0, right=_right),
        case(
            aten.searchsorted.Tensor,
            NANS,
            values([[math.nan, 5.0, 0.5, math.inf]] * 2),
            right=_right,
            id=f"nans {_right}",
        ),
        case(aten.searchsorted.Tensor, values([3, 1, 2, 0]), i64(5), right=_right, id=f"not sorted {_right}"),
        case(aten.bucketize.Tensor, f32(3, 4).then(_turned), EDGES, right=_right),
        case(aten.bucketize.Tensor, i64(5), values([-1, 0, 2]), right=_right, out_int32=True),
        case(aten.bucketize.Scalar, 1, values([-1, 1, 2]), right=_right),
    ]
CASES += [
    case(aten.searchsorted.Tensor, values([3.0, 1.0, 2.0]), f32(4), side="right", sorter=values([1, 2, 0])),
    case(aten.searchsorted.Tensor, EDGES, values([math.nan, math.inf]), id="nan"),
    case(aten.searchsorted.Tensor, f32(0), f32(3), id="empty"),
    case(aten.searchsorted.Tensor, f32(0, 0), f32(0, 0), id="empty rows"),
    case(aten.isin.Tensor_Tensor, i64(3, 4), values([1, 2])),
    case(aten.isin.Tensor_Tensor, i32(5), i32(0), id="empty"),
    case(aten.isin.Tensor_Tensor, NAN, values([math.nan, 2.0]), invert=True, id="nan"),
    case(aten.isin.Tensor_Scalar, i64(5), 2),
    case(aten.isin.Scalar_Tensor, 2, i64(5)),
    case(aten._convert_indices_from_coo_to_csr.default, values([0, 0, 2, 3]), 5),
    case(
        aten._convert_indices_from_coo_to_csr.default,
        values([0, 0, 2, 3], dtype=torch.int32),
        4,
        out_int32=True,
    ),
    case(aten._convert_indices_from_coo_to_csr.default, i64(0), 3, id="empty"),
    case(aten._convert_indices_from_csr_to_coo.default, values([0, 2, 2, 3]), values([1, 4, 0])),
    case(
        aten._convert_indices_from_csr_to_coo.default, values([0, 2, 2, 3]), values([1, 4, 0]), transpose=True
    ),
    case(aten._convert_indices_from_csr_to_coo.default, values([0, 2, 3]), values([1, 4, 0]), out_int32=True),
    case(aten._convert_indices_from_csr_to_coo.default, values([0, 0]), i64(0), id="empty"),
]
