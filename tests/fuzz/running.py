"""Runs a program on the CPU and on the device, says where they differ, and leaves out what that does not need."""

from __future__ import annotations

import contextlib
import math
import warnings
from collections.abc import Callable
from typing import Any

import torch

import isthmus
from tests.fuzz.programs import PRELUDE, execute, namespace, tensors

Names = dict[str, Any]
MODES = ("eager", "lazy", "reference", "jit", "compiled")


def difference(lines: list[str], mode: str) -> str | None:
    """Return what differs between the CPU and the device in this mode; None if nothing does."""
    if mode in ("jit", "compiled"):
        return _whole(lines, mode)
    return _line_by_line(lines, mode)


def _line_by_line(lines: list[str], mode: str) -> str | None:
    ours, theirs = namespace("jax"), namespace("cpu")
    with _recording(mode):
        for line in lines:
            want, got = execute(line, theirs), execute(line, ours)
            if NameError in (want, got):
                return None  # made smaller too far
            if want is not None and (got is None or not issubclass(got, want)):
                return f"{line}: the CPU raises {want.__name__}, the device {got.__name__ if got else 'does not'}"
            if want is None and got is not None:
                return f"{line}: the device raises {got.__name__}, the CPU does not"
        return compare(theirs, ours, lines)


@contextlib.contextmanager
def _recording(mode: str) -> Any:
    if mode == "eager":
        yield
        return
    isthmus.config.backend = "reference" if mode == "reference" else "xla"
    try:
        with isthmus.lazy():
            yield
    finally:
        isthmus.config.backend = "xla"


def compare(theirs: Names, ours: Names, lines: list[str], versions: bool = True) -> str | None:
    """Return the first difference between what two runs left behind."""
    wanted, got = tensors(theirs), tensors(ours)
    # Whether autograd adds gradients in place, which counts as a write, depends on who else holds their memory.
    gradients = {line.split(" = ")[0] for line in lines if ".grad" in line}
    storages = {got[name].untyped_storage()._cdata for name in gradients if name in got}
    for name, want in wanted.items():
        counted = versions and got[name].untyped_storage()._cdata not in storages
        if counted and got[name]._version != want._version:
            return f"{name}._version is {got[name]._version}, on the CPU {want._version}"
        found = _tensors_differ(want, got[name], name, ours["dev"])
        if found is not None:
            return found
    for name, value in theirs.items():
        if name[0] == "r" and name[1:].isdigit() and not _same(value, ours[name]):
            return f"{name} is {ours[name]}, on the CPU {value}"
    if _sharing(wanted) != _sharing(got):
        return f"tensors share memory as {_sharing(got)}, on the CPU as {_sharing(wanted)}"
    return None


def _same(want: Any, got: Any) -> bool:
    if isinstance(want, (list, tuple)):
        return len(want) == len(got) and all(_same(a, b) for a, b in zip(want, got, strict=True))
    if isinstance(want, float) and math.isnan(want):
        return isinstance(got, float) and math.isnan(got)
    return type(want) is type(got) and bool(want == got)


def _sharing(found: dict[str, torch.Tensor]) -> list[list[str]]:
    groups: dict[int, list[str]] = {}
    for name, x in found.items():
        groups.setdefault(x.untyped_storage()._cdata, []).append(name)
    return [names for names in groups.values() if len(names) > 1]


def _tensors_differ(want: torch.Tensor, got: torch.Tensor, name: str, on: str) -> str | None:
    for part in ("dtype", "shape", "requires_grad", "is_leaf"):
        if getattr(got, part) != getattr(want, part):
            return f"{name}.{part} is {getattr(got, part)}, on the CPU {getattr(want, part)}"
    device = "cpu" if name.startswith("c") else on
    if got.device.type != device:
        return f"{name} is on {got.device}"
    found = _layouts_differ(want, got, name) or _values_differ(want, got, name)
    if found is not None or not want.is_leaf:
        return found
    if (want.grad is None) != (got.grad is None):
        return f"{name}.grad is {got.grad}, on the CPU {want.grad}"
    return None if want.grad is None else _values_differ(want.grad, got.grad, f"{name}.grad")


def _layouts_differ(want: torch.Tensor, got: torch.Tensor, name: str) -> str | None:
    if not want.numel():
        return None  # strides that say nothing: torch itself chooses them differently on the CPU and on Meta
    if _strides(got) != _strides(want):
        return f"{name}.stride() is {got.stride()}, on the CPU {want.stride()}"
    if got.storage_offset() != want.storage_offset():
        return f"{name}.storage_offset() is {got.storage_offset()}, on the CPU {want.storage_offset()}"
    return None


def _strides(x: torch.Tensor) -> list[int]:
    """Return the strides that say something: those of dims of length one differ on Meta and on the CPU, too."""
    return [s for n, s in zip(x.shape, x.stride(), strict=True) if n != 1]


def _values_differ(want: torch.Tensor, got: torch.Tensor | None, name: str) -> str | None:
    assert got is not None
    if got.dtype != want.dtype or got.shape != want.shape:
        return f"{name} is {got.dtype}{list(got.shape)}, on the CPU {want.dtype}{list(want.shape)}"
    there, here = want.detach().resolve_conj(), got.detach().cpu().resolve_conj()
    # Compared as bits would be, but for nans, which have many, and zeros, which have signs.
    if not torch.equal(there.nan_to_num(nan=77.0), here.nan_to_num(nan=77.0)):
        return f"{name} is {here.tolist()}, on the CPU {there.tolist()}"
    return None


