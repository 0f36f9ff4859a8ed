"""Primitives on the last axes of a batch: the batch may be padded, the matrices may not."""

from __future__ import annotations

from jax.extend.core import JaxprEqn

from isthmus._runtime.padding.interpreter import Interpreter, out_shape, rule
from isthmus._runtime.padding.layout import PaddedArray
from isthmus._runtime.padding.sizes import Refused, is_symbolic


@rule(
    "cholesky",
    "eig",
    "eigh",
    "geqrf",
    "lu",
    "qr",
    "schur",
    "svd",
    "triangular_solve",
    "tridiagonal",
)
def factorization(run: Interpreter, eqn: JaxprEqn, *operands: PaddedArray) -> list[PaddedArray]:
    """Factor each matrix of a padded batch; matrices of padding are zero, since solvers may not end on NaN."""
    return _batched(run, eqn, operands, 2)


@rule("lu_pivots_to_permutation")
def permutation(run: Interpreter, eqn: JaxprEqn, pivots: PaddedArray) -> list[PaddedArray]:
    """Turn each row of a padded batch of exchanges into the order that they make."""
    return _batched(run, eqn, (pivots,), 1)


@rule("fft")
def fft(run: Interpreter, eqn: JaxprEqn, x: PaddedArray) -> list[PaddedArray]:
    """Transform each row of a padded batch."""
    return _batched(run, eqn, (x,), len(eqn.params["fft_lengths"]))


def _batched(
    run: Interpreter, eqn: JaxprEqn, operands: tuple[PaddedArray, ...], last: int
) -> list[PaddedArray]:
    name = eqn.primitive.name
    if any(is_symbolic(n) for x in operands for n in x.shape[-last:]):
        raise Refused(name, "of a padded axis")
    filled = []
    for x in operands:
        x = run.canonical(x)
        filled.append(run.fill(x, range(len(x.shape) - last), 0))
    results = eqn.primitive.bind(*[x.array for x in filled], **eqn.params)
    results = results if eqn.primitive.multiple_results else [results]
    shapes = [out_shape(eqn, n) for n in range(len(results))]
    return [
        PaddedArray(y, shape, tuple(run.layout(n) for n in shape))
        for y, shape in zip(results, shapes, strict=True)
    ]
