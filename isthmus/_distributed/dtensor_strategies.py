"""How DTensor may split ops that only this device runs whole.

torch's autograd asks a device with its own kernel of ``aten.linear`` for ``aten.linear_backward``, and one with its own
attention for ``_scaled_dot_product_fused_attention_overrideable``. CUDA takes other ways, so DTensor has no strategies
for these and raises NotImplementedError for every tensor-parallel model. They are added here, through torch's public
``register_sharding``; the backward formulas of activations that DTensor does not know come with them.

A strategy is a list of (placements of results, placements of arguments), for one dim of a device mesh::

    linear, column parallel:  y = x @ W^T with W split by rows of the output
        ([Shard(last)], [Replicate(), Shard(0), Shard(0)])
"""

from __future__ import annotations

import functools
from typing import Any

import torch

from isthmus._device.torch_glue.private import dtensor_rules

_aten = torch.ops.aten
Strategies = list[tuple[list[Any], list[Any]]]


@functools.cache
def install() -> None:
    """Register the strategies of ops that DTensor has none for."""
    from torch.distributed.tensor.experimental import register_sharding

    tables = dtensor_rules()
    for name, strategy in _STRATEGIES.items():
        packet = getattr(_aten, name, None)
        if packet is not None and not any(packet.default in table for table in tables):
            register_sharding(packet.default)(strategy)


def _linear_backward(x: Any, grad: Any, weight: Any, mask: Any) -> Strategies:
    """Split ``grad @ W``, ``grad^T @ x`` and the sum of ``grad``: by rows of x, by columns or by rows of the weight."""
    from torch.distributed.tensor import Partial, Replicate, Shard

    every, last = Replicate(), x.ndim - 1
    choices: Strategies = [([every, every, every], [every, every, every, None])]
    for dim in range(last):
        choices.append(([Shard(dim), Partial(), Partial()], [Shard(dim), Shard(dim), every, None]))
    choices.append(([Partial(), Shard(0), Shard(0)], [every, Shard(last), Shard(0), None]))
    choices.append(([Shard(last), Shard(1), every], [Shard(last), every, Shard(1), None]))
    return [
        ([out if asked else None for out, asked in zip(outs, mask, strict=True)], ins)
        for outs, ins in choices
    ]


def _attention(
    query: Any,
    key: Any,
    value: Any,
    attn_bias: Any = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    return_debug_mask: bool = False,
    **kwargs: Any,
) -> Strategies:
    """Split attention by batch or by heads; a bias of fewer dims or of size one there is not split."""
    from torch.distributed.tensor import Replicate, Shard

    def placements(split: Any) -> tuple[list[Any], list[Any]]:
        bias = None if attn_bias is None else _bias(attn_bias, split)
        # Results are out, logsumexp, four that are empty or None, two sizes, and the debug mask.
        outs = [split, split, None, None, None, None, Replicate(), Replicate(), None]
        return outs, [split, split, split, bias, None, None, None]

    return [placements(split) for split in (Replicate(), Shard(0), Shard(1))]


def _attention_backward(
    grad_out: Any,
    query: Any,
    key: Any,
    value: Any,
    attn_bias: Any,
    grad_input_mask: Any,
    *rest: Any,
    **kwargs: Any,
) -> Strategies:
    from torch.distributed.tensor import Replicate, Shard

    def placements(split: Any) -> tuple[list[Any], list[Any]]:
        bias = None if attn_bias is None else _bias(attn_bias, split)
        outs = [split if asked else None for asked in grad_input_mask[:3]]
        outs.append(bias if grad_input_mask[3] else None)
        ins = [split, split, split, split, bias, None, split, split]
        ins += [Replicate() if hasattr(each, "placements") else None for each in rest[2:]]
        return outs, ins

    return [placements(split) for split in (Replicate(), Shard(0), Shard(1))]


def _bias(bias: Any, split: Any) -> Any:
    from torch.distributed.tensor import Replicate

    if split == Replicate() or bias.ndim < 4 or bias.shape[split.dim] == 1:
        return Replicate()
    return split


def _pointwise(*args: Any, **kwargs: Any) -> Strategies:
    """Split every tensor alike, along any dim."""
    from torch.distributed.tensor import Replicate, Shard

    tensors = [arg for arg in args if hasattr(arg, "placements")]
    choices = [Replicate(), *[Shard(dim) for dim in range(tensors[0].ndim)]]
    return [
        ([choice], [choice if hasattr(arg, "placements") else None for arg in args]) for choice in choices
    ]


def _glu_backward(grad: Any, x: Any, dim: int) -> Strategies:
    """Split along any dim but the one that is halved."""
    from torch.distributed.tensor import Replicate, Shard

    halved = dim % x.ndim
    choices = [Replicate(), *[Shard(n) for n in range(x.ndim) if n != halved]]
    return [([choice], [choice, choice, None]) for choice in choices]


_POINTWISE = (
    "mish_backward", "silu_backward", "hardswish_backward", "hardsigmoid_backward", "hardtanh_backward",
    "leaky_relu_backward", "elu_backward", "softplus_backward", "hardshrink_backward", "softshrink_backward",
)  # fmt: skip
_STRATEGIES = {
    "linear_backward": _linear_backward,
    "_scaled_dot_product_fused_attention_overrideable": _attention,
    "_scaled_dot_product_fused_attention_overrideable_backward": _attention_backward,
    "glu_backward": _glu_backward,
    **dict.fromkeys(_POINTWISE, _pointwise),
}
