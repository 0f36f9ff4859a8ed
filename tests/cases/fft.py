"""Cases for Fourier transforms."""

import torch

from isthmus._graph.names import aten
from tests.support import bf16, c64, c128, case, f32, f64, fails

c2c, r2c, c2r = aten._fft_c2c.default, aten._fft_r2c.default, aten._fft_c2r.default

CASES = [
    case(c2c, c64(3, 4), [], 0, True, id="no dims"),
    case(c2c, c64(2, 3, 2, 4, 5), [0, 1, 2, 3, 4], 2, False, id="five dims"),
    case(c2c, c64(4, 7).then(lambda t: t.t()), [0], 0, True, id="transposed"),
    case(c2c, c64(1), [0], 1, True, id="one element"),
    case(c2r, c64(2, 1), [1], 0, 1, id="one element"),
    case(torch.fft.fft, f32(5), 8, id="padded"),
    case(torch.fft.irfftn, c64(3, 4, 5), (4, 7), (0, -1), "ortho", id="irfftn"),
    case(torch.fft.hfft, c128(3, 4), id="hfft"),
    case(torch.fft.ihfft, f64(3, 5), id="ihfft"),
    fails(torch.fft.fft, bf16(4), error=RuntimeError, match="Unsupported dtype BFloat16"),
    fails(torch.fft.fft, f32(0), error=RuntimeError, match="Invalid number of data points"),
    fails(torch.fft.rfft, c64(4), error=RuntimeError, match="expects a real input"),
]
for _normalization in (0, 1, 2):
    for _size in (6, 7):
        _half = _size // 2 + 1
        CASES += [
            case(c2c, c64(2, _size), [1], _normalization, True),
            case(c2c, c128(_size, 3), [0, 1], _normalization, False),
            case(r2c, f32(2, _size), [1], _normalization, True),
            case(r2c, f32(2, _size), [1], _normalization, False),
            case(r2c, f64(_size, 3, 5), [2, 0], _normalization, True),
            case(r2c, f64(_size, 3, 5), [1, 0], _normalization, False),
            case(c2r, c64(2, _half), [1], _normalization, _size),
            case(c2r, c128(_half, 3, 4), [2, 0], _normalization, _size),
        ]
