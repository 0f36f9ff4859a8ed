"""Cases for reductions of segments: empty segments, nans, ties, rows in no segment."""

from typing import Any

import torch

from isthmus._graph.names import aten
from tests.support import bf16, case, f32, fails, i64, values

NAN, INF = float("nan"), float("inf")
FORWARD = aten.segment_reduce.default
ODD = values([[1.0, 0.0], [2.0, NAN], [2.0, 0.0], [INF, 3.0], [-1.0, 3.0], [0.0, -2.0]])
LENGTHS, OFFSETS = values([3, 0, 2, 1]), values([1, 3, 3, 5])


def gradient(data: torch.Tensor, weights: torch.Tensor, reduce: str, **options: Any) -> torch.Tensor:
    """The gradient of the reduction."""
    leaf = data.detach().requires_grad_()
    return torch.autograd.grad(torch.segment_reduce(leaf, reduce, **options), leaf, weights)[0]


CASES = [
    fails(FORWARD, f32(6, 2), "sum", lengths=values([3, 2]), error=RuntimeError, match="sum to data.size"),
    fails(FORWARD, f32(6, 2), "sum", lengths=values([-1, 7]), error=RuntimeError, match="negative value"),
    fails(FORWARD, i64(6, 2), "sum", lengths=values([3, 3]), error=NotImplementedError, match="Long"),
]
for _reduce in ("sum", "mean", "prod", "max", "min"):
    CASES += [
        case(FORWARD, ODD, _reduce, lengths=LENGTHS, id=_reduce),
        case(FORWARD, ODD, _reduce, lengths=LENGTHS, initial=1.5, id=f"{_reduce}, initial"),
        case(FORWARD, ODD, _reduce, offsets=OFFSETS, id=f"{_reduce}, offsets"),
        case(FORWARD, f32(2, 5), _reduce, lengths=values([[2, 3], [5, 0]]), axis=1, id=f"{_reduce}, axis"),
        case(FORWARD, f32(0, 2), _reduce, lengths=values([0, 0]), id=f"{_reduce}, empty"),
        case(FORWARD, bf16(6, 2), _reduce, lengths=values([4, 2]), id=f"{_reduce}, bfloat16"),
        case(gradient, ODD, f32(4, 2), _reduce, lengths=LENGTHS, id=_reduce),
        case(gradient, ODD, f32(4, 2), _reduce, lengths=LENGTHS, initial=0.5, id=f"{_reduce}, initial"),
        case(gradient, ODD, f32(3, 2), _reduce, offsets=OFFSETS, id=f"{_reduce}, offsets"),
    ]
