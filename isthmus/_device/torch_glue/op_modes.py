"""What torch's op-watching modes see: FLOP counts and selective checkpointing find the ops they look for.

``linear`` and its gradients are one program each on this device, where the CPU and CUDA have ``addmm`` or ``mm`` and
views: eagerly, one launch instead of up to four. A FLOP counter has formulas for products, and the policies of
``create_selective_checkpoint_contexts`` name ``aten.mm`` and ``aten.addmm``. So these two modes of torch's, and no
others, are shown the products: they take ``linear`` apart as other devices do, and see its parts::

    FlopCounterMode              aten.linear           -> aten.addmm, or views and aten.mm
                                 aten.linear_backward  -> aten.mm for the input, aten.mm for the weight, a sum
    selective checkpointing      aten.linear           -> aten.addmm, or views and aten.mm

In between, ops run one by one; without such a mode nothing changes. Attention is
``aten._scaled_dot_product_fused_attention_overrideable``, torch's name for it on devices from outside, which has CUDA's
formulas. ``torch.compile`` traces with the same modes, and its graphs have products for ``linear`` anyway.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from isthmus._device.torch_glue import patches
from isthmus._graph.cpu_equivalents import linear_backward

_aten = torch.ops.aten
_CHECKPOINT = ("_CachingTorchDispatchMode", "_CachedTorchDispatchMode")
_ATTENTION = _aten._scaled_dot_product_fused_attention_overrideable
_ATTENTION_BACKWARD = _aten._scaled_dot_product_fused_attention_overrideable_backward
Dispatch = Callable[..., Any]


def _linear(input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """Return ``linear`` by the ops that other devices run where its weight is trained.

    torch's composite asks whether the weight requires grad before it makes one matrix of a batch; here, below autograd,
    none does.
    """
    if input.dim() < 3 or weight.dim() != 2 or (bias is not None and input.is_contiguous()):
        return _aten.linear.default.decompose(input, weight, bias)  # type: ignore[no-any-return]
    # Composite ops would reach the mode whole, as ``aten.matmul`` and ``aten.reshape``.
    rows = _aten.reshape.default.decompose(input, [-1, input.size(-1)])
    product = torch.mm(rows, weight.t()).view(*input.shape[:-1], weight.size(0))
    return product if bias is None else product.add_(bias)


_LINEAR: dict[Any, Callable[..., Any]] = {_aten.linear.default: _linear}


def install() -> None:
    """Show products to FLOP counters and to selective checkpointing; called with the first tensor."""
    for name in _CHECKPOINT:
        patches.replace(f"torch.utils.checkpoint.{name}", "__torch_dispatch__", _taking_apart(_LINEAR))
    both = _LINEAR | {_aten.linear_backward.default: linear_backward}
    patches.replace("torch.utils.flop_counter._FlopCounterMode", "__torch_dispatch__", _taking_apart(both))
    from torch.utils.flop_counter import flop_registry

    for op, formula in ((_ATTENTION, _attention), (_ATTENTION_BACKWARD, _attention_backward)):
        if op in flop_registry:
            continue  # torch has a formula, or this is a second try after a load that failed
        register = patches.register("torch.utils.flop_counter", "register_flop_formula", [op])
        if register is not None:
            register(formula)


def _taking_apart(parts: Mapping[Any, Callable[..., Any]]) -> Callable[[Dispatch], Dispatch]:
    def make(theirs: Dispatch) -> Dispatch:
        def dispatch(
            self: Any,
            func: Any,
            types: Any,
            args: Sequence[Any] = (),
            kwargs: Mapping[str, Any] | None = None,
        ) -> Any:
            if func not in parts:
                return theirs(self, func, types, args, kwargs)
            # Not ``with self``: selective checkpointing begins to count anew when its mode is entered.
            # What the parts call is seen by the mode, as it is on other devices.
            TorchDispatchMode.__enter__(self)
            try:
                return parts[func](*args, **(kwargs or {}))
            finally:
                TorchDispatchMode.__exit__(self, None, None, None)

        return dispatch

    return make


def _attention(query: Any, key: Any, value: Any, *args: Any, out_shape: Any = None, **kwargs: Any) -> int:
    """Return the operations of attention: those of its two products."""
    from torch.utils.flop_counter import sdpa_flop_count

    return int(sdpa_flop_count(query, _all_heads(key, query), _all_heads(value, query)))


def _attention_backward(
    grad: Any, query: Any, key: Any, value: Any, *args: Any, out_shape: Any = None, **kwargs: Any
) -> int:
    """Return the operations of its gradients, which compute the weights again."""
    from torch.utils.flop_counter import sdpa_backward_flop_count

    heads = _all_heads(key, query), _all_heads(value, query)
    return int(sdpa_backward_flop_count(grad, query, *heads))


def _all_heads(shape: Any, query: Any) -> Any:
    """Return the shape of keys or values that groups of heads share, as if each had its own."""
    return (shape[0], query[1], *shape[2:])
