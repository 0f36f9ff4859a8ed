"""One thing done on the CPU and on the device, and whether both give the same."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch

from tests.conformance.values import Mismatch, compare_forms, compare_values
from tests.conformance.verdict import Verdict


def _as_they_are(results: list[Any]) -> list[Any]:
    return results


@dataclass(frozen=True)
class Trial:
    """``at(place)`` does it on fresh copies at ``"cpu"``, ``"jax"`` or, in double precision, ``"wide"``."""

    at: Callable[[str], list[Any]]
    invariant: Callable[[list[Any]], list[Any]] = _as_they_are
    has_values: bool = True
    device: str = "jax"

    def run(self, verdict: Verdict, number: int) -> None:
        """Do it everywhere, and note in the verdict where the device differs."""
        want, refused = self._attempt("cpu")
        if isinstance(refused, NotImplementedError):
            return  # torch itself has no such form
        with verdict.sample(number):
            if refused is None:
                self._compare(want)
            else:
                self._must_refuse(refused)

    def _seeded(self, place: str) -> list[Any]:
        torch.manual_seed(0)
        return self.at(place)

    def _is_random(self, want: list[Any], others: range) -> bool:
        """Return whether the CPU's values follow the seed, also where a sample seeds the generator itself."""
        plain = torch.manual_seed
        for other in others:
            with mock.patch.object(torch, "manual_seed", lambda seed, other=other: plain(seed + other)):
                if not _all_same(self._seeded("cpu"), want):
                    return True
        return False

    def _attempt(self, place: str) -> tuple[list[Any], Exception | None]:
        try:
            return self._seeded(place), None
        except Exception as error:
            return [], error

    def _must_refuse(self, refused: Exception) -> None:
        try:
            self._seeded("jax")
        except Exception as error:
            if type(error) is not type(refused):
                words = f"{type(error).__name__}: {_first_line(error)}"
                raise Mismatch(f"{words}; CPU raises {type(refused).__name__}") from error
            return
        raise Mismatch(f"no error; CPU raises {type(refused).__name__}: {_first_line(refused)}")

    def _compare(self, want: list[Any]) -> None:
        got = self._seeded("jax")
        compare_forms(got, want, self.device)
        if not self.has_values:
            return
        random = self._is_random(want, range(1, 2))
        if not random:
            try:
                compare_values(self._seen(got), self._seen(want), self._truth)
            except Mismatch:
                # Few numbers drawn may by chance come to the same values twice.
                random = self._is_random(want, range(2, 10))
                if not random:
                    raise
        if random and not _all_same(self._seeded("jax"), got):
            raise Mismatch("a second call after the same manual_seed gives other values")

    def _seen(self, results: list[Any]) -> list[Any]:
        return self.invariant([r.cpu() if isinstance(r, torch.Tensor) else r for r in results])

    def _truth(self) -> list[Any]:
        found, refused = self._attempt("wide")
        return self._seen(found) if refused is None else []


def _first_line(error: Exception) -> str:
    return str(error).strip().split("\n")[0][:160]


def _all_same(one: list[Any], other: list[Any]) -> bool:
    return all([_same(a, b) for a, b in zip(one, other, strict=True)])


def _same(one: Any, other: Any) -> bool:
    if not isinstance(one, torch.Tensor):
        return bool(one == other or (one != one and other != other))
    return torch.equal(torch.nan_to_num(one.cpu()), torch.nan_to_num(other.cpu()))
