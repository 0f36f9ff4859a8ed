"""``isthmus.jit``: a function is recorded once and replayed as one program, without its Python.

``Jitted`` is what ``isthmus.jit(function)`` returns. A call looks for a recording in two steps::

    key      structure and layouts of the arguments, static values, which share memory, torch's modes  -> a list
    guard    what the function reaches besides (``guards.py``), values it has read (``value_guards.py``)  -> one of it

and replays it (``replay.py``), or records the function (``capture.py``). The recording that held last is tried first.

Called inside another recording, a jitted function is a plain one; in lazy mode what was recorded before it runs first.

What can go wrong: a function whose recordings can never be replayed, because it makes a tensor that it keeps, say, runs
as in lazy mode; after ``_TRIES`` such calls in a row a ``JitWarning`` says why. Arguments that are neither tensors nor
hashable cannot be told apart and raise ``JitError``.
"""

from __future__ import annotations

import functools
import inspect
import warnings
from collections.abc import Callable, Iterable
from functools import partial
from threading import get_ident
from types import MethodType
from typing import Any

import torch
from torch import Tensor

from isthmus._caches import LruCache
from isthmus._device.core import mode
from isthmus._device.core.buffer import buffer_of
from isthmus._device.core.entry import static_part
from isthmus._device.torch_glue.pytree import tree_flatten
from isthmus._graph.private import address_of, storage_of
from isthmus._lazy import programs
from isthmus._lazy.capture import REASON, Capture
from isthmus._lazy.captured_objects import Roots
from isthmus._lazy.replay import Replay
from isthmus._lazy.trace import trace
from isthmus._runtime import placement, tracebacks, watching
from isthmus.errors import JitError

# Sets of arguments whose recordings are kept; and, of arguments that differ in sizes alone, sets of sizes whose
# recordings share programs for ranges of sizes.
_KEYS, _SIZES = 64, 1024
# Recordings of one set of arguments for different states of what the function reaches: before the first step an
# optimizer has no moments.
_STATES = 32
# As many recordings in a row that could not be replayed before the user is warned.
_TRIES = 5


class JitWarning(UserWarning):
    """A function given to ``isthmus.jit`` is recorded again at every call."""


