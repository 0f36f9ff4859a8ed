"""Errors show the user's lines: tracebacks without frames of ours, in each mode, unless a setting keeps them."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator

import pytest
import torch

import isthmus
from isthmus._runtime import tracebacks


@pytest.fixture(autouse=True)
def short() -> Iterator[None]:
    before, isthmus.config.tracebacks = isthmus.config.tracebacks, "short"
    yield
    isthmus.config.tracebacks = before


def _x() -> torch.Tensor:
    return torch.ones(2, 3, device="jax")


def _eager() -> None:
    _x() @ _x()


def _in_place() -> None:
    _x().add_(torch.ones(5, device="jax"))


def _index() -> None:
    _x()[torch.tensor([9], device="jax")]


def _lazy() -> None:
    with isthmus.lazy():
        _x() @ _x()


def _inner(x: torch.Tensor) -> float:
    return x.sum().item()


def _jit() -> None:
    isthmus.jit(_inner)(_x())


def _compiled() -> None:
    torch.compile(lambda x, at: x[at], backend="isthmus")(_x(), torch.tensor([9], device="jax"))


def _raised(function: Callable[[], None]) -> tuple[Exception, list[traceback.FrameSummary]]:
    try:
        function()
    except Exception as error:
        return error, traceback.extract_tb(error.__traceback__)
    raise AssertionError("it was to raise")


@pytest.mark.parametrize("function", [_eager, _in_place, _index, _lazy, _jit, _compiled])
def test_most_frames_are_the_users(function: Callable[[], None]) -> None:
    error, short = _raised(function)
    ours = [
        frame for frame in short if "/isthmus/" in frame.filename or frame.filename.startswith("<isthmus")
    ]
    # What Python itself adds on the way out: the entry of the op and who calls it.
    assert len(ours) <= 6
    assert function.__name__ in [frame.name for frame in short]
    assert tracebacks.NOTE in error.__notes__
    isthmus.config.tracebacks = "full"
    again, full = _raised(function)
    assert (type(again), str(again)) == (type(error), str(error))
    assert len(full) > len(short)
    assert not hasattr(again, "__notes__")


def test_lines_of_the_user_inside_of_ours_stay() -> None:
    _, frames = _raised(_jit)
    names = [frame.name for frame in frames]
    assert names.index("_jit") < names.index("_inner")
    assert frames[-1].name == "_inner"


def test_frames_that_ipython_hides_are_ours_alone() -> None:
    """IPython leaves out frames with this local; only its last frame is always shown."""
    try:
        _eager()
    except RuntimeError as error:
        frames = [
            (frame.f_code.co_filename, frame.f_locals) for frame, _ in traceback.walk_tb(error.__traceback__)
        ]
    hidden = [file for file, names in frames if "__tracebackhide__" in names]
    assert hidden
    assert all("/isthmus/" in file or file.startswith("<isthmus") for file in hidden)
    shown = [file for file, names in frames if "__tracebackhide__" not in names]
    assert all("/isthmus/" not in file for file in shown)


def test_a_chain_of_errors_is_shortened_and_ends() -> None:
    first, second = ValueError("first"), KeyError("second")
    first.__context__, second.__context__ = second, first  # a ring, as careless code can make it
    tracebacks.shorten(first)
    assert first.__context__ is second


def test_an_error_of_the_users_alone_has_no_note() -> None:
    def fails(x: torch.Tensor) -> None:
        raise ValueError("mine")

    error, frames = _raised(lambda: torch.library.custom_op and fails(_x()))
    assert not hasattr(error, "__notes__")
    assert frames[-1].name == "fails"
