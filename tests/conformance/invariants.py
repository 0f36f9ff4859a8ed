"""What is compared where torch leaves part of a result open: the sign of an eigenvector, the order of ties."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.testing._internal.opinfo.core import SampleInput

Results = list[Any]


def _eigh(sample: SampleInput, w: Any, v: Any) -> Results:
    return [w, (v * w.unsqueeze(-2)) @ v.mH]


def _eig(sample: SampleInput, w: Any, v: Any) -> Results:
    return [w, sample.input.to(v.dtype) @ v - v * w.unsqueeze(-2)]


def _svd(sample: SampleInput, u: Any, s: Any, vh: Any) -> Results:
    k = s.shape[-1]
    if u.numel() == 0 or vh.numel() == 0:
        return [s]
    return [s, (u[..., :k] * s.unsqueeze(-2)) @ vh[..., :k, :]]


def _old_svd(sample: SampleInput, u: Any, s: Any, v: Any) -> Results:
    return _svd(sample, u, s, v.mH)


def _named(sample: SampleInput, indices: Any, position: int) -> Any:
    """Return the elements that indices name: of equal ones any may be named, unless the sort is stable."""
    x, dim = sample.input, sample.kwargs.get("dim", (*sample.args, -1, -1)[position])
    if not x.ndim or sample.kwargs.get("stable"):
        return indices
    return x.gather(dim, indices if indices.ndim == x.ndim else indices.unsqueeze(dim))


def _argsort(sample: SampleInput, indices: Any) -> Results:
    return [_named(sample, indices, 0)]


def _sort(sample: SampleInput, values: Any, indices: Any) -> Results:
    return [values, _named(sample, indices, 0)]


def _kth(sample: SampleInput, values: Any, indices: Any) -> Results:
    return [values, _named(sample, indices, 1)]


# The number of results, which of them is fixed, and what fixes the others.
_OPEN: dict[str, tuple[int, int, Callable[..., Results]]] = {
    "linalg.eigh": (2, 0, _eigh),
    "linalg.eig": (2, 0, _eig),
    "linalg.svd": (3, 1, _svd),
    "svd": (3, 1, _old_svd),
    "argsort": (1, 0, _argsort),
    "sort": (2, 0, _sort),
    "mode": (2, 0, _sort),
    "topk": (2, 0, _kth),
    "kthvalue": (2, 0, _kth),
}


def of(name: str, tangents: bool, sample: SampleInput, results: Results) -> Results:
    """Return what of an op's results must agree; of tangents only those of the results that are fixed."""
    if name not in _OPEN or len(results) % _OPEN[name][0]:
        return results
    count, fixed, make = _OPEN[name]
    groups = [results[i : i + count] for i in range(0, len(results), count)]
    return [r for group in groups for r in ([group[fixed]] if tangents else make(sample, *group))]
