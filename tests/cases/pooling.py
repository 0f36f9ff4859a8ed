"""Cases for pooling: nans, ties and all minus infinity too, since the index must be torch's."""

import torch

from isthmus._graph.names import aten
from tests.support import bf16, case, f16, f32, f64, fails, i64, values

INF, NAN = float("inf"), float("nan")
LAST = lambda t: t.to(memory_format=torch.channels_last)  # noqa: E731
ODD = values([[[[1.0, 1.0, NAN, 2.0, -INF], [1.0, 1.0, NAN, 2.0, -INF], [0.0, 3.0, 3.0, -INF, -INF]]]])
MAX2, MAX3 = aten.max_pool2d_with_indices.default, aten.max_pool3d_with_indices.default
AVG2, AVG3 = aten.avg_pool2d.default, aten.avg_pool3d.default
PLACES = lambda top, *shape: i64(*shape).between(0, top)  # noqa: E731

CASES = [
    case(MAX2, f32(2, 3, 9, 8), [3, 2], [2, 1], [1, 0]),
    case(MAX2, f32(3, 9, 8), [3], [2], [1], [2], True, id="no batch, dilation, ceil"),
    case(MAX2, f32(2, 3, 9, 8).then(LAST), [2], id="channels last"),
    case(MAX2, bf16(2, 3, 9, 8), [3], [2], [1]),
    case(MAX2, i64(2, 3, 6, 6), [2]),
    case(MAX2, f32(0, 3, 9, 8), [3], id="empty"),
    case(MAX2, ODD, [2], [1], id="nans and ties"),
    case(MAX2, ODD, [3], [2], [1], [1], True, id="nans and ties, padded"),
    case(MAX3, f32(2, 3, 5, 6, 7), [2, 3, 2], [2, 2, 1], [1, 1, 0]),
    case(MAX3, f32(3, 5, 6, 7), [2], [], [0], [2], True, id="dilation, ceil"),
    fails(MAX2, f32(2, 3, 9, 8), [3], [2], [2], error=RuntimeError, match="pad should be at most half"),
    fails(MAX2, f32(2, 3, 2, 2), [3], error=RuntimeError, match="Output size is too small"),
    case(
        aten.max_pool2d_with_indices_backward.default,
        f32(2, 3, 4, 4),
        f32(2, 3, 9, 8),
        [2],
        [2],
        [0],
        [1],
        False,
        PLACES(71, 2, 3, 4, 4),
    ),
    case(
        aten.max_pool2d_with_indices_backward.default,
        f32(0, 3, 4, 4),
        f32(0, 3, 9, 8),
        [2],
        [2],
        [0],
        [1],
        False,
        PLACES(71, 0, 3, 4, 4),
        id="empty",
    ),
    case(
        aten.max_pool3d_with_indices_backward.default,
        f32(2, 2, 3, 3),
        f32(2, 5, 6, 7),
        [2],
        [2],
        [0],
        [1],
        False,
        PLACES(209, 2, 2, 3, 3),
    ),
    case(
        aten.max_pool3d_with_indices_backward.default,
        f64(1, 2, 2, 3, 3),
        f64(1, 2, 5, 6, 7),
        [2],
        [2],
        [0],
        [1],
        False,
        PLACES(209, 1, 2, 2, 3, 3),
    ),
    case(AVG2, f32(2, 3, 9, 8), [3, 2], [2, 1], [1, 0]),
    case(AVG2, f32(3, 9, 8), [3], [2], [1], True, False, id="ceil, pads not counted"),
    case(AVG2, f32(3, 9, 8), [3], [2], [1], True, True, id="ceil, pads counted"),
    case(AVG2, bf16(2, 3, 9, 8), [3], [2], [1], False, True, 2, id="divisor"),
    case(AVG2, i64(2, 3, 9, 8), [3], [2], id="integers"),
    case(AVG2, f32(0, 3, 9, 8), [3], id="empty"),
    case(AVG3, f32(2, 3, 5, 6, 7), [2, 3, 2], [2, 2, 1], [1, 1, 0]),
    case(AVG3, f32(3, 5, 6, 7), [2], [], [0], True, False, id="ceil"),
    case(aten.avg_pool2d_backward.default, f32(3, 5, 5), f32(3, 9, 8), [3], [2], [1], True, False, None),
    case(aten.avg_pool2d_backward.default, bf16(3, 5, 4), bf16(3, 9, 8), [3], [2], [1], False, True, None),
    case(aten.avg_pool3d_backward.default, f32(3, 3, 3, 4), f32(3, 5, 6, 7), [2], [], [0], True, False, None),
    case(
        aten.avg_pool3d_backward.default, f64(1, 3, 2, 3, 3), f64(1, 3, 5, 6, 7), [2], [], [0], False, True, 3
    ),
    fails(AVG2, f32(2, 3, 9, 8), [3], [2], [2], error=RuntimeError, match="pad should be at most half"),
    fails(
        AVG2,
        f32(2, 3, 9, 8),
        [3],
        [2],
        [0],
        False,
        True,
        0,
        error=RuntimeError,
        match="divisor must be not zero",
    ),
    case(aten._adaptive_avg_pool2d.default, f32(2, 3, 9, 8), [4, 8]),
    case(aten._adaptive_avg_pool2d.default, bf16(3, 9, 8), [3, 13]),
    case(
        aten._adaptive_avg_pool2d.default,
        values([[[[1.0, INF, 2.0], [0.0, 1.0, 2.0]]]]),
        [1, 2],
        id="infinity",
    ),
    case(aten._adaptive_avg_pool3d.default, f32(2, 3, 5, 6, 7), [2, 4, 3]),
    case(aten._adaptive_avg_pool3d.default, f32(0, 3, 5, 6, 7), [2, 4, 3], id="empty"),
    case(aten._adaptive_avg_pool2d_backward.default, f32(2, 3, 4, 8), f32(2, 3, 9, 8)),
    case(aten._adaptive_avg_pool2d_backward.default, bf16(2, 3, 3, 13), bf16(2, 3, 9, 8)),
    case(aten._adaptive_avg_pool3d_backward.default, f32(2, 3, 2, 4, 3), f32(2, 3, 5, 6, 7)),
    case(aten._adaptive_avg_pool3d_backward.default, f64(3, 1, 1, 1), f64(3, 5, 6, 7)),
    case(aten.adaptive_max_pool2d.default, f32(2, 3, 9, 8), [4, 8]),
    case(aten.adaptive_max_pool2d.default, ODD, [2, 4], id="nans and ties"),
    case(aten.adaptive_max_pool2d.default, bf16(3, 9, 8), [3, 3]),
    case(aten.adaptive_max_pool3d.default, f32(2, 3, 5, 6, 7), [2, 4, 3]),
    case(aten.adaptive_max_pool3d.default, f64(3, 5, 6, 7), [1, 1, 1]),
    case(aten.adaptive_max_pool2d_backward.default, f32(2, 3, 4, 4), f32(2, 3, 9, 8), PLACES(71, 2, 3, 4, 4)),
    case(aten.adaptive_max_pool2d_backward.default, f64(3, 4, 4), f64(3, 9, 8), PLACES(71, 3, 4, 4)),
    case(
        aten.adaptive_max_pool3d_backward.default, f32(2, 2, 3, 3), f32(2, 5, 6, 7), PLACES(209, 2, 2, 3, 3)
    ),
    case(
        aten.adaptive_max_pool3d_backward.default, f64(2, 2, 3, 3), f64(2, 5, 6, 7), PLACES(209, 2, 2, 3, 3)
    ),
    fails(
        aten._adaptive_avg_pool2d.default, f32(2, 3), [2, 2], error=RuntimeError, match="Expected 3D or 4D"
    ),
    case(aten.max_unpool2d.default, f32(1, 1, 2, 2), values([[[[5, 2], [0, 7]]]]), [3, 4]),
    case(aten.max_unpool2d.default, bf16(1, 2, 2), values([[[5, 2], [0, 7]]]), [3, 4]),
    case(
        aten.max_unpool3d.default,
        f32(1, 1, 1, 2, 2),
        values([[[[[5, 2], [0, 7]]]]]),
        [1, 3, 4],
        [1, 2, 2],
        [0, 0, 0],
    ),
    fails(
        aten.max_unpool2d.default,
        f32(1, 1, 2, 2),
        values([[[[5, 2], [0, 12]]]]),
        [3, 4],
        error=RuntimeError,
        match="Found an invalid max index",
    ),
]
FRACTIONAL2, FRACTIONAL3 = aten.fractional_max_pool2d.default, aten.fractional_max_pool3d.default
CHANCE = lambda make: make.between(0, 1)  # noqa: E731
CASES += [
    case(FRACTIONAL2, f32(2, 3, 9, 11), [2, 3], [4, 5], CHANCE(f32(2, 3, 2))),
    case(FRACTIONAL2, f64(3, 9, 11), [3, 2], [1, 7], CHANCE(f64(1, 3, 2)), id="no batch"),
    case(FRACTIONAL2, bf16(2, 3, 9, 9), [2, 2], [8, 8], CHANCE(bf16(2, 3, 2))),
    case(FRACTIONAL2, f16(1, 40, 13, 9), [2, 2], [5, 8], CHANCE(f16(1, 40, 2))),
    case(FRACTIONAL2, ODD, [2, 2], [2, 3], CHANCE(f32(1, 1, 2)), id="nans and ties"),
    case(FRACTIONAL2, f32(0, 3, 9, 9), [2, 2], [3, 3], CHANCE(f32(0, 3, 2)), id="empty"),
    case(FRACTIONAL3, f32(2, 3, 7, 9, 11), [2, 2, 3], [3, 4, 5], CHANCE(f32(2, 3, 3))),
    case(FRACTIONAL3, f32(3, 7, 9, 11), [3, 3, 2], [1, 2, 7], CHANCE(f32(1, 3, 3)), id="no batch"),
    case(
        aten.fractional_max_pool2d_backward.default,
        f32(2, 3, 4, 5),
        f32(2, 3, 9, 11),
        [2, 3],
        [4, 5],
        PLACES(98, 2, 3, 4, 5),
    ),
    case(
        aten.fractional_max_pool3d_backward.default,
        f32(3, 2, 2, 2),
        f32(3, 4, 5, 6),
        [2, 2, 2],
        [2, 2, 2],
        PLACES(119, 3, 2, 2, 2),
    ),
    fails(
        FRACTIONAL2,
        f32(1, 3, 9, 9),
        [2, 2],
        [9, 9],
        CHANCE(f32(1, 3, 2)),
        error=RuntimeError,
        match="too large relative to input",
    ),
]
