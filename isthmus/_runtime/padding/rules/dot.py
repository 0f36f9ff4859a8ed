"""Products of matrices: a contracted axis that is padded gets zeros on both sides."""

from __future__ import annotations

from jax.extend.core import JaxprEqn

from isthmus._runtime.padding.interpreter import Interpreter, out_shape, rule
from isthmus._runtime.padding.layout import PaddedArray


@rule("dot_general")
def dot_general(run: Interpreter, eqn: JaxprEqn, x: PaddedArray, y: PaddedArray) -> PaddedArray:
    """Contract true elements only. Zeros on one side are not enough: 0 * NaN is NaN."""
    (x_sum, y_sum), (x_batch, y_batch) = eqn.params["dimension_numbers"]
    x, y = run.full(x), run.full(y)
    for i, j in [*zip(x_sum, y_sum, strict=True), *zip(x_batch, y_batch, strict=True)]:
        y = run.relayout(y, j, x.axes[i])
    x, y = run.fill(x, x_sum, 0), run.fill(y, y_sum, 0)
    array = eqn.primitive.bind(x.array, y.array, **eqn.params)
    x_free = [i for i in range(len(x.shape)) if i not in (*x_sum, *x_batch)]
    y_free = [j for j in range(len(y.shape)) if j not in (*y_sum, *y_batch)]
    axes = [*[x.axes[i] for i in (*x_batch, *x_free)], *[y.axes[j] for j in y_free]]
    return PaddedArray(array, out_shape(eqn), tuple(axes))
