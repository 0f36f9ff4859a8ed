"""Attention in graphs of CUDA tensors: torch picks one of CUDA's kernels, which become the one op that is lowered.

With dropout they are left to CUDA, whose backward draws the same numbers again from a seed only CUDA understands.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from isthmus._graph.schema import schema_of

_aten = torch.ops.aten
_FORWARD = _aten._scaled_dot_product_fused_attention_overrideable.default
_BACKWARD = _aten._scaled_dot_product_fused_attention_overrideable_backward.default
# The memory-efficient kernel keeps the sums of whole groups of so many rows.
_ROWS = 32
Arguments = dict[str, Any]


def _seed(named: Arguments) -> Tensor:
    return named["query"].new_zeros((), dtype=torch.int64)


def _lengths(named: Arguments) -> tuple[Any, ...]:
    return None, None, named["query"].size(2), named["key"].size(2)


def _forward(
    kernel: Any, finish: Callable[[Arguments, Tensor, Tensor], Any], *args: Any, **kwargs: Any
) -> Any:
    """Return the results of a kernel; ``finish`` makes them of the attention and the logarithms of the sums."""
    named = schema_of(kernel).bind(args, kwargs)
    # A debug mask is the matrix of probabilities, which a fused kernel never has as a whole.
    if named["dropout_p"] or named.get("return_debug_mask"):
        return NotImplemented
    qkv, bias = [named[name] for name in ("query", "key", "value")], named.get("attn_bias")
    return finish(named, *_FORWARD(*qkv, bias, 0.0, named["is_causal"], False, scale=named["scale"])[:2])


def _backward(kernel: Any, sums_of: Callable[[Arguments], Tensor], *args: Any, **kwargs: Any) -> Any:
    """Return a kernel's gradients: for query, key, value, and where it has one for the bias."""
    named = schema_of(kernel).bind(args, kwargs)
    if named["dropout_p"]:
        return NotImplemented
    grad, *qkv = [*named.values()][:4]
    bias, seed = named.get("attn_bias"), _seed(named)
    # A mask arrives as a bias that needs no gradient, and the fastest kernel has none for one of a whole batch.
    with_bias = bias is not None and named.get("grad_input_mask", [False] * 4)[3]
    saved = (bias, [True, True, True, with_bias], named["out"], sums_of(named), *_lengths(named))
    grads = _BACKWARD(grad, *qkv, *saved, 0.0, named["is_causal"], seed, seed, scale=named["scale"])
    return grads[:3] if "grad_input_mask" not in named else (*grads[:3], grads[3] if with_bias else None)


def _flash(named: Arguments, out: Tensor, sums: Tensor) -> Any:
    # Kernels of CUDA leave the state of their dropout: zeros here, since there is none.
    state = out.new_zeros((2,), dtype=torch.uint64)
    return out, sums, *_lengths(named), state, state.new_zeros(()), out.new_zeros((0,))


def _efficient(named: Arguments, out: Tensor, sums: Tensor) -> Any:
    rows = sums.size(2)
    # Rounded up to whole groups, which backward expects; without the sums the result is empty.
    padded_sums = F.pad(sums, (0, -rows % _ROWS if named["compute_log_sumexp"] else -rows))
    # Its heads lie beside each other.
    return out.transpose(1, 2).contiguous().transpose(1, 2), padded_sums, _seed(named), _seed(named)


def _cudnn(named: Arguments, out: Tensor, sums: Tensor) -> Any:
    return out, sums.unsqueeze(-1), *_lengths(named), _seed(named), _seed(named), None


_KINDS: dict[str, tuple[Callable[..., Any], Callable[[Arguments], Tensor]]] = {
    "flash": (_flash, lambda named: named["logsumexp"]),
    # Back from whole groups to the rows that there are.
    "efficient": (_efficient, lambda named: named["logsumexp"][:, :, : named["query"].size(2)]),
    "cudnn": (_cudnn, lambda named: named["logsumexp"].squeeze(-1)),
}


def _kernels() -> Iterator[tuple[Any, Callable[..., Any]]]:
    for kind, (finish, sums_of) in _KINDS.items():
        forward = getattr(_aten, f"_scaled_dot_product_{kind}_attention").default
        backward = getattr(_aten, f"_scaled_dot_product_{kind}_attention_backward").default
        yield forward, functools.partial(_forward, forward, finish)
        yield backward, functools.partial(_backward, backward, sums_of)


# One table of decompositions: AOTAutograd then never sees CUDA's kernels.
KERNELS = dict(_kernels())
