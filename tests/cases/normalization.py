"""Cases for normalization; half types go through the composites, whose statistics torch keeps to itself."""

import torch

from tests.support import bf16, case, f32, f64, fails

aten = torch.ops.aten
T = lambda t: t.transpose(0, 1)  # noqa: E731
MEAN, RSTD = f32(4, 1), f32(4, 1).between(0.5, 2)
BATCH, SAVED = f32(4, 3, 2), f32(3).between(0.5, 2)

CASES = [
    case(aten.native_layer_norm.default, f32(4, 6), [6], f32(6), f32(6), 1e-5),
    case(aten.native_layer_norm.default, f32(4, 6).then(T), [6, 4], None, None, 1e-3, id="no affine"),
    case(aten.native_layer_norm.default, f32(0, 6), [6], f32(6), f32(6), 1e-5, id="empty"),
    case(aten.layer_norm.default, bf16(4, 6), [6], bf16(6), bf16(6)),
    case(aten.native_layer_norm_backward.default, f32(4, 6), f32(4, 6), [6], MEAN, RSTD, f32(6), f32(6), [True] * 3),
    case(
        aten.native_layer_norm_backward.default, f32(6, 4).then(T), f32(4, 6), [6], MEAN, RSTD, None, None,
        [True, False, False], id="input only",
    ),
    fails(aten.native_layer_norm.default, f32(4, 6), [5], None, None, 1e-5, error=RuntimeError, match="normalized_shape"),
    case(aten.native_group_norm.default, f32(2, 6, 4), f32(6), f32(6), 2, 6, 4, 3, 1e-5),
    case(aten.native_group_norm.default, f32(2, 6, 4), None, None, 2, 6, 4, 2, 1e-3, id="no affine"),
    case(aten.group_norm.default, bf16(2, 6, 2, 2), 3, bf16(6), bf16(6)),
    case(
        aten.native_group_norm_backward.default, f32(2, 6, 4), f32(2, 6, 4), f32(2, 3).between(-1, 1), f32(2, 3).between(0.5, 1), f32(6),
        2, 6, 4, 3, [True, True, True],
    ),
    case(
        aten.native_group_norm_backward.default, f32(2, 6, 4), f32(2, 6, 4), f32(2, 2).between(-1, 1), f32(2, 2).between(0.5, 1), None,
        2, 6, 4, 2, [True, False, False], id="no affine",
    ),
    fails(aten.group_norm.default, f32(2, 6, 4), 4, error=RuntimeError, match="divisible by num_groups"),
    case(aten.native_batch_norm.default, BATCH, f32(3), f32(3), f32(3), SAVED, True, 0.1, 1e-5, id="train"),
    case(aten.batch_norm.default, BATCH, f32(3), f32(3), f32(3), SAVED, False, 0.1, 1e-5, False, id="eval"),
    case(aten.native_batch_norm.default, BATCH, None, None, None, None, True, 0.1, 1e-5, id="no stats"),
    case(aten.native_batch_norm.default, f64(4, 3), f64(3), None, None, None, True, 0.1, 1e-5, id="no bias"),
    case(aten._native_batch_norm_legit.no_stats, f32(3, 4, 2).then(T), f32(3), f32(3), True, 0.1, 1e-5),
    case(aten._native_batch_norm_legit.no_stats, BATCH, None, None, True, 0.1, 1e-3),
    case(aten._native_batch_norm_legit.default, BATCH, f32(3), f32(3), f32(3), SAVED, True, 0.3, 1e-5),
    case(aten._native_batch_norm_legit_functional.default, BATCH, f32(3), f32(3), f32(3), SAVED, True, 0.3, 1e-5),
    case(aten.batch_norm.default, bf16(4, 3, 2), bf16(3), bf16(3), bf16(3), bf16(3).between(0.5, 2), False, 0.1, 1e-5, False),
    case(
        aten.native_batch_norm_backward.default, BATCH, BATCH, f32(3), f32(3), SAVED, f32(3), SAVED, True, 1e-5,
        [True] * 3, id="train",
    ),
    case(
        aten.native_batch_norm_backward.default, f32(3, 4, 2).then(T), BATCH, f32(3), f32(3), SAVED, None, None,
        False, 1e-5, [True, True, False], id="eval",
    ),
    case(aten._fused_rms_norm.default, f32(4, 6), [6], f32(6), 1e-5),
    case(aten._fused_rms_norm.default, f32(6, 4).then(T), [4, 6], None, None, id="no weight"),
    case(aten.rms_norm.default, bf16(4, 6), [6], bf16(6), 1e-5),
    case(aten.instance_norm.default, f32(2, 3, 4), f32(3), f32(3), None, None, True, 0.1, 1e-5, False),
    case(aten.instance_norm.default, f32(2, 3, 4), None, None, f32(3), SAVED, False, 0.1, 1e-5, False, id="eval"),
]