# A function of the whole program


def _whole(lines: list[str], mode: str) -> str | None:
    """Compare a function that runs the program on its arguments, called more than once."""
    split = _split(lines)
    if split is None:
        return None
    makes, body, names = split
    results = [n for n in assigned(body) if n not in names]
    source = f"def program({', '.join(names)}):\n" + "".join(f"    {line}\n" for line in body)
    source += f"    return [{', '.join([*names, *results])}]\n"
    if mode == "jit":
        return _calls_differ(makes, source, [*names, *results], "jax", isthmus.jit)
    found = _calls_differ(makes, source, [*names, *results], "jax", _compiled("isthmus"))
    if found is not None and _calls_differ(makes, source, [*names, *results], "cpu", _compiled("aot_eager")):
        return None  # torch's tracing itself, without any backend, differs from what it traced
    return found


def _compiled(backend: str) -> Callable[[Any], Any]:
    return lambda function: torch.compile(function, backend=backend)


def _calls_differ(
    makes: list[str], source: str, names: list[str], device: str, transform: Callable[[Any], Any]
) -> str | None:
    """Return how two calls of a transformed function differ from the function itself on the CPU."""
    theirs, ours = namespace("cpu"), namespace(device)
    for each in (theirs, ours):
        for line in makes:
            execute(line, each)
        exec(compile(source, "<random program>", "exec"), each)
    fast = transform(ours["program"])
    given = names[: len(makes)]
    for turn in range(2):
        there, here = ([each[n].clone() for n in given] for each in (theirs, ours))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                want = theirs["program"](*there)
            except Exception:
                return None  # such programs are for the other modes
            try:
                got = fast(*here)
            except isthmus.errors.JitError:
                return None  # what cannot be replayed says so
            except Exception as error:
                return f"call {turn} raises {type(error).__name__}: {str(error)[:300]}"
        for name, a, b in zip(names, want, got, strict=True):
            found = _values_differ(a, b, name) or _layouts_of_results_differ(a, b, name)
            if found is not None:
                return f"call {turn}: {found}"
        if [_at(a, want) for a in there] != [_at(a, got) for a in here]:
            return f"call {turn}: other arguments are returned"
    return None


def _at(x: torch.Tensor, results: list[Any]) -> list[int]:
    return [at for at, result in enumerate(results) if result is x]


def _layouts_of_results_differ(want: torch.Tensor, got: torch.Tensor, name: str) -> str | None:
    # A compiled function may return an intermediate by itself, where the CPU returns a view into a larger one.
    if not want.numel() or _strides(got) == _strides(want):
        return None
    return f"{name}.stride() is {got.stride()}, on the CPU {want.stride()}"


def assigned(lines: list[str]) -> list[str]:
    """Return the names of the device's tensors that lines assign to."""
    starts = [line.split(" = ")[0] for line in lines if " = " in line]
    return list(dict.fromkeys(name for name in starts if name[0] == "t" and name[1:].isdigit()))


def _split(lines: list[str]) -> tuple[list[str], list[str], list[str]] | None:
    """Return the lines that make arguments, the others, and the names of the arguments."""
    makes = [line for line in lines if " = data(" in line]
    body = [line for line in lines if line not in makes]
    names = [line.split(" = ")[0] for line in makes]
    return (makes, body, names) if makes and body else None


# Making a failing program smaller


def shrink(lines: list[str], differs: Callable[[list[str]], str | None]) -> tuple[list[str], str]:
    """Return the shortest program with a difference that leaving out lines leads to."""
    found = differs(lines) or ""
    at = len(lines) - 1
    while at >= 0:
        fewer = lines[:at] + lines[at + 1 :]
        why = differs(fewer) if fewer else None
        if why is not None:
            lines, found = fewer, why
        at = min(at, len(lines)) - 1
    return lines, found


def script(lines: list[str], mode: str, why: str) -> str:
    """Return a script that shows a difference."""
    head = f"# {mode}: {why}\nimport torch\nimport isthmus\n{PRELUDE}"
    body = "\n".join(f"    {line}" for line in lines)
    last = [name for name in dict.fromkeys(line.split(" ")[0] for line in lines) if name.isalnum()]
    shown = ", ".join(name for name in last if name[0] in "tcr" and name[1:].isdigit())
    around = "isthmus.lazy()" if mode in ("lazy", "reference") else "torch.enable_grad()"
    return f"{head}\nfor dev in ('cpu', 'jax'):\n  with {around}:\n{body}\n    print(dev, {shown})\n"


def check(seeds: range, mode: str, **options: Any) -> int:
    """Run the programs of these seeds in a mode; raise an AssertionError with a script for the first that differs."""
    from tests.fuzz.programs import make

    for seed in seeds:
        lines = make(seed, **options)
        why = difference(lines, mode)
        if why is not None:
            lines, why = shrink(lines, lambda fewer: difference(fewer, mode))
            raise AssertionError(f"program {seed} in mode {mode}\n{script(lines, mode, why)}")
    return len(seeds)
