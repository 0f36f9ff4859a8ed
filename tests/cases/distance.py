"""Cases for distances between rows and their gradients."""

import math

import torch

from isthmus._graph.names import aten
from tests.support import bf16, case, f16, f32, f64, fails, values

forward, backward = aten._cdist_forward.default, aten._cdist_backward.default
pairs, pairs_backward = aten._pdist_forward.default, aten._pdist_backward.default
ROWS = values([[0.0, 1.0, 2.0], [3.0, -1.0, 2.0], [0.0, 1.0, -4.0]])  # rows equal in some coordinates
ENDLESS = values([[0.0, 1.0], [math.inf, 1.0], [1.0, 2.0]])

CASES = [
    case(forward, f32(3, 1, 4, 5), f32(2, 6, 5), 2.0, 2, id="broadcast batches"),
    case(forward, f32(30, 4), f32(3, 4), 2.0, None, id="matrix product"),
    case(forward, f64(2, 4, 3), f64(5, 3), 2.0, 1, id="matrix product asked for"),
    case(forward, f32(30, 4), f32(30, 4), 2.0, 2, id="no matrix product"),
    case(forward, f32(3, 0), f32(4, 0), 2.0, None, id="no columns"),
    case(forward, f32(0, 3), f32(4, 3), 1.0, None, id="no rows"),
    case(backward, f32(4, 3), f32(4, 0), f32(3, 0), 1.0, f32(4, 3), id="no columns"),
    case(aten._euclidean_dist.default, f32(4, 3), f32(5, 3)),
    case(aten._euclidean_dist.default, bf16(4, 3), bf16(5, 3)),
    case(pairs, f32(1, 3), 2.0, id="one row"),
    case(pairs, f32(0, 3), 2.0, id="no rows"),
    case(pairs, values([[0.0, math.nan], [1.0, math.inf], [1.0, 2.0]]), math.inf, id="nan and infinity"),
    case(pairs_backward, f32(3), ENDLESS, 1.0, ENDLESS.then(lambda t: torch.pdist(t, 1.0)), id="infinity"),
    fails(forward, f32(3, 2), f32(3, 4), 2.0, None, error=RuntimeError, match="same number of columns"),
    fails(forward, f32(3, 2), f32(3, 2), -1.0, None, error=RuntimeError, match="non-negative p"),
    fails(forward, f16(3, 2), f16(3, 2), 1.0, None, error=RuntimeError, match="not implemented for 'Half'"),
]
for _p in (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, math.inf):
    CASES += [
        case(forward, f32(4, 3), f32(5, 3), _p, None),
        case(forward, f64(2, 4, 3), f64(2, 5, 3), _p, None),
        case(forward, ROWS, ROWS, _p, None, id=f"equal rows,{_p}"),
        case(
            backward, f32(3, 3), ROWS, ROWS, _p, ROWS.then(lambda t, p=_p: torch.cdist(t, t, p)), id=f"{_p}"
        ),
        case(
            backward,
            f64(2, 4, 5),
            f64(2, 4, 3),
            f64(1, 5, 3),
            _p,
            f64(2, 4, 5).between(1, 2),
            id=f"wide,{_p}",
        ),
        case(pairs, f64(5, 3), _p),
        case(pairs_backward, f32(3), ROWS, _p, ROWS.then(lambda t, p=_p: torch.pdist(t, p)), id=f"{_p}"),
        case(pairs_backward, f64(10), f64(5, 3), _p, f64(5, 3).then(lambda t, p=_p: torch.pdist(t, p))),
    ]
CASES += [
    case(pairs_backward, f32(1), values([[1.0, 2.0], [1.0, 2.0]]), _p, values([0.0]), id=f"equal rows,{_p}")
    for _p in (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, math.inf)
]
