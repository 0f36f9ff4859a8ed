"""From a pure function to an executable: traced and compiled with 64-bit types on, whatever the user chose."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Sequence
from typing import Any

import jax

from isthmus._runtime import counters, private

Function = Callable[..., Any]
# XLA's compiler runs without the interpreter lock, so two threads may meet here; one compiles at a time.
_lock = threading.RLock()


def scoped_x64() -> Any:
    """Return the context in which int64 and float64 are real, for this thread and no longer."""
    return jax.enable_x64(True)


def abstract(value: Any) -> jax.ShapeDtypeStruct:
    """Return the shape and dtype of ``value``."""
    return jax.ShapeDtypeStruct(value.shape, value.dtype)


def compile(function: Function, inputs: Sequence[Any], donate: tuple[int, ...] = ()) -> Function:
    """Compile ``function`` for inputs of these shapes and return the cheapest way to call it."""
    with _lock, scoped_x64():
        jitted = jax.jit(function, donate_argnums=donate)
        compiled = jitted.lower(*[abstract(value) for value in inputs]).compile()
    counters.count("compilations")
    return private.fast_call(compiled)


def inline(function: Function) -> Function:
    """Return ``function`` to be called on tracers, with 64-bit types on."""

    def call(*inputs: Any) -> Any:
        with scoped_x64():
            return function(*inputs)

    return call


@functools.cache
def default_device() -> Any:
    """Return the JAX device tensors live on."""
    return jax.local_devices()[0]


def platform() -> str:
    """Return the platform of that device: cpu, gpu or tpu."""
    return str(default_device().platform)
