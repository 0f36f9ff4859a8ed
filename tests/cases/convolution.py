"""Cases for convolution and its gradients."""

import torch

from tests.support import bf16, case, f16, f32, f64, fails

aten = torch.ops.aten
LAST = lambda t: t.to(memory_format=torch.channels_last)  # noqa: E731
CONV, BACK = aten.convolution.default, aten.convolution_backward.default
ALL = [True, True, True]

CASES = [
    case(CONV, f32(2, 4, 9), f32(6, 4, 3), f32(6), [2], [1], [1], False, [0], 1, id="1d"),
    case(CONV, f32(2, 4, 9, 8), f32(6, 2, 3, 3), None, [1], [0], [2], False, [0], 2, id="groups, dilation"),
    case(CONV, f32(2, 4, 9, 8).then(LAST), f32(6, 4, 3, 2), f32(6), [1, 2], [1, 0], [1, 1], False, [0, 0], 1, id="last"),
    case(CONV, f64(1, 2, 4, 5, 3), f64(3, 2, 2, 2, 2), f64(3), [2], [1], [1], False, [0], 1, id="3d"),
    case(CONV, bf16(2, 4, 9), bf16(6, 4, 3), bf16(6), [1], [1], [1], False, [0], 1, id="bf16"),
    case(CONV, f16(2, 4, 9), f16(6, 4, 3), f16(6), [1], [1], [1], False, [0], 1, id="f16"),
    case(CONV, f32(0, 4, 9), f32(6, 4, 3), f32(6), [1], [1], [1], False, [0], 1, id="empty"),
    case(CONV, f32(2, 4, 5), f32(4, 6, 3), f32(6), [2], [1], [1], True, [1], 1, id="transposed"),
    case(CONV, f32(2, 4, 5, 4), f32(4, 3, 3, 2), None, [3, 2], [4, 0], [2, 1], True, [1, 0], 2, id="transposed groups"),
    fails(CONV, f32(2, 4, 9), f32(6, 3, 3), None, [1], [0], [1], False, [0], 1, error=RuntimeError, match="channels"),
    fails(CONV, f32(2, 4, 2), f32(6, 4, 3), None, [1], [0], [1], False, [0], 1, error=RuntimeError, match="ernel size"),
    case(BACK, f32(2, 6, 5), f32(2, 4, 9), f32(6, 4, 3), [6], [2], [1], [1], False, [0], 1, ALL, id="1d"),
    case(
        BACK, f32(2, 6, 5, 4), f32(2, 4, 9, 8), f32(6, 2, 3, 3), [6], [1], [0], [2], False, [0], 2, ALL,
        id="groups, dilation",
    ),
    case(
        BACK, f32(2, 6, 5, 4), f32(2, 4, 9, 8), f32(6, 2, 3, 3), None, [1], [0], [2], False, [0], 2,
        [False, True, False], id="weight only",
    ),
    case(BACK, f32(2, 6, 10), f32(2, 4, 5), f32(4, 6, 3), [6], [2], [1], [1], True, [1], 1, ALL, id="transposed"),
    case(BACK, bf16(2, 6, 9), bf16(2, 4, 9), bf16(6, 4, 3), [6], [1], [1], [1], False, [0], 1, ALL, id="bf16"),
    case(BACK, f16(2, 6, 9), f16(2, 4, 9), f16(6, 4, 3), [6], [1], [1], [1], False, [0], 1, ALL, id="f16"),
]
