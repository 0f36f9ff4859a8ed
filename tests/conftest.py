"""Shared by every test: compilation is cheap, a fall to the CPU is an error unless a test says otherwise.

Options of a run: ``--spread N`` takes a sample of the suite, ``--samples N`` limits how much of torch's databases runs
(tests/conformance/table.py), ``--xla-default`` compiles as users do. README.md beside this file says which tests are
where and how to run one of them.
"""

import gc
import importlib.metadata
import itertools
import os

# The suite runs two processes on two cores; torch's threads on the CPU would only wait for each other.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# A test that fails is looked into.
os.environ.setdefault("ISTHMUS_TRACEBACKS", "full")

import pytest
import torch

import isthmus
from isthmus._device.checks import value_checks
from isthmus._lazy import ranges as lazy_ranges
from isthmus._program import ranges
from isthmus._runtime import memory_maps, watching

pytest_plugins = ["tests.conformance.table"]
_tests = itertools.count(1)


# Most cases are small: the host would compute what is to be compared with it.
os.environ.setdefault("ISTHMUS_SMALL_OPS", "device")
isthmus.config.small_ops = os.environ["ISTHMUS_SMALL_OPS"]

# Compiling takes most of the suite's time: LLVM's optimiser half of it, XLA's fusion emitters half of the rest (74 ms
# for a program of five ops with them, 29 without). Neither changes a result that torch promises; what they might change
# (a division made a product, a rounding left out) runs with --xla-default as well.
UNOPTIMIZED = "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"
# XLA ends the process over a flag it does not know, so only the release that is known to have this one is given it.
if importlib.metadata.version("jaxlib").startswith("0.10."):
    UNOPTIMIZED += " --xla_cpu_use_fusion_emitters=false"


def pytest_addoption(parser):
    """Let a run take a sample of the whole suite, as `make test-versions` does, or compile as users do."""
    parser.addoption(
        "--spread", type=int, default=None, metavar="N", help="run about N tests, spread over every file"
    )
    parser.addoption(
        "--xla-default", action="store_true", help="compile with XLA's own optimisation level, not with none"
    )


def pytest_configure(config):
    """Choose XLA's flags; its first compilation reads them, in this process and in those that tests start."""
    if not config.getoption("--xla-default"):
        os.environ.setdefault("XLA_FLAGS", UNOPTIMIZED)


def pytest_collection_finish(session):
    """Keep what importing and collecting left, a million objects, out of every later garbage collection.

    Tracing allocates enough to start a full collection every few tests: a fifth of the suite's time without this.
    """
    gc.collect()
    gc.freeze()


def pytest_collection_modifyitems(config, items):
    """With ``--spread N``, keep N tests: each file's share grows with the square root of its tests.

    In proportion to their numbers the cases of ops alone would take half of the sample.
    """
    wanted = config.getoption("--spread")
    if wanted is None:
        return
    files = {}
    for item in items:
        # `-m "not slow"` may be applied after this hook, so slow tests must not take a place.
        if item.get_closest_marker("slow") is None:
            files.setdefault(item.path, []).append(item)
    weight = sum(len(tests) ** 0.5 for tests in files.values())
    kept = set()
    for tests in files.values():
        share = min(len(tests), max(1, round(wanted * len(tests) ** 0.5 / weight)))
        kept |= {tests[n * len(tests) // share] for n in range(share)}
    config.hook.pytest_deselected(items=[item for item in items if item not in kept])
    items[:] = [item for item in items if item in kept]


# What decides whether a graph is compiled exactly or for a range of sizes: the sizes that came before.
SIZES_SEEN = (ranges._families, ranges._firsts, ranges._calls, lazy_ranges._matches)


@pytest.fixture(autouse=True)
def strict_fallback():
    # So results are padded in a test only where the test itself has other sizes.
    for cache in SIZES_SEEN:
        cache.clear()
    before, shapes = isthmus.config.fallback, isthmus.config.shapes
    isthmus.config.fallback = "error"
    isthmus.config.check_indices = "now"  # on an accelerator it would be later, in another test
    torch.manual_seed(0)
    yield
    isthmus.config.fallback, isthmus.config.shapes = before, shapes
    isthmus.config.check_indices = "auto"
    for watcher in tuple(watching.watchers):  # counting memory goes on until the process ends
        watching.remove(watcher)
    if next(_tests) % 20 == 0 and memory_maps.crowded():
        drop_programs()


@pytest.fixture
def settled(strict_fallback):
    """Ask that a test leaves the mode it found, and forget the conditions nobody looked at."""
    yield
    value_checks.forget()
    assert isthmus.mode() == "eager"


@pytest.fixture
def fresh_dynamo():
    """Let a test compile as if nothing had been compiled before."""
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.fixture
def limit(strict_fallback, request):
    """Let ops fall to the CPU, since the test counts those that do; return how many samples to run."""
    isthmus.config.fallback = "cpu"
    return request.config.getoption("--samples")


def drop_programs() -> None:
    """Forget every compiled program that can be compiled again."""
    import jax

    isthmus.clear_caches()
    torch._dynamo.reset()
    jax.clear_caches()
    gc.collect()
