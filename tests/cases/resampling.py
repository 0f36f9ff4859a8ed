"""Cases for up- and downsampling and for sampling at the points of a grid."""

import torch

from isthmus._graph.names import aten
from tests.support import bf16, case, f32, f64, fails, u8

LAST = lambda t: t.to(memory_format=torch.channels_last)  # noqa: E731
INPUT = {1: f32(2, 3, 9), 2: f32(2, 3, 5, 4), 3: f32(1, 2, 4, 3, 5)}
SIZES = {1: ([5], [18], [13]), 2: ([3, 8], [10, 8], [1, 1]), 3: ([2, 7, 5], [8, 6, 10], [3, 3, 3])}
CASES = [
    case(aten.upsample_nearest2d.default, u8(1, 2, 3, 4), [6, 5]),
    case(
        aten.upsample_nearest2d.default,
        bf16(2, 3, 5, 4).then(LAST),
        [3, 8],
        None,
        2.0,
        id="scale, channels last",
    ),
    case(aten.upsample_bilinear2d.default, bf16(2, 3, 5, 4), [3, 8], False),
    case(aten.upsample_bilinear2d.default, f64(2, 3, 5, 4), [8, 6], False, 1.7, 1.6, id="scales"),
    case(aten.upsample_bilinear2d.default, f32(0, 3, 5, 4), [8, 6], False, id="empty"),
    case(aten.upsample_bicubic2d.default, bf16(2, 3, 5, 4), [3, 8], True),
    case(aten.upsample_linear1d.default, f32(2, 3, 9), [15], False, 1.7, id="scale"),
    case(aten._upsample_nearest_exact1d.default, f32(2, 3, 9), [15], 1.7, id="scale"),
    fails(
        aten.upsample_bilinear2d.default, f32(2, 3, 5), [3, 8], False, error=RuntimeError, match="input_size"
    ),
    fails(aten.upsample_nearest1d.default, f32(2, 3, 5), [0], error=RuntimeError, match="greater than 0"),
]
for _n, _names in {
    1: ("upsample_nearest1d", "_upsample_nearest_exact1d", "upsample_linear1d"),
    2: ("upsample_nearest2d", "_upsample_nearest_exact2d", "upsample_bilinear2d", "upsample_bicubic2d"),
    3: ("upsample_nearest3d", "_upsample_nearest_exact3d", "upsample_trilinear3d"),
}.items():
    for _name in _names:
        _shape = INPUT[_n].shape
        for _size in SIZES[_n]:
            for _align in [[]] if "nearest" in _name else [[False], [True]]:
                CASES += [
                    case(getattr(aten, _name).default, INPUT[_n], _size, *_align),
                    case(
                        getattr(aten, f"{_name}_backward").default,
                        f32(*_shape[:2], *_size),
                        _size,
                        list(_shape),
                        *_align,
                    ),
                ]
for _mode in (0, 1, 2):
    for _padding in (0, 1, 2):
        for _align in (False, True):
            _options = (_mode, _padding, _align)
            # Cubic weights cancel: in float32 two right answers differ by more than the comparison allows.
            _make = f64 if _mode == 2 else f32
            _image, _grid = _make(2, 3, 5, 4), _make(2, 4, 3, 2).between(-1.6, 1.6)
            CASES += [
                case(aten.grid_sampler_2d.default, _image, _grid, *_options),
                case(
                    aten.grid_sampler_2d_backward.default,
                    _make(2, 3, 4, 3),
                    _image,
                    _grid,
                    *_options,
                    [True, True],
                ),
            ]
            if _mode == 2:
                continue
            _image, _grid = f32(2, 3, 5, 4, 3), f32(2, 2, 3, 4, 3).between(-1.6, 1.6)
            CASES += [
                case(aten.grid_sampler_3d.default, _image, _grid, *_options),
                case(
                    aten.grid_sampler_3d_backward.default,
                    f32(2, 3, 2, 3, 4),
                    _image,
                    _grid,
                    *_options,
                    [True, True],
                ),
            ]
CASES += [
    fails(
        aten.grid_sampler.default,
        f32(2, 3, 5, 4),
        f32(2, 3, 4, 3),
        0,
        0,
        False,
        error=RuntimeError,
        match="expected grid to have size 2 in last dimension",
    ),
]
BYTES = u8(2, 3, 9, 11).between(0, 255)
for _name in ("_upsample_bilinear2d_aa", "_upsample_bicubic2d_aa", "_upsample_lanczos2d_aa"):
    _op, _backward = getattr(aten, _name).default, getattr(aten, f"{_name}_backward").default
    for _size in ([4, 5], [13, 20], [9, 3]):
        CASES += [
            case(_op, f32(2, 3, 9, 11), _size, False),
            case(_op, BYTES, _size, True),
            case(_backward, f32(2, 3, *_size), _size, [2, 3, 9, 11], True),
        ]
    CASES += [
        case(_op, f64(2, 3, 9, 11), [9, 12], False, 1.05, 1.1, id="scales"),
        case(_op, BYTES, [9, 12], False, 1.05, 1.1, id="scales of bytes"),
        case(_backward, f64(2, 3, 9, 12), [9, 12], [2, 3, 9, 11], False, 1.05, 1.1, id="scales"),
        case(_op, f32(0, 3, 9, 11), [4, 5], False, id="empty"),
    ]
for _op in (aten.upsample_bilinear2d.default, aten.upsample_bicubic2d.default):
    for _size in ([4, 5], [13, 20], [9, 3]):
        CASES += [
            case(_op, BYTES, _size, False),
            case(_op, u8(1, 6, 9, 11).between(0, 255).then(LAST), _size, True, id=f"channels last {_size}"),
        ]
