"""Convolutions and reductions over windows: padding is zero or neutral, as it is past the border of an image."""

from __future__ import annotations

import jax
from jax.extend.core import JaxprEqn

from isthmus._runtime.padding.interpreter import Interpreter, out_shape, rule
from isthmus._runtime.padding.layout import PaddedArray, has_padding, replaced, resized
from isthmus._runtime.padding.rules.reduce import NEUTRAL
from isthmus._runtime.padding.sizes import Refused, is_symbolic

Array = jax.Array


@rule("conv_general_dilated")
def convolution(run: Interpreter, eqn: JaxprEqn, x: PaddedArray, kernel: PaddedArray) -> PaddedArray:
    """Convolve images of padded size and batch.

    A window of the true result reaches past the true end of an image only where the exact program pads with zeros.
    """
    numbers, params = eqn.params["dimension_numbers"], eqn.params
    (x_batch, x_feature, *x_space) = numbers.lhs_spec
    (out_feature, in_feature, *kernel_space) = numbers.rhs_spec
    x, kernel = run.canonical(x), run.canonical(kernel)
    if any(has_padding(kernel.axes[i]) for i in kernel_space):
        raise Refused(
            "conv_general_dilated", "a kernel of padded size: zeros times an infinite pixel are NaN"
        )
    if any(is_symbolic(n) for pair in params["padding"] for n in pair):
        raise Refused("conv_general_dilated", "whose padding is a size")
    grouped = params["feature_group_count"] != 1 or params["batch_group_count"] != 1
    features = [x.axes[x_feature], kernel.axes[in_feature], kernel.axes[out_feature]]
    if grouped and any(map(has_padding, features)):
        raise Refused("conv_general_dilated", "groups of a padded number of features")
    if params["batch_group_count"] != 1 and has_padding(x.axes[x_batch]):
        raise Refused("conv_general_dilated", "groups of a padded batch")
    x = run.fill(x, [x_feature, *x_space], 0)
    kernel = run.fill(kernel, [in_feature], 0)
    array = eqn.primitive.bind(x.array, kernel.array, **params)
    (batch, feature, *space) = numbers.out_spec
    layouts = {batch: x.axes[x_batch], feature: kernel.axes[out_feature]}
    shape = out_shape(eqn)
    for i in space:
        array, layouts[i] = resized(array, i, run.sizes.padded(shape[i])), run.layout(shape[i])
    return PaddedArray(array, shape, tuple(layouts[i] for i in range(len(shape))))


@rule("reduce_window_sum", "reduce_window_max", "reduce_window_min")
def window_reduction(run: Interpreter, eqn: JaxprEqn, x: PaddedArray) -> PaddedArray:
    """Reduce windows of static size along padded axes: what is past the end is neutral, as JAX's own padding is."""
    params, shape = eqn.params, out_shape(eqn)
    if is_symbolic_window(eqn):
        raise Refused(eqn.primitive.name, "windows whose size or padding is a size")
    x = run.full(x)
    axes = [i for i in range(len(shape)) if not _is_untouched(eqn, i)]
    x = run.compact(x, *axes)
    x = run.fill(x, axes, NEUTRAL[eqn.primitive.name.rsplit("_", 1)[1]](x.array.dtype))
    array, layouts = eqn.primitive.bind(x.array, **params), x.axes
    for i in axes:
        array, layouts = (
            resized(array, i, run.sizes.padded(shape[i])),
            replaced(layouts, i, run.layout(shape[i])),
        )
    return PaddedArray(array, shape, layouts)


def is_symbolic_window(eqn: JaxprEqn) -> bool:
    """Return whether the windows themselves depend on a size."""
    numbers = [*eqn.params["window_dimensions"], *[n for pair in eqn.params["padding"] for n in pair]]
    return any(map(is_symbolic, numbers))


def _is_untouched(eqn: JaxprEqn, i: int) -> bool:
    """Return whether windows are single elements along an axis."""
    params = eqn.params
    ones = [
        params[key][i] for key in ("window_dimensions", "window_strides", "base_dilation") if key in params
    ]
    return all(n == 1 for n in ones) and tuple(params["padding"][i]) == (0, 0)


@rule("reduce_window", "select_and_scatter_add", "select_and_gather_add")
def general_windows(run: Interpreter, eqn: JaxprEqn, *operands: PaddedArray) -> list[PaddedArray]:
    """Reduce or scatter windows along static axes; along padded ones each element is a window of its own."""
    name = eqn.primitive.name
    if is_symbolic_window(eqn):
        raise Refused(name, "windows whose size or padding is a size")
    rank = len(out_shape(eqn))
    padded = [
        i for i in range(rank) if any(is_symbolic(x.shape[i]) for x in operands if len(x.shape) == rank)
    ]
    if not all(_is_untouched(eqn, i) for i in padded):
        raise Refused(name, "windows over a padded axis")
    operands = tuple(run.canonical(x) for x in operands)
    results = eqn.primitive.bind(*[x.array for x in operands], **eqn.params)
    results = results if eqn.primitive.multiple_results else [results]
    shapes = [out_shape(eqn, n) for n in range(len(results))]
    return [
        PaddedArray(y, shape, tuple(run.layout(n) for n in shape))
        for y, shape in zip(results, shapes, strict=True)
    ]
