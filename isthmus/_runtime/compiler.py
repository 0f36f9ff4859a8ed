"""From a pure function of arrays to an executable: trace, lower, compile, and the cheapest way to call it.

Every program of every mode is compiled here, by ``build``: plans of eager ops (``_device/core``), recorded graphs
(``_program/program.py``) of lazy mode, ``isthmus.jit`` and ``torch.compile``, and JAX functions on tensors of other
devices (``_interop/traced_functions.py``)::

    executable = build(lambda x, y: (x + y,), [x, y], donate=(0,))
    (out,) = executable.call(x, y)          # x is gone: its memory is that of the result
    executable.seconds                      # {"trace": 0.001, "lower": 0.002, "xla": 0.031}

What happens around JAX's own three stages, and why it is in one place:

- 64-bit types are on (``scoped_x64``), since torch has int64 and float64 and JAX's default has not. The switch is
  scoped to this thread and to our tracing; the user's configuration is never changed.
- One thread compiles at a time, and one more in the background (``background.py``). Sizes that overflow inside XLA are
  refused before it sees them (``memory.check``).
- An executable from an earlier process is loaded instead of compiled where ``config.cache`` names a folder
  (``executable_cache.py``); compilations and loads are counted (``counters.py``).
- In a process that was forked after JAX started, ``forks.check`` raises: XLA would wait for threads that are not there.

``build`` raises ``torch.OutOfMemoryError`` for a program that cannot fit, and XLA's own error for any other failure;
``may_pass`` says whether trying again makes sense.
"""

from __future__ import annotations

import contextlib
import functools
import re
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.extend.core import Jaxpr

from isthmus import _caches
from isthmus._runtime import (
    background,
    counters,
    cpu_compile_options,
    executable_cache,
    forks,
    gpu_alloc_gaps,
    memory,
    placement,
    private,
    progress,
)

Array = jax.Array
Function = Callable[..., Any]
# XLA's compiler runs without the interpreter lock, so two threads may meet here. Reentrant: tracing runs
# Python, which may compile another program in its turn.
_lock = threading.RLock()


class _Scope(threading.local):
    """What holds for this thread: the user's choice of 64-bit types while ``scoped_x64`` has them on, else None; and
    whether it traces a program to be exported."""

    chosen: bool | None = None
    portable: bool = False


_scope = _Scope()


@contextlib.contextmanager
def portable() -> Iterator[None]:
    """Trace a program for other machines too, on this thread and until the block ends."""
    before, _scope.portable = _scope.portable, True
    try:
        yield
    finally:
        _scope.portable = before


def is_portable() -> bool:
    """Return whether the program that is traced must run elsewhere too, and for sizes that are not known yet.

    Lowerings then take no kernel that only the device at hand has.
    """
    return _scope.portable


@contextlib.contextmanager
def scoped_x64() -> Iterator[None]:
    """Make int64 and float64 real, on this thread and until the block ends."""
    # In a nested scope still the user's choice, not the True of the scope around it.
    before, _scope.chosen = _scope.chosen, chosen_x64()
    try:
        with jax.enable_x64(True):
            yield
    finally:
        _scope.chosen = before


def chosen_x64() -> bool:
    """Return whether the user has 64-bit types on, on this thread: what JAX said before ``scoped_x64``."""
    return has_x64() if _scope.chosen is None else _scope.chosen


def has_x64() -> bool:
    """Return whether 64-bit types are on now, on this thread."""
    return bool(jax.config.jax_enable_x64)  # type: ignore[attr-defined]


def abstract(value: Any) -> jax.ShapeDtypeStruct:
    """Return shape and dtype of ``value``, and where it lies: with a mesh at home unless it is split."""
    if isinstance(value, jax.ShapeDtypeStruct) and value.sharding is not None:
        # With a mesh everything has a sharding, and what has none is at home.
        return value
    if placement.home is not None:
        return placement.example(value.shape, value.dtype, placement.sharding_of(value))
    # An array over several processes, one device each (``_distributed/compiled_collectives.py``).
    sharding = getattr(value, "sharding", None)
    spread = sharding if sharding is not None and sharding.num_devices > 1 else None
    return jax.ShapeDtypeStruct(value.shape, value.dtype, sharding=spread)


@dataclass(frozen=True)
class Executable:
    """A compiled function: the cheapest way to call it, JAX's stages it came from, and the seconds each took."""

    call: Function
    lowered: jax.stages.Lowered
    compiled: jax.stages.Compiled
    seconds: dict[str, float]
    shardings: tuple[placement.Sharding, ...] | None
    """How each result is split, flat; None on one device."""
    unread: frozenset[int]
    """Numbers of the inputs, flat, that no operation reads: a call neither takes nor deletes them, donated or not."""


def compile(
    function: Function,
    inputs: Sequence[Any],
    donate: tuple[int, ...] = (),
    sharding: placement.Sharding = None,
) -> Function:
    """Compile the function of one op for inputs of these shapes; return the cheapest way to call it."""
    return build_op(function, inputs, donate, sharding).call


def build_op(
    function: Function,
    inputs: Sequence[Any],
    donate: tuple[int, ...] = (),
    sharding: placement.Sharding = None,
    name: str = "",
) -> Executable:
    """Compile the function of one op, on the CPU with no more effort than its size is worth."""
    options = cpu_compile_options.options_for if platform() == "cpu" else None
    return build(function, inputs, donate, options, sharding=sharding, name=name)


