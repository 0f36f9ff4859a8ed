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
Given = dict[str, Any]


def _seed(given: Given) -> Tensor:
    return given["query"].new_zeros((), dtype=torch.int64)


def _lengths(given: Given) -> tuple[Any, ...]:
    return None, None, given["query"].size(2), given["key"].size(2)


def _forward(kernel: Any, finish: Callable[[Given, Tensor, Tensor], Any], *args: Any, **kwargs: Any) -> Any:
    """Return what a kernel does; ``finish`` makes its results of what comes out and the logarithms of the sums."""
    given = schema_of(kernel).bind(args, kwargs)
    if given["dropout_p"] or given.get("return_debug_mask"):
        return NotImplemented
    qkv, bias = [given[name] for name in ("query", "key", "value")], given.get("attn_bias")
    return finish(given, *_FORWARD(*qkv, bias, 0.0, given["is_causal"], False, scale=given["scale"])[:2])


def _backward(kernel: Any, sums_of: Callable[[Given], Tensor], *args: Any, **kwargs: Any) -> Any:
    """Return a kernel's gradients: for query, key, value, and where it has one for the bias."""
    given = schema_of(kernel).bind(args, kwargs)
    if given["dropout_p"]:
        return NotImplemented
    grad, *qkv = [*given.values()][:4]
    bias, seed = given.get("attn_bias"), _seed(given)
    saved = (bias, [True, True, True, bias is not None], given["out"], sums_of(given), *_lengths(given))
    found = _BACKWARD(grad, *qkv, *saved, 0.0, given["is_causal"], seed, seed, scale=given["scale"])
    if "grad_input_mask" not in given:
        return found[:3]
    return *found[:3], found[3] if given["grad_input_mask"][3] else None


def _flash(given: Given, out: Tensor, sums: Tensor) -> Any:
    state = out.new_zeros((2,), dtype=torch.uint64)
    return out, sums, *_lengths(given), state, state.new_zeros(()), out.new_zeros((0,))


def _efficient(given: Given, out: Tensor, sums: Tensor) -> Any:
    rows = sums.size(2)
    kept = F.pad(sums, (0, -rows % _ROWS if given["compute_log_sumexp"] else -rows))
    # Its heads lie beside each other.
    return out.transpose(1, 2).contiguous().transpose(1, 2), kept, _seed(given), _seed(given)


def _cudnn(given: Given, out: Tensor, sums: Tensor) -> Any:
    return out, sums.unsqueeze(-1), *_lengths(given), _seed(given), _seed(given), None


_KINDS: dict[str, tuple[Callable[..., Any], Callable[[Given], Tensor]]] = {
    "flash": (_flash, lambda given: given["logsumexp"]),
    "efficient": (_efficient, lambda given: given["logsumexp"][:, :, : given["query"].size(2)]),
    "cudnn": (_cudnn, lambda given: given["logsumexp"].squeeze(-1)),
}


def _kernels() -> Iterator[tuple[Any, Callable[..., Any]]]:
    for kind, (finish, sums_of) in _KINDS.items():
        forward = getattr(_aten, f"_scaled_dot_product_{kind}_attention").default
        backward = getattr(_aten, f"_scaled_dot_product_{kind}_attention_backward").default
        yield forward, functools.partial(_forward, forward, finish)
        yield backward, functools.partial(_backward, backward, sums_of)


KERNELS = dict(_kernels())
