"""Cases for histograms: elements on edges, outside, nans, and ranges of no width."""

import torch

from isthmus._graph.names import aten
from tests.support import b8, bf16, case, f16, f32, f64, fails, values

COUNT, EDGES = aten.histogram.bin_ct, aten.histogram.bins_tensor
BY_COUNTS, BY_EDGES = aten._histogramdd_from_bin_cts.default, aten._histogramdd_from_bin_tensors.default
NAN = float("nan")
TENTHS = values([n / 10 for n in range(101)])

CASES = [
    case(aten.histc.default, TENTHS, 100, 0, 10, id="on the edges"),
    case(aten.histc.default, f64(200), 33, -1, 2.7),
    case(aten.histc.default, f16(200), 10, -2, 2),
    case(aten.histc.default, bf16(200), 7),
    case(aten.histc.default, values([1.0, NAN, 2.0]), 4, 0, 3, id="nan"),
    case(aten.histc.default, f32(0), 4, id="empty"),
    fails(aten.histc.default, f32(4), 4, 3, 0, error=RuntimeError, match="max must be larger than min"),
    fails(aten.histc.default, values([1.0, NAN]), 4, error=RuntimeError, match="is not finite"),
    fails(aten.histc.default, b8(4), 4, error=NotImplementedError, match="not implemented for 'Bool'"),
    case(COUNT, f32(200), 7),
    case(COUNT, TENTHS, 100, range=[0.0, 10.0], id="on the edges"),
    case(COUNT, f64(5, 8), 5, range=[-2.0, 1.0], weight=f64(8, 5).then(lambda t: t.t()), density=True),
    case(COUNT, values([1.0, 1.0]), 3, id="one value"),
    case(COUNT, f32(0), 3, id="empty"),
    fails(COUNT, values([1.0, NAN]), 3, error=RuntimeError, match="range .*is not finite"),
    fails(COUNT, f32(4), 3, range=[3.0, 2.0], error=RuntimeError, match="min should not exceed max"),
    case(EDGES, f32(200), values([-2.0, -2.0, 0.5, 3.0])),
    case(EDGES, f32(200), values([-2.0, 0.5, 3.0]), weight=f32(200), density=True),
    fails(EDGES, f32(4), values([0.0, 1.0], dtype=torch.float64), error=RuntimeError, match="same dtype"),
    case(aten._histogramdd_bin_edges.default, f32(9, 1), [4], id="edges of one"),
    case(aten._histogramdd_bin_edges.default, f32(9, 3), [4, 2, 5], id="edges of three"),
    case(BY_COUNTS, f32(50, 2), [4, 3]),
    case(BY_COUNTS, f32(5, 10, 2), [4, 3], range=[-1.0, 2.0, 0.0, 0.0], weight=f32(5, 10), density=True),
    case(BY_EDGES, f32(50, 2), [values([-1.0, 0.0, 2.5]), values([-3.0, 1.0, 2.0, 3.0])], density=True),
    case(torch.histogramdd, f32(50, 2), [4, 3], id="together"),
]
