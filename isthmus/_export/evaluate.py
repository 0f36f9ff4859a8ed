"""A graph run on tracers to be exported: sizes may be dimensions, and nothing depends on the machine it runs on."""

from __future__ import annotations

import functools
import operator
import sys
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import torch
from jax import lax
from torch._ops import OpOverload
from torch.fx import Node

from isthmus._dynamo.evaluate import OWN, Evaluation, lower
from isthmus._dynamo.layout import root_of
from isthmus._export.dims import is_dimension
from isthmus._graph.schema import schema_of
from isthmus._ops.common import Number, cast, product_dtype, wrap_dim
from isthmus._ops.nn import cpu_convolution
from isthmus._ops.nn.attention import attention
from isthmus._ops.nn.convolution import finished, plan
from isthmus._ops.registry import lowering_of
from isthmus._ops.tensors.creation import count
from isthmus._ops.tensors.views import VIEWS
from isthmus._runtime.dtypes import to_jax_dtype
from isthmus.errors import Unsupported

Array = Any
_aten = torch.ops.aten


class Exporting(Evaluation):
    """One run of a graph, of which a program for other machines is made."""

    def _apply(self, node: Node) -> Any:
        target: Any = node.target
        if target is _aten.as_strided.default and _is_reshape(node):
            return self.values[root_of(node)].reshape(tuple(self.look_up(node.args[1])))
        if target in _OTHERWISE:
            found = _OTHERWISE[target](*self.look_up(node.args), **self.look_up(node.kwargs))
            if found is not NotImplemented:
                return found
        lowering = lowering_of(target) if isinstance(target, OpOverload) and target not in VIEWS else None
        if lowering is None or target in OWN:
            return super()._apply(node)
        given = schema_of(target).bind(self.look_up(node.args), self.look_up(node.kwargs))
        return lower(target, [], {name: _number(given[name], name in lowering.dynamic) for name in given})


def _is_reshape(node: Node) -> bool:
    """Return whether strides find all elements of a new storage in their order."""
    root, mine = root_of(node).meta.get("val"), node.meta["val"]
    if not isinstance(root, torch.Tensor) or not (root.is_contiguous() and mine.is_contiguous()):
        return False
    return bool(mine.storage_offset() == root.storage_offset() and mine.numel() == root.numel())


def _number(value: Any, dynamic: bool) -> Any:
    """Return an argument of a lowering; a dimension in the place of a number is one known only at run time."""
    return Number(_value(value), int) if dynamic and is_dimension(value) else value


def _value(size: Any) -> Array:
    return jnp.asarray(size, jnp.int64)


def _slice(x: Array, dim: int = 0, start: Any = None, end: Any = None, step: int = 1) -> Array:
    """Return a range of a dim, cut to what there is as torch does; sizes may be dimensions."""
    dim = wrap_dim(dim, x.ndim)
    length = x.shape[dim]
    begin = _place(0 if start is None else start, length)
    stop = jax.core.max_dim(begin, _place(length if end is None else end, length))
    return lax.slice_in_dim(x, begin, stop, step, dim)


def _place(index: Any, length: Any) -> Any:
    """Return an index counted from the front, within a length."""
    if not isinstance(index, int):
        return jax.core.min_dim(index, length)
    if index < 0:
        return jax.core.max_dim(length + index, 0)
    if index >= sys.maxsize:
        return length
    return jax.core.min_dim(index, length)


