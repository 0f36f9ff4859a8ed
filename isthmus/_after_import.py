"""Functions that are called once a module has been imported, for changes to modules that nobody may import.

``call`` puts a finder in front of Python's own. It lets the others find a module that is waited for, and calls the
functions when that module has run, so a library that nobody imports costs a dictionary lookup for each import:

    _after_import.call("accelerate.state", change)     # change(module), now or when something imports it
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType

_waiting: dict[str, list[Callable[[ModuleType], None]]] = {}
"""What is to be called for modules that are not imported yet, by module."""


def call(name: str, function: Callable[[ModuleType], None]) -> None:
    """Call a function with a module when that has been imported: at once where it is."""
    module = sys.modules.get(name)
    # One that is still being imported, because it imported torch, is changed when it has run: never half of it.
    if module is not None and not getattr(module.__spec__, "_initializing", False):
        function(module)
        return
    _waiting.setdefault(name, []).append(function)
    if _Finder not in sys.meta_path:
        sys.meta_path.insert(0, _Finder)


class _Finder:
    """The first of ``sys.meta_path``: lets the others find a module, and has functions called when it has run."""

    @staticmethod
    def find_spec(
        name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name not in _waiting:
            return None
        for finder in sys.meta_path:
            find = None if finder is _Finder else getattr(finder, "find_spec", None)
            spec = find(name, path, target) if find is not None else None
            if spec is not None:
                _call_after(spec)
                return spec
        return None


def _call_after(spec: ModuleSpec) -> None:
    """Have functions called when the loader of a module has run it; the loader stays the object it is."""
    loader = spec.loader
    theirs = getattr(loader, "exec_module", None)
    if theirs is None:
        return

    def exec_module(module: ModuleType) -> None:
        theirs(module)
        for function in _waiting.pop(module.__name__, ()):
            function(module)

    loader.exec_module = exec_module  # type: ignore[union-attr, method-assign]
