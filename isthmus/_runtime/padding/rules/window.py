"""Convolutions and reductions over windows: padding is zero or neutral, as it is past the border of an image.

The exact program pads an image with zeros (a convolution) or with the neutral element (a reduction) where a window
reaches past its border. A padded image has the same values past its true end, put there by ``fill``, so windows over
the true part compute what they should, and windows that begin past it make padding of the result, which is cut or
left::

    convolution, width s padded to 40, windows of 3:    result s - 2 true, 38 computed, resized to the padded s - 2

What can go wrong: zero is only neutral for finite factors, so a *kernel* of padded size is refused (0 * inf is nan);
and a window that chooses a place (``select_and_scatter_add``) may choose one in the padding, so it is refused as well.
"""

from __future__ import annotations

from collections.abc import Sequence

import jax
from jax.extend.core import JaxprEqn

from isthmus._runtime.padding.interpreter import Interpreter, out_shape, rule
from isthmus._runtime.padding.layout import AxisLayout, PaddedArray, has_padding, replaced, resized
from isthmus._runtime.padding.rules.reduce import NEUTRAL
from isthmus._runtime.padding.sizes import Refused, Size, is_symbolic

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
    # Features are summed over, and space is read by windows; padding of the batch is its own affair.
    x = run.fill(x, [x_feature, *x_space], 0)
    kernel = run.fill(kernel, [in_feature], 0)
    array = eqn.primitive.bind(x.array, kernel.array, **params)
    (batch, feature, *space) = numbers.out_spec
    layouts = {batch: x.axes[x_batch], feature: kernel.axes[out_feature]}
    shape = out_shape(eqn)
    # XLA computes a result for every window that fits the padded image, which may be fewer than the padded result has.
    for i in space:
        array, layouts[i] = resized(array, i, run.sizes.padded(shape[i])), run.layout(shape[i])
    return PaddedArray(array, shape, tuple(layouts[i] for i in range(len(shape))))


@rule("reduce_window_sum", "reduce_window_max", "reduce_window_min")
def window_reduction(run: Interpreter, eqn: JaxprEqn, x: PaddedArray) -> PaddedArray:
    """Reduce windows of static size along padded axes: what is past the end is neutral, as JAX's own padding is."""
    shape = out_shape(eqn)
    if is_symbolic_window(eqn):
        raise Refused(eqn.primitive.name, "windows whose size or padding is a size")
    x = run.full(x)
    axes = [i for i in range(len(shape)) if not _is_untouched(eqn, i)]
    x = run.compact(x, *axes)
    x = run.fill(x, axes, NEUTRAL[eqn.primitive.name.rsplit("_", 1)[1]](x.array.dtype))
    return _windowed(run, eqn.primitive.bind(x.array, **eqn.params), x.axes, shape, axes)


def _windowed(
    run: Interpreter,
    array: Array,
    layouts: tuple[AxisLayout, ...],
    shape: tuple[Size, ...],
    axes: Sequence[int],
) -> PaddedArray:
    """Return the results of windows along ``axes`` of padded images, as long as the padded size of the result."""
    for i in axes:
        array = resized(array, i, run.sizes.padded(shape[i]))
        layouts = replaced(layouts, i, run.layout(shape[i]))
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


@rule("reduce_window")
def general_windows(run: Interpreter, eqn: JaxprEqn, *operands: PaddedArray) -> list[PaddedArray]:
    """Reduce windows by a function of the user's: past the end are the initial values, as past an image's border."""
    if is_symbolic_window(eqn):
        raise Refused("reduce_window", "windows whose size or padding is a size")
    # Operands are images, then one initial value for each.
    count = len(operands) // 2
    axes = [i for i in range(len(out_shape(eqn))) if not _is_untouched(eqn, i)]
    images = run.join([run.compact(run.full(x), *axes) for x in operands[:count]])
    images = [run.fill(x, axes, start.array) for x, start in zip(images, operands[count:], strict=True)]
    results = eqn.primitive.bind(*[x.array for x in [*images, *operands[count:]]], **eqn.params)
    return [_windowed(run, y, x.axes, out_shape(eqn), axes) for x, y in zip(images, results, strict=True)]


@rule("select_and_scatter_add", "select_and_gather_add")
def choosing_windows(run: Interpreter, eqn: JaxprEqn, *operands: PaddedArray) -> list[PaddedArray]:
    """Scatter windows along static axes; along padded ones each element is a window of its own."""
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
