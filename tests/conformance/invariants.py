"""What is compared where torch leaves part of a result open: the sign of an eigenvector, the order of ties."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.testing._internal.opinfo.core import SampleInput

Results = list[Any]


def _eigh(sample: SampleInput, results: Results) -> Results:
    w, v = results
    return [w, (v * w.unsqueeze(-2)) @ v.mH]


def _eig(sample: SampleInput, results: Results) -> Results:
    w, v = results
    a = sample.input.to(v.dtype)
    return [w, a @ v - v * w.unsqueeze(-2)]


def _svd(sample: SampleInput, results: Results) -> Results:
    u, s, vh = results
    k = s.shape[-1]
    if u.numel() == 0 or vh.numel() == 0:
        return [s]
    return [s, (u[..., :k] * s.unsqueeze(-2)) @ vh[..., :k, :]]


def _old_svd(sample: SampleInput, results: Results) -> Results:
    u, s, v = results
    return _svd(sample, [u, s, v.mH])


INVARIANTS: dict[str, Callable[[SampleInput, Results], Results]] = {
    "linalg.eigh": _eigh,
    "linalg.eig": _eig,
    "linalg.svd": _svd,
    "svd": _old_svd,
}


