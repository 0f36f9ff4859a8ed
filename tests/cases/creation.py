"""Cases for copies, casts, fills and new tensors."""

import torch

from isthmus._graph.names import aten
from tests.support import b8, bf16, c64, case, f32, f64, fails, i8, i64, u8, values

CPU = torch.device("cpu")


def _turned(t: torch.Tensor) -> torch.Tensor:
    return t.t()


CASES = [
    case(aten.clone.default, f32(3, 4).then(_turned)),
    case(aten.clone.default, f32(3, 4).then(_turned), memory_format=torch.contiguous_format),
    case(aten._to_copy.default, f32(3, 4).between(-300, 300), dtype=torch.int8),
    case(aten._to_copy.default, values([-1.5, 2.5, 300.0]), dtype=torch.int16),
    case(aten._to_copy.default, c64(3), dtype=torch.complex128),
    case(aten._to_copy.default, f64(3).then(lambda t: t * 1e-3), dtype=torch.bool),
    case(aten.copy.default, f32(3, 4), i64(4)),
    case(aten.copy.default, b8(3), f32(3)),
    case(aten.fill.Scalar, f32(3, 4).then(_turned), 2),
    case(aten.fill.Scalar, u8(3), 255),
    case(aten.fill.Tensor, bf16(3), values(2.5)),
    case(aten.fill.Tensor, i8(0), values(2)),
    case(aten.zero.default, f32(3, 4).then(_turned)),
    case(aten.zero.default, b8(3)),
    case(aten.zeros_like.default, f32(3, 4).then(_turned)),
    case(aten.zeros_like.default, f32(3, 4), dtype=torch.int64),
    case(aten.ones_like.default, f32(3, 4).then(_turned)),
    case(aten.ones_like.default, b8()),
    case(aten.full_like.default, i64(3, 4), 2),
    case(aten.full_like.default, f32(3, 4).then(_turned), float("nan"), dtype=torch.float64),
    case(aten.new_zeros.default, i64(3), [2, 2]),
    case(aten.new_zeros.default, f32(3), [], dtype=torch.bool),
    case(aten.new_ones.default, b8(3), [2]),
    case(aten.new_ones.default, bf16(3), [0]),
    case(aten.new_full.default, f32(3), [2], 7),
    case(aten.new_full.default, i64(3), [2], 7.5, dtype=torch.float16),
    case(aten.zeros.default, [2, 0, 3], device=CPU),
    case(aten.zeros.default, [2, 3], dtype=torch.complex64, device=CPU),
    case(aten.ones.default, [2, 3], device=CPU),
    case(aten.ones.default, [], dtype=torch.bool, device=CPU),
    case(aten.full.default, [2, 3], 1.5, device=CPU),
    case(aten.full.default, [2, 3], 3, device=CPU),
    case(aten.full.default, [2], True, device=CPU),
    case(aten.full.default, [2], 1 + 2j, device=CPU),
    case(aten.full.default, [2], 1.5, dtype=torch.int32, device=CPU),
    case(aten.scalar_tensor.default, 2, device=CPU),
    case(aten.scalar_tensor.default, 2.5, dtype=torch.int64, device=CPU),
    case(aten.eye.default, 3, device=CPU),
    case(aten.eye.default, 0, dtype=torch.int64, device=CPU),
    case(aten.eye.m, 2, 4, dtype=torch.bool, device=CPU),
    case(aten.eye.m, 4, 2, device=CPU),
    fails(aten.eye.default, -1, device=CPU, error=RuntimeError, match="n must be greater or equal to 0"),
    case(aten.arange.default, 5, device=CPU),
    case(aten.arange.default, 4.5, device=CPU),
    case(aten.arange.start, 2, 7, dtype=torch.float64, device=CPU),
    case(aten.arange.start, -1.5, 2, dtype=torch.int32, device=CPU),
    case(aten.arange.start_step, 0, 1, 0.1, device=CPU),
    case(aten.arange.start_step, 5, -5, -3, device=CPU),
    case(aten.arange.start_step, 0, 1, 0.1, dtype=torch.bfloat16, device=CPU),
    case(aten.arange.start_step, 3, 3, 1, device=CPU),
    fails(aten.arange.start_step, 0, 5, 0, device=CPU, error=RuntimeError, match="step must be nonzero"),
    fails(
        aten.arange.start_step, 0, 5, -1, device=CPU, error=RuntimeError, match="inconsistent with step sign"
    ),
    case(aten.range.step, 0, 4, 2, device=CPU),
    case(aten.range.default, 1, 3, dtype=torch.int64, device=CPU),
    fails(aten.range.step, 0, 4, 0, device=CPU, error=RuntimeError, match="step must be nonzero"),
    case(aten.linspace.default, -1, 3, 7, device=CPU),
    case(aten.linspace.default, 0, 10, 4, dtype=torch.int64, device=CPU),
    case(aten.linspace.default, 0, 1, 1, dtype=torch.bfloat16, device=CPU),
    case(aten.linspace.Tensor_Tensor, f32(), f32().between(5, 6), 5, device=CPU),
    case(aten.linspace.Tensor_Scalar, f32(), 5, 5, device=CPU),
    case(aten.linspace.Scalar_Tensor, 0, f32(), 0, device=CPU),
    fails(aten.linspace.default, 0, 1, -1, device=CPU, error=RuntimeError, match="non-negative"),
    case(aten.logspace.default, 0, 2, 5, device=CPU),
    case(aten.logspace.default, 0, 3, 4, 2.0, dtype=torch.int64, device=CPU),
    case(aten.logspace.Tensor_Scalar, f32(), 1, 3, device=CPU),
    case(aten.logspace.default, 0, 1.2, 2, dtype=torch.int64, device=CPU, id="ends become integers"),
    case(aten.linspace.default, 4.3, 0, 50, dtype=torch.uint8, device=CPU, id="ends become integers"),
    case(aten.linspace.default, 50, 1, 50, dtype=torch.uint8, device=CPU, id="downwards"),
]
