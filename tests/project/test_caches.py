"""The registry of caches: bounds, the list, and that clearing loses nothing but time."""

from __future__ import annotations

import ast
import gc
from pathlib import Path

import pytest
import torch

import isthmus
from isthmus import _caches
from isthmus._caches import LruCache
from isthmus._interop import traced_functions
from isthmus._runtime import counters


def test_the_least_recently_used_entry_is_dropped() -> None:
    cache: LruCache[int, str] = LruCache("a test", 2)
    cache[1], cache[2] = "one", "two"
    assert cache.get(1) == "one"
    cache[3] = "three"
    assert 2 not in cache
    assert cache.items() == [(1, "one"), (3, "three")]
    assert cache.pop(1) == "one"
    assert cache.get(1) is None


def test_a_limit_may_be_a_setting_and_what_leaves_is_reported() -> None:
    limit, gone = 3, list[int]()
    cache: LruCache[str, int] = LruCache("a test", lambda: limit, gone.append)
    for number, key in enumerate("abc"):
        cache[key] = number
    limit = 1
    cache["d"] = 3
    assert (cache.values(), gone) == ([3], [0, 1, 2])
    cache.clear()
    assert gone == [0, 1, 2, 3]
    cache["e"] = 4
    assert cache.pop("e") == 4
    assert gone == [0, 1, 2, 3]  # who takes a value out has it


def test_a_cache_is_listed_while_its_owner_lives() -> None:
    cache: LruCache[int, int] = LruCache("a test", 2)
    cache[1] = 1
    assert _caches.Row("a test", 1, 2) in _caches.rows()
    del cache
    gc.collect()
    assert not [row for row in _caches.rows() if row.name == "a test" and row.entries]


def test_a_cache_that_cannot_be_made_again_is_kept() -> None:
    kept: LruCache[int, int] = LruCache("a test", 2, kept=True)
    kept[1] = 1
    isthmus.clear_caches()
    assert kept.get(1) == 1


# What a fact found out once may depend on: there are few of each.
FACTS = {"Op", "OpOverload", "torch.dtype", "str", "Path"}


def test_there_is_one_lru_class_and_every_cache_is_listed() -> None:
    wrong = []
    for file in sorted(Path(isthmus.__file__).parent.rglob("*.py")):
        source = file.read_text()
        for node in ast.walk(ast.parse(source)):
            if not isinstance(node, ast.FunctionDef):
                if isinstance(node, ast.Attribute) and node.attr == "popitem" and file.name != "_caches.py":
                    wrong.append(f"{file}:{node.lineno}: an LRU cache of its own")
                continue
            cached = [ast.unparse(each) for each in node.decorator_list if "cache" in ast.unparse(each)]
            keys = {ast.unparse(each.annotation or each) for each in node.args.args}
            listed = "cached_property" in "".join(cached) or f"{node.name}.cache_clear" in source
            if cached and keys - FACTS and not listed:
                wrong.append(f"{file}:{node.lineno}: {node.name} has no bound and is not in the list")
    assert not wrong, "\n".join(wrong)


def test_recipes_of_recorded_ops_are_cleared() -> None:
    def recipes() -> int:
        return sum(row.entries for row in _caches.rows() if row.name == "recipes of recorded ops")

    x = torch.ones(3, device="jax")
    with isthmus.lazy():
        y = x.cos() + 1
    assert recipes() > 0
    isthmus.clear_caches()
    assert recipes() == 0
    with isthmus.lazy():
        z = x.cos() + y
    assert torch.allclose(z.cpu(), 2 * x.cpu().cos() + 1)


def test_functions_in_graphs_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(traced_functions, "_in_graphs", LruCache("a test", 2, kept=True))
    x = torch.ones(2, device="jax")
    for n in range(4):
        double = isthmus.jax_function(lambda a, n=n: a * (n + 2))
        assert torch.compile(lambda x, f=double: f(x), backend="isthmus")(x).tolist() == [n + 2] * 2
    assert len(traced_functions._in_graphs) == 2


def test_compiled_and_jitted_functions_are_cleared_too() -> None:
    x = torch.ones(3, device="jax")
    model = torch.nn.Linear(3, 3).to("jax")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    def step(x: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = model(x).sum()
        loss.backward()
        optimizer.step()
        return loss.detach()

    functions = {
        "compiled": torch.compile(lambda x: x.sin() + 1, backend="isthmus", fullgraph=True),
        "jitted": isthmus.jit(lambda x: x.cos() + 2),
        "a step with state": isthmus.jit(step),
    }
    for name, function in functions.items():
        for _ in range(4):
            function(x)
        weight = model.weight.detach().cpu()
        isthmus.clear_caches()
        assert torch.equal(model.weight.detach().cpu(), weight), name
        before = counters.counts["compilations"]
        function(x)
        assert counters.counts["compilations"] > before, name
        before = counters.counts["compilations"]
        function(x)
        function(x)
        assert counters.counts["compilations"] == before, name


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