def build(
    function: Function,
    inputs: Sequence[Any],
    donate: tuple[int, ...] = (),
    options: Mapping[str, Any] | Callable[[jax.stages.Traced], dict[str, Any]] | None = None,
    title: str = "",
    sharding: placement.Sharding = None,
    devices: Sequence[jax.Device] = (),
    name: str = "",
) -> Executable:
    """Compile ``function`` for inputs of these shapes.

    Arguments:
        function: a pure function of as many arguments as there are inputs; it may return any pytree of arrays.
        inputs: arrays or pytrees of arrays; shapes and dtypes are read, values are not.
        donate: the numbers of inputs whose memory the results may take; each is deleted by a call.
        options: options for XLA, or a function of the traced program that chooses them.
        title: what a terminal is shown if this takes over two seconds; nothing is shown without one.
        sharding: with a mesh, how the results of a function without inputs are split; other results are split as XLA
            likes.
        devices: the devices that run it, where they are not those at home.
        name: what profilers call the program; its title by default.
    """
    forks.check()  # before the lock, which a thread of the parent may have held at the fork
    clock = Clock()
    held = contextlib.ExitStack()
    # ``held`` is the lock: it can be given back before the block ends.
    with held, scoped_x64(), progress.line(title), private.forgetting_callers():
        held.enter_context(_lock)
        # Nothing else would tell JAX which devices a program without inputs is for.
        place: dict[str, Any] = {}
        if placement.home is not None and not inputs:
            place["out_shardings"] = sharding or placement.home
        examples = jax.tree.map(abstract, list(inputs))
        traced = jax.jit(_named(function, name or title), donate_argnums=donate, **place).trace(*examples)
        memory.check(traced.jaxpr.jaxpr)  # before XLA, which ends the process where a size overflows
        options = options(traced) if callable(options) else dict(options or {})
        clock.lap("trace")
        lowered = traced.lower()
        clock.lap("lower")
        devices = devices or placement.devices() or (default_device(),)
        if background.is_background():
            held.close()  # a program that is needed now does not wait for one that can
        compiled = _load_or_compile(lowered, devices, donate, options)
        clock.lap("xla")
    # A load from disk is one of the compilations too; the counter "loaded from disk" says how many of them were.
    counters.count_compilation(clock.laps)
    call = private.fast_call(compiled)
    # Only on the CPU does XLA take over the inputs before it finds that there is no memory.
    if donate and platform() == "cpu":
        call = memory.sparing_inputs(call, compiled)
    shardings, unread = placement.results_of(compiled), _unread(traced.jaxpr.jaxpr)
    return Executable(call, lowered, compiled, clock.laps, shardings, unread)


def _unread(jaxpr: Jaxpr) -> frozenset[int]:
    read = {id(value) for equation in jaxpr.eqns for value in equation.invars} | set(map(id, jaxpr.outvars))
    return frozenset(index for index, value in enumerate(jaxpr.invars) if id(value) not in read)


def _load_or_compile(
    lowered: jax.stages.Lowered,
    devices: Sequence[jax.Device],
    donate: tuple[int, ...],
    options: dict[str, Any],
) -> jax.stages.Compiled:
    with _lock:
        compiled = executable_cache.load(lowered, devices, donate, options)
    if compiled is None:
        try:
            # XLA runs without the interpreter lock and, in the background, without ours.
            compiled = lowered.compile(compiler_options=options or None)
        except jax.errors.JaxRuntimeError as error:
            if memory.is_exhausted(error):
                raise memory.exhausted(error) from error
            raise
        with _lock:
            executable_cache.save(compiled, lowered, devices, donate, options)
    return compiled


def _named(function: Function, name: str) -> Function:
    """Return the function under a name that JAX gives to the program, and its profiler shows."""
    if not name:
        return function

    def call(*inputs: Any) -> Any:
        return function(*inputs)

    # XLA's names are letters, digits, dots and underscores.
    call.__name__ = re.sub(r"[^\w.]+", "_", name)
    return call


# Status codes of failures that have nothing to do with the program itself, and so may not happen again.
_TRANSIENT = ("UNAVAILABLE", "ABORTED", "CANCELLED", "DEADLINE_EXCEEDED", "INTERNAL", "UNKNOWN")


def may_pass(error: BaseException) -> bool:
    """Return whether compiling may succeed the next time, judged by XLA's status code."""
    return isinstance(error, jax.errors.JaxRuntimeError) and str(error).startswith(_TRANSIENT)


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
    """Return ``function`` with 64-bit types on: called on tracers of a user's transformation instead of compiled."""

    def call(*inputs: Any) -> Any:
        with scoped_x64():
            return function(*inputs)

    return call


@functools.cache
def default_device() -> jax.Device:
    """Return the JAX device tensors live on; the first call starts JAX's backend."""
    device = jax.local_devices()[0]
    gpu_alloc_gaps.leave(device)  # before the first array takes memory
    return device


def platform() -> str:
    """Return the platform of that device: cpu, gpu or tpu."""
    return str(default_device().platform)


def wait() -> None:
    """Wait for all that this thread has launched, results that were dropped included.

    A device runs programs in the order they were launched, so waiting for one more program waits for all.
    """
    forks.check()
    call, zero = _last_program()
    call(zero).block_until_ready()


@functools.cache
def _last_program() -> tuple[Function, Array]:
    """Return the program that ``wait`` launches after all others, and its argument."""
    place = placement.home or default_device()
    return jax.jit(lambda x: x + 1), jax.device_put(np.zeros((), np.float32), place)


_caches.register(
    "the program to wait for", 1, lambda: _last_program.cache_info().currsize, _last_program.cache_clear
)
