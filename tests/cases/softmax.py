"""Cases for softmax, its logarithm and their gradients."""

import torch

from isthmus._graph.names import aten
from tests.support import bf16, case, f16, f32, f64, fails, values

INF = float("inf")
EXTREMES = values([[1e4, -1e4, 0.0], [-INF, 1.0, 2.0], [-INF, -INF, -INF], [INF, 1.0, 2.0]])

CASES = []
for _op in (aten._softmax.default, aten._log_softmax.default):
    CASES += [
        case(_op, f32(4, 7), -1, False),
        case(_op, f32(4, 7).then(lambda t: t.t()), -1, False, id="transposed"),
        case(_op, bf16(4, 7), 0, False),
        case(_op, f16(3, 4, 5), 1, False),
        case(_op, f64(4, 7), 1, False),
        case(_op, f32(), 0, False, id="scalar"),
        case(_op, f32(0, 3), 1, False, id="empty"),
        case(_op, f32(3, 0), 1, False, id="empty dim"),
        case(_op, EXTREMES, 1, False, id="extremes"),
        fails(_op, f32(4, 7), 2, False, error=IndexError, match="out of range"),
    ]
CASES += [
    case(aten._safe_softmax.default, f32(4, 7), -1),
    case(aten._safe_softmax.default, bf16(4, 7), 0, torch.float32, id="to float32"),
    case(aten._safe_softmax.default, f16(3, 4, 5), 1),
    case(aten._safe_softmax.default, f32(3, 0), 1, id="empty dim"),
    case(aten._safe_softmax.default, EXTREMES, 1, id="extremes"),
]
for _op in (aten._softmax_backward_data.default, aten._log_softmax_backward_data.default):
    CASES += [
        case(_op, f32(4, 7), f32(4, 7).between(-3, 0), -1, torch.float32),
        case(
            _op, f32(7, 4).then(lambda t: t.t()), f32(4, 7).between(-3, 0), 0, torch.float32, id="transposed"
        ),
        case(_op, bf16(4, 7), bf16(4, 7).between(-3, 0), 1, torch.bfloat16),
        case(_op, f32(), f32().between(-1, 0), 0, torch.float32, id="scalar"),
        case(_op, f32(0, 3), f32(0, 3), 1, torch.float32, id="empty"),
    ]
