"""Convolution, transposed convolution and their gradients, in torch's ``set_float32_matmul_precision``."""

from __future__ import annotations

from collections.abc import Sequence

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import DTypeLike

from isthmus._graph.names import aten
from isthmus._ops.common import (
    Array,
    Ints,
    accumulation_dtype,
    cast,
    each_dim,
    is_dimension,
    product_dtype,
    transpose_of,
)
from isthmus._ops.nn import convolution_apart
from isthmus._ops.nn.convolution_apart import Convolution, whole
from isthmus._ops.registry import lowering
from isthmus._runtime import compiler
from isthmus.errors import Unsupported

Options = tuple[Ints, Ints, Ints, bool, Ints, int]
"""Stride, padding, dilation, whether it is transposed, output padding, groups."""


def _transposed_weight(weight: Array, groups: int) -> Array:
    """Return the weight of the plain convolution that a transposed one is: flipped, in and out swapped."""
    into, per_group, *window = weight.shape
    split = weight.reshape(groups, into // groups, per_group, *window)
    swapped = split.swapaxes(1, 2).reshape(groups * per_group, into // groups, *window)
    # XLA correlates: the window of the transpose is the mirrored one.
    return jnp.flip(swapped, range(2, swapped.ndim))


def plan(
    input: Array,
    weight: Array,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    transposed: bool,
    output_padding: Sequence[int],
    groups: int,
    *,
    dtype: DTypeLike,
) -> Convolution:
    """Return a convolution with results in ``dtype``; a transposed one is a plain one of an input spread out."""
    # XLA would crop the input, where torch refuses.
    if any(p < 0 for p in padding):
        raise Unsupported("negative padding")
    n = input.ndim - 2
    strides, pads, dilations = each_dim(stride, n), each_dim(padding, n), each_dim(dilation, n)
    around = [(p, p) for p in pads]
    spread = [1] * n
    if transposed:
        # The padding that lets every tap of the window meet every element of the spread input.
        reach = [d * (k - 1) - p for d, k, p in zip(dilations, weight.shape[2:], pads, strict=True)]
        around = [(r, r + extra) for r, extra in zip(reach, each_dim(output_padding, n), strict=True)]
        weight, strides, spread = _transposed_weight(weight, groups), [1] * n, strides
    return Convolution(input, weight, strides, around, spread, dilations, groups, dtype)


def convolve(convolution: Convolution) -> Array:
    """Return a convolution in the way that is fastest on this device, or on each that an exported program runs on."""
    if compiler.is_portable() and convolution_apart.is_slow(convolution):
        out: Array = lax.platform_dependent(
            convolution.input,
            convolution.weight,
            cpu=lambda x, w: convolution_apart.apart(convolution._replace(input=x, weight=w)),
            default=lambda x, w: whole(convolution._replace(input=x, weight=w)),
        )
        return out
    return (
        convolution_apart.apart(convolution) if convolution_apart.takes(convolution) else whole(convolution)
    )


def _check(input: Array, weight: Array) -> None:
    if input.dtype != weight.dtype:
        raise Unsupported(f"a convolution of {input.dtype} with {weight.dtype}")


@lowering(aten.convolution.default, matmul=True)
def convolution(
    input: Array,
    weight: Array,
    bias: Array | None,
    stride: list[int],
    padding: list[int],
    dilation: list[int],
    transposed: bool,
    output_padding: list[int],
    groups: int,
) -> Array:
    """Convolve over one to three spatial dims; half types accumulate in float32."""
    _check(input, weight)
    out_dtype = product_dtype(input.dtype)
    plain = plan(
        input, weight, stride, padding, dilation, transposed, output_padding, groups, dtype=out_dtype
    )
    return finished(convolve(plain), bias, input.dtype)


def finished(out: Array, bias: Array | None, dtype: DTypeLike) -> Array:
    """Return a convolution with its bias, in the dtype of its input."""
    if bias is not None:
        out = out + cast(bias, out.dtype).reshape((-1,) + (1,) * (out.ndim - 2))
    return cast(out, dtype)


def _input_gradient(grad: Array, input: Array, weight: Array, options: Options) -> Array:
    """Return the gradient for the input: of a convolution a transposed one, and of that a convolution."""
    stride, padding, dilation, transposed, _, groups = options
    n = input.ndim - 2
    extra = [0] * n
    if any(map(is_dimension, input.shape[2:])):
        # What windows left over at the end depends on the size: there is room for the most, and the rest is cut off.
        room = [0] * n if transposed else [s - 1 for s in each_dim(stride, n)]
        turned = plan(grad, weight, stride, padding, dilation, not transposed, room, groups, dtype=grad.dtype)
        return whole(turned)[(..., *[slice(size) for size in input.shape[2:]])]
    if not transposed:
        known = [input.shape[2:], grad.shape[2:], weight.shape[2:], *[each_dim(o, n) for o in options[:3]]]
        rows = zip(*known, strict=True)
        extra = [size - ((g - 1) * s - 2 * p + d * (k - 1) + 1) for size, g, k, s, p, d in rows]
    turned = plan(grad, weight, stride, padding, dilation, not transposed, extra, groups, dtype=grad.dtype)
    if convolution_apart.takes(turned):
        # What a transposed convolution added at the end has no gradient.
        return convolution_apart.apart(turned)[tuple(slice(size) for size in input.shape)]

    def forward(x: Array) -> Array:
        return convolve(plan(x, weight, *options, dtype=grad.dtype))

    return transpose_of(forward, input.shape, input.dtype, grad)


def _weight_gradient(grad: Array, input: Array, weight: Array, options: Options) -> Array:
    """Return the gradient for the weight."""

    def forward(weight: Array) -> Array:
        convolution = plan(input, weight, *options, dtype=grad.dtype)
        if any(map(is_dimension, input.shape[2:])):
            # As one convolution it has a window as large as the gradient: its padding would meet pixels of the image.
            return convolution_apart.by_places(convolution)
        takes = convolution_apart.takes_for_weight(convolution)
        return convolution_apart.apart(convolution) if takes else whole(convolution)

    return transpose_of(forward, weight.shape, weight.dtype, grad)


@lowering(aten.convolution_backward.default, matmul=True)
def convolution_backward(
    grad_output: Array,
    input: Array,
    weight: Array,
    bias_sizes: list[int] | None,
    stride: list[int],
    padding: list[int],
    dilation: list[int],
    transposed: bool,
    output_padding: list[int],
    groups: int,
    output_mask: list[bool],
) -> tuple[Array | None, ...]:
    """The gradients of ``convolution`` for input, weight and bias: it is linear in each."""
    _check(input, weight)
    options = (stride, padding, dilation, transposed, output_padding, groups)
    dtype, acc_dtype = input.dtype, accumulation_dtype(input.dtype)
    grad = cast(grad_output, dtype)
    if np.dtype(dtype) == np.dtype(np.float16):
        # XLA's CPU convolutions of float16 accumulate in float16.
        input, weight, grad = (cast(a, acc_dtype) for a in (input, weight, grad))
    grads: list[Array | None] = [None, None, None]
    if output_mask[0]:
        grads[0] = cast(_input_gradient(grad, input, weight, options), dtype)
    if output_mask[1]:
        grads[1] = cast(_weight_gradient(grad, input, weight, options), dtype)
    if output_mask[2]:
        grads[2] = cast(cast(grad_output, acc_dtype).sum((0, *range(2, grad_output.ndim))), dtype)
    return tuple(grads)