class Jitted:
    """A function whose calls are replayed; see ``isthmus.jit``."""

    def __init__(
        self, function: Callable[..., Any], donate: bool, static_argnames: str | Iterable[str]
    ) -> None:
        functools.update_wrapper(self, function)
        self.function, self.donate = function, donate
        self.static = {static_argnames} if isinstance(static_argnames, str) else set(static_argnames)
        self.signature = inspect.signature(function) if self.static else None
        unknown = self.static - set(self.signature.parameters if self.signature else ())
        if unknown:
            raise JitError(f"isthmus.jit: {function} has no argument {', '.join(sorted(unknown))}")
        self.name = getattr(function, "__qualname__", repr(function))
        # For each set of arguments, the recordings for the states that were met, the last one first.
        self.captures: LruCache[Any, list[Replay]] = LruCache("recordings of jitted functions", _KEYS)
        # Those that run programs for ranges of sizes: by the arguments without their sizes, then by all of the key.
        self.ranged: LruCache[Any, LruCache[Any, list[Replay]]] = LruCache(
            "functions jitted for ranges of sizes", _KEYS
        )
        self.failed_records = 0

    def __get__(self, instance: Any, owner: Any = None) -> Any:
        """Return the function as a method of an object."""
        return self if instance is None else MethodType(self, instance)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Replay the function for these arguments, or record it."""
        try:
            return self._call(args, kwargs)
        except Exception as error:
            __tracebackhide__ = True  # for IPython and pytest
            tracebacks.shorten(error)
            raise

    def _call(self, args: Any, kwargs: Any) -> Any:
        if mode.current.capture is not None:
            return self.function(*args, **kwargs)  # inside another: part of its recording
        # One thread records or replays at a time: a trace is shared.
        with trace.lock:
            trace.enter(get_ident())
            # What was recorded before belongs before the function, and would otherwise become part of its
            # program.
            if mode.current.lazy:
                with mode.reason(REASON):
                    mode.current.materialise()
            flat, keyed, spec, static = self._flatten(args, kwargs)
            # Everything that decides which ops the function calls, apart from what it reaches.
            key = (spec, static, *[_argument_key(value) for value in keyed], _aliases(flat), _torch_state())
            roots = Roots(self.function, [v for v in flat if not isinstance(v, Tensor)])
            captures = self.captures.get(key)
            kind = None
            if captures is None:
                kind = (*key[:2], *[_argument_kind(value) for value in keyed], *key[-2:])
                sizes = self.ranged.get(kind)
                captures = (sizes.get(key) if sizes is not None else None) or []
            for place, replay in enumerate(captures):
                if replay.holds(roots, flat):
                    if place:
                        # The recording that held goes first, so a training loop tests one guard per call.
                        captures.insert(0, captures.pop(place))
                    if watching.watchers:
                        return watching.run("isthmus.jit", self.name, partial(replay.run, flat))
                    return replay.run(flat)
            try:
                return self._record(captures, roots, args, kwargs)
            finally:
                self._keep(key, kind, captures)

    def _keep(self, key: Any, kind: Any, captures: list[Replay]) -> None:
        """Keep the recordings of a key; ``kind`` is the key without sizes, None where they are kept already."""
        if kind is None or not captures:
            return
        if not captures[0].is_ranged:
            self.captures[key] = captures
            return
        sizes = self.ranged.get(kind)
        if sizes is None:
            sizes = self.ranged[kind] = LruCache("recordings of sizes", _SIZES)
        sizes[key] = captures

    def _flatten(self, args: Any, kwargs: Any) -> tuple[list[Any], list[Any], Any, Any]:
        """Return all leaves of the arguments, those that are not static with how they are held, and the static ones."""
        # Most calls pass tensors alone: then the arguments are the leaves, and their number is the structure.
        if not kwargs and not self.static and all([type(arg) is Tensor for arg in args]):
            return list(args), list(args), len(args), ()  # as below, with nothing to look into
        flat, _ = tree_flatten((args, kwargs))
        varying, static = self._apart(args, kwargs)
        # All leaves for the replay; those of the arguments that are looked into for the key.
        return flat, *tree_flatten(varying), static

    def _apart(self, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """Return the arguments that are looked into, and the static ones, which are compared whole."""
        if self.signature is None:
            return (args, kwargs), ()
        bound = self.signature.bind(*args, **kwargs).arguments
        static = {name: value for name, value in bound.items() if name in self.static}
        # Static arguments are compared by value, tensors are not: such a key would hold for ever or never.
        if any(isinstance(leaf, Tensor) for leaf in tree_flatten(static)[0]):
            raise JitError("isthmus.jit: a static argument holds tensors, which vary")
        parts = tuple((name, _argument_key(value)) for name, value in static.items())
        return {name: value for name, value in bound.items() if name not in self.static}, parts

    def _record(self, captures: list[Replay], roots: Roots, args: Any, kwargs: Any) -> Any:
        with mode.reason(REASON):
            programs.materialise()
        capture = Capture(roots, self.donate, tree_flatten((args, kwargs))[0])
        try:
            if watching.watchers:
                call = partial(capture.record, self.function, args, kwargs)
                return watching.run("isthmus.jit", f"{self.name} (recorded)", call)
            return capture.record(self.function, args, kwargs)
        finally:
            self._note(capture, captures)

    def _note(self, capture: Capture, captures: list[Replay]) -> None:
        """Keep a recording that can be replayed; warn where none can."""
        if capture.complete and capture.replayable and capture.replay is not None:
            captures.insert(0, capture.replay)
            del captures[_STATES:]
            self.failed_records = 0
        elif capture.complete:
            # Only complete ones count: a function that raised was not recorded in vain.
            self.failed_records += 1
            if self.failed_records == _TRIES:
                message = f"isthmus.jit records {self.name} at every call: {capture.reason}"
                warnings.warn(message, JitWarning, stacklevel=4)


def _argument_key(value: Any) -> Any:
    if not isinstance(value, Tensor):
        part = static_part(value)
        try:
            hash(part)
        except TypeError:
            raise JitError(
                f"isthmus.jit: an argument of type {type(value).__name__} is neither a tensor nor hashable, so its "
                f"calls cannot be told apart"
            ) from None
        return (type(value), part)
    if value.layout is not torch.strided:
        buffer_of(value)  # which says why it cannot be
    layout = (value.device, value.dtype, value.shape, value.stride())
    if value.device.type != "jax":
        return (*layout, value.requires_grad)  # its elements are moved in, wherever its storage has them
    # A leaf without a gradient is another case from one that has it; see ``Guard.empty``.
    leaf = value.requires_grad and value.is_leaf
    bits = (value.requires_grad, leaf, leaf and value.grad is None, value.is_conj(), value.is_neg())
    return (*layout, value.storage_offset(), *bits, value.untyped_storage()._buffer.signature)  # type: ignore[attr-defined]


def _argument_kind(value: Any) -> Any:
    """Return the key of an argument without its sizes."""
    if not isinstance(value, Tensor):
        return _argument_key(value)
    return (value.device, value.dtype, value.ndim, value.requires_grad, value.is_leaf)


def _aliases(flat: list[Any]) -> tuple[int, ...]:
    """Return, for each tensor argument, the first that shares its storage."""
    first: dict[int, int] = {}
    # Negative numbers for what is no tensor: they are never equal to an address.
    storages = [address_of(storage_of(v)) if isinstance(v, Tensor) else -n for n, v in enumerate(flat)]
    return tuple([first.setdefault(storage, n) for n, storage in enumerate(storages)])


def _torch_state() -> tuple[Any, ...]:
    """Return what else decides which ops a function runs."""
    return (
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        torch.get_default_dtype(),
        torch.get_default_device(),
        torch.get_float32_matmul_precision(),
        torch.is_autocast_enabled("jax"),
        torch.get_autocast_dtype("jax"),
        placement.home,
    )
