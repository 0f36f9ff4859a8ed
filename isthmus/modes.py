"""Eager and lazy mode, ``isthmus.jit``: the public names, without JAX until the first op is recorded.

In eager mode an op runs when it is called. In lazy mode (``_lazy/``) it is recorded, and the recorded graph runs as one
program when a value is read. A mode belongs to a thread. ``isthmus/config.py`` reads and assigns the setting ``mode``
through the functions here::

    with isthmus.lazy():            # mode.current.lazy is True for this thread
        loss = step(batch)          # nodes of a graph
        isthmus.sync()              # one program

The device (``_device/core/mode.py``) has stubs in the places where lazy mode belongs; the first use of one loads
``_lazy/`` and puts the real functions there (``_lazy/install.py``).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from threading import get_ident
from typing import TYPE_CHECKING, Any

from isthmus import _settings, config
from isthmus.errors import ConfigError

if TYPE_CHECKING:
    from torch import Tensor

    from isthmus._graph.graph import Graph

__all__ = ["graph_of", "jit", "lazy", "mode", "set_mode", "sync"]


def mode() -> str:
    """Return the mode of this thread.

    Returns:
        ``"eager"`` or ``"lazy"``.

    Example:
        >>> import isthmus
        >>> isthmus.mode()
        'eager'
    """
    from isthmus._device.core.mode import current

    return "lazy" if current.lazy else "eager"


def set_mode(name: str) -> None:
    """Make this thread's ops on the device run at once (``"eager"``) or be recorded (``"lazy"``).

    Other threads keep their modes; ``ISTHMUS_MODE`` is the mode that every thread begins with.
    ``isthmus.config.mode = name`` does the same. On a change to eager, what was recorded runs.

    Arguments:
        name: ``"eager"`` or ``"lazy"``.

    Example:
        >>> import torch, isthmus
        >>> isthmus.set_mode("lazy")
        >>> y = torch.ones(3, device="jax") * 2   # recorded
        >>> isthmus.set_mode("eager")             # runs it
        >>> y.tolist()
        [2.0, 2.0, 2.0]
    """
    _switch(name, "set_mode()")


def _switch(name: str, why: str) -> None:
    """Set this thread's mode; ``why`` is the reason to run what was recorded, where that ends."""
    from isthmus._device.core.mode import current, reason

    wrong = _settings.fault(config.Settings.__dataclass_fields__["mode"], name)
    if wrong:
        raise ConfigError(f"isthmus.set_mode({name!r}) {wrong}")
    if name == "lazy" and current.recording_entry is None:
        current.recording_entry = _recording_entry
    leaving = current.lazy
    if name == "lazy" and not leaving:
        current.materialise()  # nothing is recorded; it reads settings that changed since
    current.lazy = name == "lazy"
    if name == "eager" and leaving:
        from isthmus._device.checks import value_checks

        with reason(why):
            sync()
        value_checks.raise_pending()


config.connect("mode", mode, set_mode)


def begin(name: str) -> None:
    """Make a mode that of every thread, until the thread sets another."""
    from isthmus._device.core.mode import current

    set_mode(name)
    current.default = name == "lazy"


@contextlib.contextmanager
def lazy() -> Iterator[None]:
    """Record the ops of a block instead of running them one by one.

    A value that is read inside (``.item()``, ``.cpu()``, ``print``) runs what was recorded as one program. On leaving
    the block, what was recorded and is still needed has run.

    Returns:
        A context manager.

    Example:
        >>> import torch, isthmus
        >>> with isthmus.lazy():
        ...     y = torch.arange(3.0, device="jax")
        ...     for _ in range(3):
        ...         y = y * 2 + 1
        >>> y.tolist()
        [7.0, 15.0, 23.0]
    """
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
    """Run what lazy mode has recorded on this thread.

    Arguments:
        wait: whether to return only when the device has computed it; else the call returns at once.

    Example:
        >>> import torch, isthmus
        >>> with isthmus.lazy():
        ...     y = torch.ones(3, device="jax") + 1
        ...     isthmus.sync(wait=True)
    """
    from isthmus._device.core.mode import current, reason

    with reason("sync()"):
        current.materialise()
    if wait:
        import torch

        torch.jax.synchronize()  # type: ignore[attr-defined]


def graph_of(*tensors: Tensor) -> Graph:
    """Return the graph that lazy mode has recorded for tensors that are not computed yet, without running it.

    Arguments:
        tensors: tensors on "jax"; those that are computed add nothing to the graph.

    Returns:
        A ``Graph``. ``print`` shows it, with lines of your code where ``isthmus.config.lines`` is ``"on"``; ``.dot()``
        is for Graphviz and ``.to_fx()`` returns a ``torch.fx.GraphModule``.

    Example:
        >>> import torch, isthmus
        >>> with isthmus.lazy():
        ...     y = torch.ones(3, device="jax").sin()
        ...     graph = isthmus.graph_of(y)
        >>> [str(node.call.op) for node in graph.nodes if "sin" in str(node.call)]
        ['aten.sin.default']
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
    """Compile a function into one program: recorded at its first call, replayed without its Python afterwards.

    Tensors it reads become inputs and tensors it changes become outputs, whether they are arguments or belong to
    modules and optimizers, so the function may be a whole training step: forward, backward, ``optimizer.step()``. It is
    recorded again when shapes, dtypes, layouts, other arguments, grad mode, a module's ``training`` flag or an
    optimizer's settings change.

    Arguments:
        function: the function; without one, ``jit`` returns a decorator.
        donate: whether a tensor that is replaced gives its memory to its new value.
        static_argnames: names of arguments that are compared as a whole, by ``==``. Other arguments that are not
            tensors are compared by value too, containers item by item.

    Returns:
        A function of the same arguments. ``isthmus.errors.JitError`` is raised by its first call where the function
        does what cannot be replayed, such as reading a value.

    Example:
        >>> import torch, isthmus
        >>> weight = torch.ones(3, device="jax")
        >>> @isthmus.jit
        ... def step(x, rate):
        ...     weight.sub_(rate * x)
        ...     return weight.sum()
        >>> x = torch.tensor([1.0, 2.0, 3.0], device="jax")
        >>> step(x, 0.5).item(), step(x, 0.5).item()
        (0.0, -3.0)
    """
    if function is None:
        return lambda decorated: jit(decorated, donate=donate, static_argnames=static_argnames)
    if not callable(function):
        raise TypeError(f"isthmus.jit takes a function or a module, not {type(function).__name__}")
    _load()
    from isthmus._lazy.jit import Jitted

    return Jitted(function, donate, static_argnames)


def _load() -> None:
    """Load the recorder, and JAX with it."""
    from isthmus._device.torch_glue import registration

    registration.load()  # the lowerings come before what records them
    from isthmus._lazy import install

    install.install()


def _finisher(*call: Any) -> Any:
    """Load the recorder when the first op is run with sizes that may change."""
    from isthmus._device.core.mode import current

    _load()
    return current.finisher(*call)


def _recording_entry(kernel: Any) -> Callable[..., Any]:
    """Load the recorder when the first op is recorded."""
    from isthmus._device.core.mode import current

    _load()
    return current.recording_entry(kernel)


def _connect() -> None:
    """Let the device find what sits above it."""
    from isthmus._device.core.mode import current

    current.finisher = _finisher


_connect()
