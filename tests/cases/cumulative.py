"""Cases for running sums, products and extremes."""

import math

import torch

from isthmus._graph.names import aten
from tests.support import b8, bf16, case, f32, f64, fails, i32, i64, values

TIES = values([[2.0, 5.0, 5.0, 1.0], [1.0, math.nan, 2.0, math.nan]])
CASES = []
for _op in (aten.cumsum.default, aten.cumprod.default):
    CASES += [
        case(_op, f32(3, 4).then(lambda t: t.t()), -1),
        case(_op, i32(3, 4), 0),
        case(_op, b8(6), 0),
        case(_op, bf16(3, 20), 1),
        case(_op, f32(3), 0, dtype=torch.float64),
        case(_op, f32(), 0, id="0-dim"),
        case(_op, f32(0, 3), 0, id="empty"),
        fails(_op, f32(3), 1, error=IndexError, match="Dimension out of range"),
    ]
for _op in (aten.logcumsumexp.default, aten._logcumsumexp.default):
    CASES += [
        case(_op, f32(3, 4).then(lambda t: t.t()), -1),
        case(_op, values([-math.inf, -math.inf, 1.0, 80.0, 120.0]), 0, id="infinite"),
        case(_op, f64(), 0, id="0-dim"),
        case(_op, f32(0, 3), 0, id="empty"),
    ]
for _op in (aten.cummax.default, aten.cummin.default):
    CASES += [
        case(_op, f32(3, 4).then(lambda t: t.t()), -1),
        case(_op, TIES, 1, id="ties and nan"),
        case(_op, i64(3, 4), 0),
        case(_op, b8(6), 0),
        case(_op, f32(), 0, id="0-dim"),
        case(_op, f32(0, 3), 0, id="empty"),
    ]
