"""Eager and lazy: ops run at once, or are recorded until somebody reads a value."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from threading import get_ident
from typing import TYPE_CHECKING, Any

from isthmus import config

if TYPE_CHECKING:
    from torch import Tensor

    from isthmus._graph.graph import Graph

__all__ = ["graph_of", "jit", "lazy", "mode", "set_mode", "sync"]


def mode() -> str:
    """Return ``"eager"`` or ``"lazy"``."""
    from isthmus._device.core.mode import current

    return "lazy" if current.lazy else "eager"


def set_mode(name: str) -> None:
    """Make this thread's ops on the device run at once (``"eager"``) or be recorded (``"lazy"``).

    Other threads keep their modes; ``ISTHMUS_MODE`` is the mode that every thread begins with.
    ``isthmus.config.mode = name`` does the same.
    """
    _switch(name, "set_mode()")


def _switch(name: str, why: str) -> None:
    """Set this thread's mode; ``why`` is the reason to run what was recorded, where that ends."""
    from isthmus._device.core.mode import current, reason
    from isthmus.errors import ConfigError

    if name not in ("eager", "lazy"):
        raise ConfigError(f"isthmus.set_mode({name!r}) is not a choice; choose from 'eager', 'lazy'")
    if name == "lazy" and current.recording_entry is None:
        current.recording_entry = _recording_entry
    leaving = current.lazy
    if name == "lazy" and not leaving:
        current.materialise()  # nothing is recorded, but settings that changed since are read
    current.lazy = name == "lazy"
    if name == "eager" and leaving:
        from isthmus._device.checks import value_checks

        with reason(why):
            sync()
        value_checks.raise_pending()


config.connect("mode", mode, set_mode)


def begin(name: str) -> None:
    """Make a mode that of every thread, until it sets another."""
    from isthmus._device.core.mode import current

    set_mode(name)
    current.default = name == "lazy"


@contextlib.contextmanager
def lazy() -> Iterator[None]:
    """Record ops inside this block; on leaving it, what was recorded and is still needed has run."""
    from isthmus._device.core.mode import current

    before = mode()
    try:
        try:
            set_mode("lazy")
            yield
        finally:
            _switch(before, "the end of a lazy block")
    finally:
        # An interrupt may strike before ``_switch`` has switched, and the thread must not go on recording.
        current.lazy = before == "lazy"


def sync(wait: bool = False) -> None:
    """Run what lazy mode has recorded; the call returns while the device computes unless it is to ``wait``."""
    from isthmus._device.core.mode import current, reason

    with reason("sync()"):
        current.materialise()
    if wait:
        import torch

        torch.jax.synchronize()  # type: ignore[attr-defined]


def graph_of(*tensors: Tensor) -> Graph:
    """Return what lazy mode has recorded for tensors that are not computed yet, without running it.

    ``print`` shows it, with lines of your code where ``isthmus.config.lines`` is ``"on"``; ``.dot()`` and ``.to_fx()``
    give it to others.
    """
    from isthmus._device.core.buffer import buffer_of
    from isthmus._graph.graph import Graph
    from isthmus._graph.nodes import Node
    from isthmus._lazy.trace import trace

    held = [buffer_of(tensor).held for tensor in tensors]
    nodes = [value for value in held if type(value) is Node]
    with trace.lock:
        trace.enter(get_ident())
        return replace(Graph.of(nodes), lines=dict(trace.lines))


def jit(
    function: Callable[..., Any] | None = None,
    *,
    donate: bool = True,
    static_argnames: str | Iterable[str] = (),
) -> Any:
    """Return ``function`` as one program: recorded at its first call, replayed without its Python afterwards.

    Tensors it reads become inputs and tensors it changes become outputs, whether they are arguments or belong to
    modules and optimizers, so a whole training step can be given: forward, backward, ``optimizer.step()``. It is
    recorded again when shapes, dtypes, layouts, other arguments, grad mode, a module's ``training`` flag or an
    optimizer's settings change. ``donate=False`` keeps the memory of what is replaced. Arguments that are
    not tensors are compared by value, containers item by item, those in ``static_argnames`` whole.
    Usable as a decorator.
    """
    if function is None:
        return lambda found: jit(found, donate=donate, static_argnames=static_argnames)
    _load()
    from isthmus._lazy.jit import Jitted

    return Jitted(function, donate, static_argnames)


def _load() -> None:
    """Load the recorder, and JAX with it."""
    from isthmus._device.torch_glue import registration

    registration.load()  # the lowerings come before what records them
    from isthmus._lazy import install

    install.install()


def _recording_entry(kernel: Any) -> Callable[..., Any]:
    """Load the recorder when the first op is recorded."""
    from isthmus._device.core.mode import current

    _load()
    return current.recording_entry(kernel)
