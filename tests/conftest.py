"""Shared by every test: compilation is cheap, a fall to the CPU is an error unless a test says otherwise."""

import os

# XLA's optimiser dominates these runs and changes no result that torch promises.
os.environ.setdefault(
    "XLA_FLAGS", "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"
)
os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest
import torch

import isthmus

pytest_plugins = ["tests.conformance.table"]


@pytest.fixture(autouse=True)
def strict_fallback():
    before = isthmus.config.fallback
    isthmus.config.fallback = "error"
    isthmus.config.check_indices = "now"  # on an accelerator it would be later, in another test
    torch.manual_seed(0)
    yield
    isthmus.config.fallback = before
    isthmus.config.check_indices = "auto"


@pytest.fixture
def limit(strict_fallback, request):
    """Let ops fall to the CPU, since the test counts those that do; return how many samples to run."""
    isthmus.config.fallback = "cpu"
    _drop_programs()
    return request.config.getoption("--samples")


def _drop_programs() -> None:
    """Forget compiled programs once there are many: an executable holds memory maps, which are limited."""
    from isthmus._device import dispatch

    kernels = [k for k in dispatch._kernels.values() if isinstance(k, dispatch.Kernel)]
    if sum(len(k.plans) for k in kernels) > 2000:
        for kernel in kernels:
            kernel.plans.clear()
