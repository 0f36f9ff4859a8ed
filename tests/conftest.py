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


@pytest.fixture(autouse=True)
def strict_fallback():
    before = isthmus.config.fallback
    isthmus.config.fallback = "error"
    isthmus.config.check_indices = "now"  # on an accelerator it would be later, in another test
    torch.manual_seed(0)
    yield
    isthmus.config.fallback = before
    isthmus.config.check_indices = "auto"
