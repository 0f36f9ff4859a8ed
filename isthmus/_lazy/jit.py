"""``isthmus.jit``: a function recorded once and replayed as one program, Python left out."""

from __future__ import annotations

import functools
import inspect
import warnings
from collections import OrderedDict
from collections.abc import Callable, Iterable
from threading import get_ident
from types import MethodType
from typing import Any

import torch
from torch import Tensor

from isthmus._device.core import mode
from isthmus._device.core.entry import static_part
from isthmus._device.torch_glue.pytree import tree_flatten
from isthmus._graph.private import address_of, storage_of
from isthmus._lazy.capture import REASON, Capture
from isthmus._lazy.captured_objects import Roots
from isthmus._lazy.trace import trace
from isthmus._runtime import placement
from isthmus.errors import JitError

_KEYS = 64
_STATES = 32
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
        # For each set of arguments, the recordings for the states that were met, the last one first.
        self.captures: OrderedDict[Any, list[Capture]] = OrderedDict()
        self.in_vain = 0

    def __get__(self, instance: Any, owner: Any = None) -> Any:
        """Return the function as a method of an object."""
        return self if instance is None else MethodType(self, instance)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Replay the function for these arguments, or record it."""
        if mode.current.capture is not None:
            return self.function(*args, **kwargs)  # inside another: part of its recording
        with trace.lock:
            trace.enter(get_ident())
            if mode.current.lazy:
                with mode.reason(REASON):
                    mode.current.materialise()
            flat, keyed, spec, static = self._flatten(args, kwargs)
            key = (spec, static, *[_argument_key(value) for value in keyed], _aliases(flat), _torch_state())
            roots = Roots(self.function, [v for v in flat if not isinstance(v, Tensor)])
            captures = self.captures.setdefault(key, [])
            for place, found in enumerate(captures):
                if found.holds(roots, flat):
                    if place:
                        captures.insert(0, captures.pop(place))
                    return found.run(flat)
            return self._record(captures, roots, args, kwargs)

    def _flatten(self, args: Any, kwargs: Any) -> tuple[list[Any], list[Any], Any, Any]:
        """Return all leaves of the arguments, those that are not static with how they are held, and the static ones."""
        if not kwargs and not self.static and all([type(arg) is Tensor for arg in args]):
            return list(args), list(args), len(args), ()  # as below, with nothing to look into
        flat, _ = tree_flatten((args, kwargs))
        varying, static = self._apart(args, kwargs)
        return flat, *tree_flatten(varying), static

    def _apart(self, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """Return the arguments that are looked into, and the static ones, which are compared whole."""
        if self.signature is None:
            return (args, kwargs), ()
        given = self.signature.bind(*args, **kwargs).arguments
        static = {name: value for name, value in given.items() if name in self.static}
        if any(isinstance(leaf, Tensor) for leaf in tree_flatten(static)[0]):
            raise JitError("isthmus.jit: a static argument holds tensors, which vary")
        parts = tuple((name, _argument_key(value)) for name, value in static.items())
        return {name: value for name, value in given.items() if name not in self.static}, parts

    def _record(self, captures: list[Capture], roots: Roots, args: Any, kwargs: Any) -> Any:
        capture = Capture(roots, self.donate)
        try:
            return capture.record(self.function, args, kwargs)
        finally:
            self._note(capture, captures)

    def _note(self, capture: Capture, captures: list[Capture]) -> None:
        """Keep a recording that can be replayed; warn where none can."""
        while len(self.captures) > _KEYS:
            self.captures.popitem(last=False)
        if capture.complete and capture.replayable:
            captures.insert(0, capture)
            del captures[_STATES:]
            self.in_vain = 0
        elif capture.complete:
            self.in_vain += 1
            if self.in_vain == _TRIES:
                name = getattr(self.function, "__qualname__", repr(self.function))
                message = f"isthmus.jit records {name} at every call: {capture.reason}"
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
    layout = (value.device, value.dtype, value.shape, value.stride())
    if value.device.type != "jax":
        return (*layout, value.requires_grad)  # its elements are moved in, wherever its storage has them
    leaf = value.requires_grad and value.is_leaf
    bits = (value.requires_grad, leaf, leaf and value.grad is None, value.is_conj(), value.is_neg())
    return (*layout, value.storage_offset(), *bits, value.untyped_storage()._buffer.signature)  # type: ignore[attr-defined]


def _aliases(flat: list[Any]) -> tuple[int, ...]:
    """Return, for each tensor argument, the first that shares its storage."""
    first: dict[int, int] = {}
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
