"""The registry of caches: bounds, the list, and that clearing loses nothing but time."""

from __future__ import annotations

import gc

import torch

import isthmus
from isthmus import _caches
from isthmus._caches import LruCache


def test_the_least_recently_used_entry_is_dropped() -> None:
    cache: LruCache[int, str] = LruCache("a test", 2)
    cache[1], cache[2] = "one", "two"
    assert cache.get(1) == "one"
    cache[3] = "three"
    assert 2 not in cache
    assert cache.items() == [(1, "one"), (3, "three")]
    assert cache.pop(1) == "one"
    assert cache.get(1) is None


def test_a_cache_is_listed_while_its_owner_lives() -> None:
    cache: LruCache[int, int] = LruCache("a test", 2)
    cache[1] = 1
    assert _caches.Row("a test", 1, 2) in _caches.rows()
    del cache
    gc.collect()
    assert not [row for row in _caches.rows() if row.name == "a test" and row.entries]


def test_after_clearing_everything_still_computes() -> None:
    x = torch.arange(4.0, device="jax")
    compiled = torch.compile(lambda x: x.sin() + 1, backend="isthmus", fullgraph=True)
    jitted = isthmus.jit(lambda x: x.cos() - 1)
    expected = [compiled(x), jitted(x), x * 3]
    with isthmus.lazy():
        y = x * 2
        z = y + 1
    isthmus.clear_caches()
    assert not [row for row in _caches.rows() if row.entries and row.name == "plans of single ops"]
    assert torch.equal(z.cpu(), x.cpu() * 2 + 1)
    for result, value in zip([compiled(x), jitted(x), x * 3], expected, strict=True):
        assert torch.equal(result.cpu(), value.cpu())
