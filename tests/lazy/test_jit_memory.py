"""The memory of functions under ``isthmus.jit``: given on, and given back."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import jax
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import isthmus
from isthmus._device.checks import value_checks
from tests.lazy.helpers import arange, held, replays

pytestmark = pytest.mark.usefixtures("settled")


# ---- memory


def test_memory_is_given_to_the_next_value() -> None:
    state = arange(3000) * 1
    f = isthmus.jit(lambda: state.add_(1))
    for _ in range(3):
        f()
    where = held(state).unsafe_buffer_pointer()
    kept = held(state)
    assert kept[0] == 3
    f()
    assert (float(kept[0]), kept.is_deleted()) == (3, False)  # somebody holds it
    del kept
    f()
    where = held(state).unsafe_buffer_pointer()
    for _ in range(3):
        f()
        assert held(state).unsafe_buffer_pointer() == where
    assert state[0].item() == 8


def test_donate_is_refused() -> None:
    state = arange(3000) * 1
    f = isthmus.jit(lambda: state.add_(1), donate=False)
    for n in range(4):
        kept, where = held(state), held(state).unsafe_buffer_pointer()
        f()
        assert not kept.is_deleted()
        assert held(state).unsafe_buffer_pointer() != where
        assert (float(kept[0]), state[0].item()) == (n, n + 1)


def test_what_was_taken_from_a_tensor_before_stays() -> None:
    state, cpu = arange(3000) * 1, torch.zeros(3000)
    state.copy_(cpu)
    view = state[10:20]
    f = isthmus.jit(lambda x: state.add_(x))
    kept = []
    for n in range(4):
        kept.append((n, state.detach().clone(), state + 0, state.cpu(), np.asarray(held(state))))
        f(torch.ones(3000).to("jax"))
    for n, *copies in kept:
        assert [float(c[0]) for c in copies] == [n] * 4
    assert view.tolist() == [4] * 10
    assert not cpu.any()


def test_replays_leak_nothing() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.1), nn.ReLU()).to("jax")
    optimizer = torch.optim.AdamW(model.parameters(), capturable=True)
    table = arange(6, 3, 2)

    @isthmus.jit
    def step(x: Tensor, at: Tensor, host: Tensor) -> Any:
        optimizer.zero_grad()
        loss = (model(x) * F.embedding(at, table)).sum() + host.to("jax").sum()
        loss.backward()
        optimizer.step()
        return loss, x[:1]

    def run(times: int) -> None:
        for _ in range(times):
            step(arange(4, 2, 2), torch.tensor([0, 2]).to("jax"), torch.ones(3))
        value_checks.raise_pending()

    run(5)
    before, count = alive(), replays()
    run(300)
    assert alive() == before
    assert replays() == count + 300


def alive() -> int:
    """Return how many arrays there are."""
    from isthmus._runtime import host_arrays

    torch.jax.synchronize()  # type: ignore[attr-defined]
    host_arrays._numbers.clear()  # a cache with a limit of its own
    gc.collect()
    return len(jax.live_arrays())


def test_nothing_of_a_call_is_kept() -> None:
    f = isthmus.jit(lambda x, y: (x * 2, x[1:], y))
    x, y = arange(3), arange(3)
    found = f(x, y)
    buffers = [weakref.ref(t.untyped_storage()._buffer) for t in (x, y, found[0])]  # type: ignore[attr-defined]
    del x, y, found
    f(arange(3), arange(3))
    gc.collect()
    assert [b() for b in buffers] == [None] * 3


def test_a_function_that_is_dropped_keeps_nothing() -> None:
    state = [arange(3)]
    f = isthmus.jit(lambda x: x * state[0])
    f(arange(3))
    f(arange(3))
    buffer = weakref.ref(state[0].untyped_storage()._buffer)  # type: ignore[attr-defined]
    state.clear()
    del f
    gc.collect()
    assert buffer() is None
