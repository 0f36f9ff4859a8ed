"""Lazy conjugation and negation: ``conj()``, and the ``imag`` of it, only set a bit on a view.

torch resolves the bit (conjugates for real) before most kernels. The few ops that it hands such tensors to have a
Conjugate or Negative kernel of torch's; ``resolving`` wraps ours for those.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from isthmus._device.core.dispatch import kernel_for
from isthmus._device.torch_glue.private import has_kernel
from isthmus._graph.names import Missing
from isthmus._graph.names import aten as _aten
from isthmus._graph.private import OpOverload
from isthmus._graph.schema import schema_of

_conjugate = kernel_for(_aten.conj_physical.default)
_negate = kernel_for(_aten.neg.default)


def is_lazy(value: Any) -> bool:
    """Return whether ``value`` is a tensor whose elements are not those of its storage."""
    return isinstance(value, Tensor) and (value.is_conj() or value.is_neg())


def bare(tensor: Tensor) -> Tensor:
    """Return a view of what the storage holds, the bits left out."""
    tensor = torch.ops.aten._conj(tensor) if tensor.is_conj() else tensor
    return torch.ops.aten._neg_view(tensor) if tensor.is_neg() else tensor


def apply_bits(value: Tensor, like: Tensor) -> Tensor:
    """Return ``value`` conjugated and negated as the bits of ``like`` say; the same again undoes it."""
    value = _conjugate(value) if like.is_conj() and value.is_complex() else value
    return _negate(value) if like.is_neg() else value


def resolve(value: Any) -> Any:
    """Return a tensor that holds the elements ``value`` shows."""
    return apply_bits(bare(value), value) if is_lazy(value) else value


def resolving(op: OpOverload | Missing, kernel: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``kernel`` with lazy arguments resolved, for the ops torch hands them to."""
    if isinstance(op, Missing) or not (has_kernel(op, "Conjugate") or has_kernel(op, "Negative")):
        return kernel
    schema = schema_of(op)

    def resolved(*args: Any, **kwargs: Any) -> Any:
        __tracebackhide__ = True  # for IPython and pytest: most errors pass here
        for value in (*args, *kwargs.values()) if kwargs else args:
            if is_lazy(value):
                # Nearly no call has such a tensor: the loop ends without a break, and the kernel runs as it is.
                break
        else:
            return kernel(*args, **kwargs)
        arguments = schema.bind(args, kwargs)
        plain_args, plain_kwargs = tuple(resolve(a) for a in args), {k: resolve(v) for k, v in kwargs.items()}
        result = kernel(*plain_args, **plain_kwargs)
        after = schema.bind(plain_args, plain_kwargs)
        for name in schema.mutated:
            # A target with a bit was resolved into a copy: what was written there goes back.
            if after[name] is not arguments[name]:
                arguments[name].copy_(after[name])
            result = arguments[name]
        return result

    return resolved
