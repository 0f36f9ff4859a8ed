"""sentence-transformers: ``SentenceTransformer(...)`` without a device takes this one, where it would take the CPU."""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import ModuleType

from isthmus.integrations import offered


def device_name(module: ModuleType) -> None:
    """Let the search for a device end with "jax" in place of "cpu"."""
    theirs: Callable[[], str] = module.get_device_name

    @functools.wraps(theirs)
    def get_device_name() -> str:
        name = theirs()
        return "jax" if name == "cpu" and offered() else name

    module.get_device_name = get_device_name  # type: ignore[attr-defined]


def takes() -> str:
    """Return the type of the device that a model without one is put on."""
    from sentence_transformers.util import get_device_name

    return str(get_device_name())
