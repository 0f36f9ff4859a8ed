"""Cases for attention, whole transformer layers outside training, and the fused cells of RNNs."""

from typing import Any

import torch
from torch import Tensor

from isthmus._graph.names import aten
from tests.support import b8, bf16, case, f32, f64, fails, values

SDPA = aten.scaled_dot_product_attention.default
Q, K, V = f32(2, 4, 5, 8), f32(2, 4, 7, 8).then(lambda t: t / 2), f32(2, 4, 7, 6)
HOLES = b8(5, 7).then(lambda t: t.index_fill(0, torch.tensor([2]), False))
NEVER = f32(5, 7).then(lambda t: t.index_fill(0, torch.tensor([2]), -torch.inf))
LAYER = (f64(24, 8), f64(24), f64(8, 8), f64(8))
NORMS = (f64(8), f64(8), f64(8), f64(8))
FEED = (f64(16, 8), f64(16), f64(8, 16), f64(8))
CAUSAL = b8(5, 5).then(lambda t: torch.triu(torch.ones_like(t), 1))
PADDING = values([[False] * 5, [False, False, True, True, True]])
FLASH = aten._scaled_dot_product_flash_attention_for_cpu.default


def flash_gradients(query: Tensor, key: Tensor, value: Tensor, causal: bool, mask: Tensor | None) -> Any:
    """What torch's attention of CPU tensors gives backward, which needs what forward saved."""
    out, sums = FLASH(query, key, value, 0.0, causal, attn_mask=mask)
    backward = aten._scaled_dot_product_flash_attention_for_cpu_backward.default
    return backward(out.cos(), query, key, value, out, sums, 0.0, causal, attn_mask=mask)


CASES = [
    case(FLASH, Q, K, K),
    case(FLASH, Q, K, K, 0.0, True, id="causal"),
    case(FLASH, Q, K, K, attn_mask=f32(5, 7), scale=0.3, id="bias, scale"),
    case(FLASH, Q, K, K, attn_mask=NEVER, id="a row with nothing to attend to"),
    case(FLASH, f64(2, 4, 5, 8), f64(2, 4, 7, 8), f64(2, 4, 7, 8), id="double"),
    case(flash_gradients, Q, K, K, False, None),
    case(flash_gradients, Q, K, K, True, None, id="causal"),
    case(flash_gradients, Q, K, K, False, f32(2, 1, 5, 7), id="bias"),
    case(flash_gradients, Q, K, K, False, NEVER, id="a row with nothing to attend to"),
    case(
        flash_gradients, f32(2, 5, 4, 8).then(lambda t: t.transpose(1, 2)), K, K, False, None, id="transposed"
    ),
    case(SDPA, Q, K, V),
    case(SDPA, Q, K, V, None, 0.0, True, id="causal"),
    case(SDPA, Q, K, V, HOLES, id="a row with nothing to attend to"),
    case(SDPA, Q, K, V, f32(2, 1, 5, 7), scale=0.3, id="bias, scale"),
    case(SDPA, Q, f32(2, 2, 7, 8), f32(2, 2, 7, 6), enable_gqa=True, id="grouped"),
    case(SDPA, f32(2, 5, 4, 8).then(lambda t: t.transpose(1, 2)), K, V, id="transposed"),
    # Values of one sign: probabilities are rounded to bfloat16, here as on the CPU, and cancelling shows it.
    case(SDPA, bf16(2, 4, 5, 8), bf16(2, 4, 7, 8), bf16(2, 4, 7, 8).between(0.5, 1)),
    case(SDPA, f64(3, 5, 8), f64(3, 7, 8), f64(3, 7, 8), id="no heads"),
    case(SDPA, f32(2, 4, 0, 8), K, V, id="empty"),
    fails(SDPA, Q, f32(2, 4, 7, 6), V, error=RuntimeError, match="Expected size for first two dimensions"),
    fails(SDPA, Q, K, f64(2, 4, 7, 6), error=RuntimeError, match="same dtype"),
    case(aten._native_multi_head_attention.default, *[f64(2, 5, 8)] * 3, 8, 2, *LAYER),
    case(
        aten._native_multi_head_attention.default,
        *[f64(2, 5, 8)] * 3,
        8,
        2,
        *LAYER,
        CAUSAL,
        True,
        False,
        0,
        id="causal",
    ),
    case(
        aten._native_multi_head_attention.default,
        *[f64(2, 5, 8)] * 3,
        8,
        2,
        *LAYER,
        PADDING,
        False,
        True,
        1,
        id="pads",
    ),
    case(
        aten._transformer_encoder_layer_fwd.default,
        f64(2, 5, 8),
        8,
        2,
        *LAYER,
        False,
        False,
        1e-5,
        *NORMS,
        *FEED,
    ),
    case(
        aten._transformer_encoder_layer_fwd.default,
        f64(2, 5, 8),
        8,
        2,
        *LAYER,
        True,
        True,
        1e-5,
        *NORMS,
        *FEED,
        PADDING,
        1,
        id="gelu, norm first, pads",
    ),
    case(aten.lstm_cell.default, f32(2, 3), [f32(2, 4), f32(2, 4)], f32(16, 3), f32(16, 4), f32(16), f32(16)),
    case(aten.lstm_cell.default, f32(2, 3), [f32(2, 4), f32(2, 4)], f32(16, 3), f32(16, 4), id="no bias"),
    case(aten.gru_cell.default, f32(2, 3), f32(2, 4), f32(12, 3), f32(12, 4), f32(12), f32(12)),
    case(aten.gru_cell.default, f32(2, 3), f32(2, 4), f32(12, 3), f32(12, 4), id="no bias"),
]
