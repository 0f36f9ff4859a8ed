"""Random numbers: a generator is (seed, offset), and each random op takes the next offset as a run-time input.

``torch.manual_seed(3)`` sets (3, 0); ``torch.rand(2, device="jax")`` then draws (3, 0) and leaves (3, 1). The two
64-bit numbers enter a program as four 32-bit words, so one program serves every seed and every draw, and
``random_key`` turns them into a JAX key inside it. A compiled graph draws once and numbers its random nodes from there,
so that it has the numbers that eager has.

``entry.py`` draws for eager ops, ``_lazy/trace.py`` for recorded ones, ``_dynamo/random.py`` for compiled graphs;
``torch_jax.py`` is ``torch.jax``'s face of it. While JAX traces torch code, ops on that thread draw from the key the
user passed instead (``drawing_from``). ``import torch`` loads this file, so it imports no JAX.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch

_lock = threading.Lock()
# The low 32 bits: JAX's threefry keys are made of 32-bit words.
_MASK = 0xFFFFFFFF


class GeneratorState:
    """The seed and how many random ops have drawn from it."""

    def __init__(self, seed: int) -> None:
        self.seed, self.offset = seed, 0


default = GeneratorState(0)


stands_in: Callable[[torch.Generator], bool] = lambda generator: False  # noqa: E731
"""Says whether an object is ``torch.jax.default_generators[0]``, which draws what ops without a generator draw.

``torch_glue/generators.py`` makes that object and assigns the function: telling generators apart takes a private name.
"""


class ScopedGenerator(threading.local):
    """What random ops of this thread draw from in place of the generator: ``words``, a function of the offset."""

    words: Callable[[int], Any] | None = None
    is_traced = False
    offset = 0


own = ScopedGenerator()


def manual_seed(seed: int) -> None:
    """Start the sequence of this seed anew."""
    # Negative seeds are taken modulo 2**64.
    with _lock:
        default.seed, default.offset = int(seed) & 0xFFFFFFFFFFFFFFFF, 0


def state() -> tuple[int, int]:
    """Return seed and offset."""
    with _lock:
        return default.seed, default.offset


def advance(count: int) -> tuple[int, int]:
    """Use up ``count`` offsets and return seed and offset as they were."""
    with _lock:
        before = default.seed, default.offset
        default.offset += count
    return before


def words(start: tuple[int, int], step: int) -> np.ndarray[Any, Any]:
    """Return the (seed, offset) that is ``step`` offsets after ``start``, as four 32-bit words."""
    seed, offset = start[0], start[1] + step
    return np.array([seed >> 32, seed & _MASK, offset >> 32, offset & _MASK], np.uint32)


def random_key(words: Any, index: int = 0) -> Any:
    """Return the JAX key of a (seed, offset), given as four 32-bit words, ``index`` offsets later.

    Called while a program is traced. ``index`` is 0 for an op on its own; in a graph it numbers the random nodes, so
    that each has the key that eager has for the same draw.
    """
    import jax  # not above: ``import torch`` loads this file

    # Seed in the first two words, offset in the last two.
    high, low = words[2], words[3]
    if index:
        # In 64 bits, so that a carry reaches the high word: ``draw`` computes the same sum on the host.
        offset = (high.astype(np.uint64) << 32 | low.astype(np.uint64)) + np.uint64(index)
        high, low = (offset >> 32).astype(np.uint32), offset.astype(np.uint32)
    key = jax.random.wrap_key_data(words[:2], impl="threefry2x32")
    # Two folds, since ``fold_in`` takes 32 bits. The high word is 0 for the first 2**32 draws.
    return jax.random.fold_in(jax.random.fold_in(key, high), low)


def get_state() -> torch.Tensor:
    """Return (seed, offset) as a CPU byte tensor, as torch keeps generator states."""
    with _lock:
        # Inside a JAX function there is no seed, only how many were drawn from the user's key.
        start = (0, own.offset) if own.words is not None else (default.seed, default.offset)
    words = np.array(start, np.uint64)
    return torch.from_numpy(words.view(np.uint8).copy())


def set_state(state: torch.Tensor) -> None:
    """Go back to a state that ``get_state`` returned."""
    if state.dtype != torch.uint8 or state.numel() != 16:
        raise TypeError(
            "RNG state of device 'jax' must be the 16-byte torch.uint8 tensor get_rng_state returned"
        )
    seed, offset = state.cpu().contiguous().numpy().view(np.uint64)
    if own.words is not None:
        own.offset = int(offset)
        return
    with _lock:
        default.seed, default.offset = int(seed), int(offset)


@contextlib.contextmanager
def replaying(words: np.ndarray[Any, Any], index: int) -> Iterator[None]:
    """Let the ops in this block draw from the (seed, offset) that ``draw`` gave, ``index`` offsets later."""
    high, low, far, near = (int(word) for word in words)
    with _lock:
        before = default.seed, default.offset
        # Not added to: the replayed ops must see the very numbers that the recorded draw gave them.
        default.seed, default.offset = high << 32 | low, (far << 32 | near) + index
    try:
        yield
    finally:
        with _lock:
            default.seed, default.offset = before


@contextlib.contextmanager
def drawing_from(words: Callable[[int], Any], is_traced: bool) -> Iterator[None]:
    """Let random ops on this thread take their four words from a function of how many were drawn before."""
    before = own.words, own.is_traced, own.offset
    own.words, own.is_traced, own.offset = words, is_traced, 0
    try:
        yield
    finally:
        own.words, own.is_traced, own.offset = before


def draw(generator: torch.Generator | None, count: int = 1) -> Any:
    """Return the next (seed, offset) as four 32-bit words and use up ``count`` offsets.

    A CPU generator is drawn from instead.
    """
    if generator is not None and stands_in(generator):
        generator = None
    if own.words is not None:
        # The key is an argument of the JAX function; a torch generator would be baked into the trace.
        if generator is not None:
            raise RuntimeError("a generator cannot be drawn from inside a JAX function; pass a key as rng=")
        start = own.offset
        own.offset += count
        return own.words(start)
    if generator is not None:
        # 64 bits of the CPU generator become the seed, at offset 0: its own state moves on as torch's would.
        low, high = torch.randint(
            0, 2**32, (2,), generator=generator, dtype=torch.int64, device="cpu"
        ).tolist()
        return np.array([high, low, 0, 0], np.uint32)
    return words(advance(count), 0)
