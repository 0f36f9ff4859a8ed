"""From a pure function to an executable: traced and compiled with 64-bit types on, whatever the user chose."""

from __future__ import annotations

import contextlib
import functools
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from isthmus._runtime import (
    counters,
    cpu_compile_options,
    executable_cache,
    forks,
    gpu_alloc_gaps,
    memory,
    private,
    progress,
)

Function = Callable[..., Any]
# XLA's compiler runs without the interpreter lock, so two threads may meet here; one compiles at a time.
_lock = threading.RLock()


class _Scope(threading.local):
    """What the user chose for 64-bit types on this thread, while they are on for our sake."""

    chosen: bool | None = None


_scope = _Scope()


@contextlib.contextmanager
def scoped_x64() -> Iterator[None]:
    """Make int64 and float64 real, for this thread and no longer."""
    before = _scope.chosen
    _scope.chosen = chosen_x64()
    try:
        with jax.enable_x64(True):
            yield
    finally:
        _scope.chosen = before


def chosen_x64() -> bool:
    """Return whether the user has 64-bit types on, on this thread."""
    return has_x64() if _scope.chosen is None else _scope.chosen


def has_x64() -> bool:
    """Return whether 64-bit types are on, on this thread."""
    return bool(jax.config.jax_enable_x64)  # type: ignore[attr-defined]


def abstract(value: Any) -> jax.ShapeDtypeStruct:
    """Return the shape and dtype of ``value``."""
    return jax.ShapeDtypeStruct(value.shape, value.dtype)


@dataclass(frozen=True)
class Executable:
    """A compiled function: the cheapest way to call it, JAX's stages it came from, and the seconds each took."""

    call: Function
    lowered: Any
    compiled: Any
    seconds: dict[str, float]


def compile(function: Function, inputs: Sequence[Any], donate: tuple[int, ...] = ()) -> Function:
    """Compile the function of one op for inputs of these shapes and return the cheapest way to call it."""
    return build(
        function, inputs, donate, cpu_compile_options.options_for if platform() == "cpu" else None
    ).call


def build(
    function: Function,
    inputs: Sequence[Any],
    donate: tuple[int, ...] = (),
    options: Mapping[str, Any] | Callable[[Any], dict[str, Any]] | None = None,
    title: str = "",
) -> Executable:
    """Compile ``function`` for inputs of these shapes, with options for XLA, and keep what can be told about it."""
    forks.check()  # before the lock, which a thread of the parent may have held
    clock = Clock()
    with _lock, scoped_x64(), progress.line(title), private.forgetting_callers():
        traced = jax.jit(function, donate_argnums=donate).trace(*jax.tree.map(abstract, list(inputs)))
        memory.check(traced.jaxpr.jaxpr)
        options = options(traced) if callable(options) else dict(options or {})
        clock.lap("trace")
        lowered = traced.lower()
        clock.lap("lower")
        compiled = executable_cache.load(lowered, donate, options)
        if compiled is None:
            try:
                compiled = lowered.compile(compiler_options=options or None)
            except jax.errors.JaxRuntimeError as error:
                if memory.is_exhausted(error):
                    raise memory.exhausted(error) from error
                raise
            executable_cache.save(compiled, lowered, donate, options)
        clock.lap("xla")
    counters.count_compilation(clock.laps)
    return Executable(private.fast_call(compiled), lowered, compiled, clock.laps)


# What XLA calls failures that have nothing to do with the program itself, and so may not happen again.
_PASSING = ("UNAVAILABLE", "ABORTED", "CANCELLED", "DEADLINE_EXCEEDED", "INTERNAL", "UNKNOWN")


def may_pass(error: BaseException) -> bool:
    """Return whether compiling may succeed the next time, as far as XLA's status code tells."""
    return isinstance(error, jax.errors.JaxRuntimeError) and str(error).startswith(_PASSING)


class Clock:
    """Seconds from one lap to the next, by name."""

    def __init__(self) -> None:
        self.laps: dict[str, float] = {}
        self._last = time.perf_counter()

    def lap(self, name: str) -> None:
        """End a lap."""
        now = time.perf_counter()
        self.laps[name], self._last = now - self._last, now


def inline(function: Function) -> Function:
    """Return ``function`` to be called on tracers, with 64-bit types on."""

    def call(*inputs: Any) -> Any:
        with scoped_x64():
            return function(*inputs)

    return call


@functools.cache
def default_device() -> Any:
    """Return the JAX device tensors live on."""
    device = jax.local_devices()[0]
    gpu_alloc_gaps.leave(device)
    return device


def platform() -> str:
    """Return the platform of that device: cpu, gpu or tpu."""
    return str(default_device().platform)


def wait() -> None:
    """Wait for what this thread began, results that nobody kept included: a device does one thing after another."""
    forks.check()
    call, zero = _something()
    call(zero).block_until_ready()


@functools.cache
def _something() -> tuple[Function, Any]:
    """Return a program to be run after all others, and its argument."""
    return jax.jit(lambda x: x + 1), jax.device_put(np.zeros((), np.float32), default_device())
