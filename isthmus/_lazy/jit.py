"""``isthmus.jit``: a function recorded once and replayed as one program, Python left out."""

from __future__ import annotations

import functools
import inspect
import warnings
from collections import OrderedDict
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten

from isthmus._device import mode
from isthmus._device.entry import static_part
from isthmus._lazy.capture import Capture
from isthmus._lazy.roots import Roots
from isthmus.errors import JitError

_KEPT = 64
_TRIES = 5


class JitWarning(UserWarning):
    """A function given to ``isthmus.jit`` is recorded again at every call."""


class Jitted:
    """A function whose calls are replayed; see ``isthmus.jit``."""

    def __init__(self, function: Callable[..., Any], donate: bool, static_argnames: Iterable[str]) -> None:
        functools.update_wrapper(self, function)
        self.function, self.donate = function, donate
        self.static = frozenset(static_argnames)
        self.signature = inspect.signature(function) if self.static else None
        unknown = self.static - set(self.signature.parameters if self.signature else ())
        if unknown:
            raise JitError(f"isthmus.jit: {function} has no argument {', '.join(sorted(unknown))}")
        self.roots = Roots()
        self.roots.add_function(function)
        self.captures: OrderedDict[Any, Capture] = OrderedDict()
        self.in_vain = 0

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Replay the function for these arguments, or record it."""
        if mode.current.lazy:
            if mode.current.capture is not None:
                return self.function(*args, **kwargs)  # inside another: part of its recording
            mode.current.materialise()
        flat, spec = tree_flatten((args, kwargs))
        key = (spec, *[_argument_key(value) for value in flat], _aliases(flat), _torch_state())
        found = self.captures.get(key)
        if found is not None and found.holds(flat):
            self.captures.move_to_end(key)
            return found.run(flat)
        return self._record(key, flat, args, kwargs)

    def _record(self, key: Any, flat: list[Any], args: Any, kwargs: Any) -> Any:
        for value in flat:
            if not isinstance(value, Tensor):
                self.roots.add(value)
        capture = Capture(self.roots, self.donate)
        result = capture.record(self.function, args, kwargs)
        self.captures.pop(key, None)
        if capture.replayable:
            self.captures[key] = capture
            while len(self.captures) > _KEPT:
                self.captures.popitem(last=False)
            self.in_vain = 0
        else:
            self.in_vain += 1
            if self.in_vain == _TRIES:
                name = getattr(self.function, "__qualname__", repr(self.function))
                warnings.warn(
                    f"isthmus.jit records {name} at every call: {capture.reason}", JitWarning, stacklevel=3
                )
        return result


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
    layout = (
        value.device,
        value.dtype,
        value.shape,
        value.stride(),
        value.storage_offset(),
        value.requires_grad,
    )
    if value.device.type != "jax":
        return layout
    return (*layout, value.untyped_storage()._buffer.signature)  # type: ignore[attr-defined]


def _aliases(flat: list[Any]) -> tuple[int, ...]:
    """Return, for each tensor argument, the first that shares its storage."""
    first: dict[int, int] = {}
    storages = [v.untyped_storage()._cdata if isinstance(v, Tensor) else -n for n, v in enumerate(flat)]
    return tuple([first.setdefault(storage, n) for n, storage in enumerate(storages)])


def _torch_state() -> tuple[Any, ...]:
    """Return what else decides which ops a function runs."""
    return (
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        torch.get_default_dtype(),
        torch.get_float32_matmul_precision(),
        torch.is_autocast_enabled("jax"),
        torch.get_autocast_dtype("jax"),
    )
