"""Docstrings of the public API: each has arguments, a returned value and an example, and the examples run."""

from __future__ import annotations

import doctest
import inspect
import re
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest

import isthmus
from isthmus import _caches
from isthmus._runtime import user_frames

INTERNAL = {"_caches.LruCache": _caches.LruCache, "user_frames.Place": user_frames.Place}
"""Classes of ours whose docstrings have examples too."""


def public() -> Iterator[tuple[str, Any]]:
    """Yield every public function, class and module by its name; of a module, the names in its ``__all__`` too."""
    yield "isthmus", isthmus
    for name in isthmus.__all__:
        thing = getattr(isthmus, name)
        yield name, thing
        if isinstance(thing, ModuleType):
            names = getattr(thing, "__all__", ["Optimizer"] if name == "optax" else [])
            yield from ((f"{name}.{each}", getattr(thing, each)) for each in names)


PUBLIC = dict(public())


def test_every_public_name_is_here() -> None:
    assert {name for name in PUBLIC if "." not in name} == {"isthmus", *isthmus.__all__}
    assert {"metrics.report", "checkpoint.save", "optax.Optimizer"} <= PUBLIC.keys()


@pytest.mark.parametrize("name", PUBLIC)
def test_arguments_result_and_example_are_documented(name: str) -> None:
    thing = PUBLIC[name]
    text = inspect.getdoc(thing) or ""
    if isinstance(thing, ModuleType):
        assert text
        return
    signature = inspect.signature(thing)
    expected = ["Arguments:"] if signature.parameters else []
    expected += ["Returns:"] if signature.return_annotation != "None" or isinstance(thing, type) else []
    heads = [line for line in text.splitlines() if line in ("Arguments:", "Returns:", "Example:")]
    assert heads == [*expected, "Example:"]
    assert ">>> " in text.partition("Example:")[2]
    described = re.findall(
        r"^    (\w+): ", text.partition("Arguments:")[2].partition("\n\n")[0], re.MULTILINE
    )
    assert described == list(signature.parameters)


@pytest.mark.parametrize("name", [*PUBLIC, *INTERNAL])
def test_examples_run(name: str) -> None:
    thing = {**PUBLIC, **INTERNAL}[name]
    text = inspect.getdoc(thing) or ""
    scope = {"Place": user_frames.Place, "LruCache": _caches.LruCache}
    example = doctest.DocTestParser().get_doctest(text, scope, name, None, None)
    output: list[str] = []
    # Dynamo's guards hold on to the globals of functions it compiled, so they are not cleared.
    doctest.DocTestRunner().run(example, out=output.append, clear_globs=False)
    assert not output, "".join(output)
