"""Weight gradients on the CPU: a product whose left matrix is transposed is faster with that matrix written out.

The gradient of a linear layer's weight is ``grad.T @ input``, a third of all multiplications of a training step. XLA
folds the transposition into the product and then has no fast kernel for it: its library for products (YNNPACK) takes a
transposed right matrix and no transposed left one, so the product goes to Eigen, which is slower the more columns the
left matrix has (JAX 0.10). An optimization barrier keeps the transposition apart: a copy, then the library's product.
One core of an EPYC with AVX-512, least CPU time of 60, left matrix transposed in ms::

    1024 x 1024 by 1024 x 256    folded 8.4   written out 5.8   CPU torch 6.4
    2048 x 512 by 512 x 64       folded 4.6   written out 2.3   CPU torch 2.2
    768 x 1024 by 1024 x 256     folded 4.9   written out 4.7   CPU torch 4.5
    256 x 1024 by 1024 x 1024    folded 5.6   written out 5.7   CPU torch 6.0

``linear_backward`` asks here, and ``_program/evaluate.py`` for each ``mm`` of a permuted matrix. Sums may be in another
order than the folded product's, as from one size to the next.
"""

from __future__ import annotations

import jax

from isthmus._ops.common import Array
from isthmus._runtime import compiler

_SMALL = 2**20
"""Below so many multiplications a product takes microseconds either way."""


def written_out(left: Array, right: Array) -> Array:
    """Return the left matrix of a product, which is a transposed one, in memory of its own where that is faster."""
    (rows, inner), columns = left.shape, right.shape[-1]
    if not (isinstance(rows, int) and isinstance(columns, int)):
        return left  # a program for a range of sizes, or one to be exported
    if compiler.platform() != "cpu" or compiler.is_portable() or left.dtype != "float32":
        return left
    # A range of sizes may have large ones.
    if rows < columns or (isinstance(inner, int) and rows * inner * columns < _SMALL):
        return left
    return jax.lax.optimization_barrier(left)
