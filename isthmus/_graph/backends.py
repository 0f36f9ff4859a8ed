"""The backends that run recorded graphs, by name; XLA, which is the default, is not one of these."""

from __future__ import annotations

from isthmus._graph.graph import Backend
from isthmus._graph.reference import Reference
from isthmus.errors import ConfigError

RESERVED = "xla"
_backends: dict[str, Backend] = {"reference": Reference()}


def register_backend(name: str, backend: Backend) -> None:
    """Let ``isthmus.config.backend = name`` run recorded graphs with this backend."""
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
