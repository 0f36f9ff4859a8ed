"""The backends that run recorded graphs, by name; XLA, which is the default, is not one of these."""

from __future__ import annotations

from isthmus._graph.graph import Backend
from isthmus._graph.reference import Reference
from isthmus.errors import ConfigError

RESERVED = "xla"
_backends: dict[str, Backend] = {"reference": Reference()}


def register_backend(name: str, backend: Backend) -> None:
    """Let ``isthmus.config.backend = name`` run the graphs of lazy mode and ``isthmus.jit`` with this backend.

    Arguments:
        name: any name but "xla", which is Isthmus's own.
        backend: an object with a method ``compile(graph)``. It returns a function that is called with a value for
            each of the graph's inputs, as CPU tensors and Python numbers, and returns a CPU tensor for each output.

    Example:
        >>> import torch, isthmus
        >>> from isthmus._graph.reference import Reference
        >>> class Printing:                      # docs/bring-up-a-backend.md writes a whole one
        ...     def compile(self, graph):
        ...         print("compiling", len(graph.nodes), "nodes")
        ...         return Reference().compile(graph)
        >>> isthmus.register_backend("printing", Printing())
        >>> isthmus.config.backend = "printing"
        >>> with isthmus.lazy():
        ...     y = torch.ones(2, device="jax").neg().abs()
        ...     print(y.tolist())
        compiling 3 nodes
        [1.0, 1.0]
        >>> isthmus.config.backend = "xla"
    """
    if name == RESERVED:
        raise ConfigError(f"{name!r} is the name of Isthmus's own backend; choose another")
    if not callable(getattr(backend, "compile", None)):
        raise ConfigError(f"the backend {name!r} has no method compile(graph)")
    _backends[name] = backend


def backend_named(name: str) -> Backend:
    """Return a backend that was registered."""
    if name not in _backends:
        known = ", ".join(repr(n) for n in [RESERVED, *_backends])
        raise ConfigError(f"there is no backend {name!r}; choose from {known}, or register it")
    return _backends[name]