def _arange(start: Any, end: Any, step: Any = 1, *, dtype: torch.dtype | None = None, **others: Any) -> Array:
    """Return the numbers from ``start`` to ``end``, each of which may be a dimension."""
    if not (is_dimension(start) or is_dimension(end)):
        return lower(_aten.arange.start_step, [start, end, step], {"dtype": dtype})
    if not isinstance(step, int) or isinstance(start, float) or isinstance(end, float):
        raise Unsupported(f"the numbers from {start} to {end} by {step}")
    length = jax.core.max_dim((end - start + step - (1 if step > 0 else -1)) // step, 0)
    return count(length, _value(start), step, to_jax_dtype(dtype or torch.int64))


def _select(x: Array, dim: int, index: Any) -> Array:
    """Return one position of a dim, counted from the end if it is negative."""
    dim = wrap_dim(dim, x.ndim)
    at = index + x.shape[dim] if isinstance(index, int) and index < 0 else index
    return lax.squeeze(lax.slice_in_dim(x, at, at + 1, 1, dim), [dim])


def _fused_attention(
    query: Array,
    key: Array,
    value: Array,
    attn_bias: Array | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    return_debug_mask: bool = False,
    *,
    scale: float | None = None,
) -> tuple[Any, ...]:
    """Return attention by ops every platform has, where the lowering would take a kernel of this machine's."""
    if dropout_p:
        raise Unsupported("dropout inside attention")
    missing = 0 if attn_bias is None else 4 - attn_bias.ndim
    bias = attn_bias if attn_bias is None else attn_bias.reshape((1,) * missing + attn_bias.shape)
    out, sums = attention(query, key, value, bias, is_causal, scale)
    nothing = jnp.zeros((), jnp.int64)
    lengths = query.shape[-2], key.shape[-2]
    return cast(out, query.dtype), cast(sums, jnp.float32), None, None, *lengths, nothing, nothing, None


def _attention_for_cpu(
    query: Array,
    key: Array,
    value: Array,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    attn_mask: Array | None = None,
    scale: float | None = None,
) -> tuple[Array, Array]:
    """Return the same for graphs of CPU tensors."""
    found = _fused_attention(query, key, value, attn_mask, dropout_p, is_causal, scale=scale)
    return found[0], cast(found[1], jnp.promote_types(query.dtype, jnp.float32))


def _attention(
    query: Array,
    key: Array,
    value: Array,
    attn_mask: Array | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Array:
    """Return the same for graphs of "jax" tensors, which name it whole; the device itself knows the rarer forms."""
    if not query.ndim == key.ndim == value.ndim or query.ndim not in (3, 4) or dropout_p:
        return NotImplemented
    if query.shape[0] != key.shape[0]:
        return NotImplemented
    if query.ndim == 4:
        if query.shape[1] != key.shape[1] and not enable_gqa:
            return NotImplemented
        return _fused_attention(query, key, value, attn_mask, dropout_p, is_causal, scale=scale)[0]
    mask = attn_mask[:, None] if attn_mask is not None and attn_mask.ndim == 3 else attn_mask
    q, k, v = (x[:, None] for x in (query, key, value))
    return _fused_attention(q, k, v, mask, dropout_p, is_causal, scale=scale)[0][:, 0]


def _convolution(input: Array, weight: Array, bias: Array | None, *options: Any) -> Array:
    """Return a convolution that is taken apart on the CPU alone, where that pays."""
    given = plan(input, weight, *options, dtype=product_dtype(input.dtype))
    if input.dtype != weight.dtype or not cpu_convolution.is_slow(given):
        return NotImplemented
    out = lax.platform_dependent(
        given.input,
        given.weight,
        cpu=lambda x, w: cpu_convolution.apart(given._replace(input=x, weight=w)),
        default=lambda x, w: cpu_convolution.whole(given._replace(input=x, weight=w)),
    )
    return finished(out, bias, input.dtype)


_OTHERWISE: dict[Any, Callable[..., Any]] = {
    _aten.slice.Tensor: _slice,
    _aten.select.int: _select,
    _aten.arange.start_step: _arange,
    _aten.convolution.default: _convolution,
    _aten.scaled_dot_product_attention.default: _attention,
    _aten._scaled_dot_product_flash_attention_for_cpu.default: _attention_for_cpu,
    _aten._scaled_dot_product_fused_attention_overrideable.default: _fused_attention,
    torch.sym_max: jax.core.max_dim,
    torch.sym_min: jax.core.min_dim,
    torch.sym_sum: lambda sizes: functools.reduce(operator.add, sizes),
}
"""Rules that hold for sizes that are dimensions too, and for every platform, in the place of the usual ones."""
