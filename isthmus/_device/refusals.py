"""Calls the CPU refuses: it is asked, once per key, whether it would run a call like this one.

torch's Meta kernels know shapes but miss many checks of the real ones: that two dtypes agree, what an index may be,
what ``out=`` may be, that a parameter is not negative. Rather than a rule per op there is one question. The op runs on
the CPU with *stand-ins*: tensors of the same dtypes and, where they are small, the same layouts and the same sharing
of memory; large ones are replaced by small ones. ``build.py`` and ``sized.py`` ask before they compile, so a key that
has a plan costs nothing more::

    torch.mm(x, w)      # float64 and float32: mat1 and mat2 must have the same dtype, but got Double and Float

A refusal of stand-ins may be due to what stands in: zeros have no inverse, and sizes that were made smaller need not
fit. So the call is refused only if the CPU also refuses its values; where those cannot be read, in a trace, if it
refuses zeros and ones in the same words. What the CPU merely has no kernel for, for half types, is no refusal.

The CPU's warnings are kept as well, and each call of the key gives them again (``warning``).
"""

from __future__ import annotations

import contextlib
import functools
import re
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload

from isthmus._device import mode
from isthmus._device.buffer import buffer_of
from isthmus._device.inference import numbers_as_tensors
from isthmus._device.private import below_autograd, plain_call
from isthmus._graph.schema import schema_of
from isthmus._runtime.lines import warn_user

Values = tuple[Any, ...]
Warnings = list[tuple[type[Warning], str]]

OVERLAP = "unsupported operation:"
"""How torch begins to refuse a write to memory that is shown twice or read at the same time."""
# Bytes and elements that stand in as they are: the CPU's answer takes microseconds, compiling takes milliseconds.
_BYTES, _ELEMENTS = 1 << 15, 1 << 12
# Sizes up to this one stay: dims of length one broadcast, two or three are often meant.
_KEPT = 3
# The CPU has no kernel for a type: of these CUDA has many, and so may the device.
_NO_KERNEL = re.compile(r"not implemented for '(Half|BFloat16|ComplexHalf|Float[48]\w*|UInt\d+|Q\w+)'")
# CUDA accepts these where the CPU lacks a kernel for integers.
_ACCEPTED = {"aten::histc"}
# The device's own name of an op says nothing on the CPU.
_aten = torch.ops.aten
_SAME_AS: dict[OpOverload, OpOverload] = {_aten.convolution_overrideable.default: _aten.convolution.default}
_TYPES = re.compile(r"type|bool|complex|integ|float|long|double|half|byte|\bint", re.IGNORECASE)
_DIGITS = re.compile(r"[\d.+e-]*\d")
_REPEATED = "An output with one or more elements was resized"
_LIMIT = 4096
# What the CPU said of stand-ins but not of the calls they stood for.
_artifacts: set[tuple[OpOverload, str]] = set()


def check(op: OpOverload, values: Values, readable: bool = True) -> Warnings:
    """Raise what the CPU raises for calls like this one; return the warnings it gives.

    ``readable`` says whether the tensors have values that can be looked at.
    """
    if op.namespace != "aten":
        return []  # a library's op may do anything
    make, exact = _choice(values)
    given, error = ask(op, make(values))
    if error is None:
        return [w for w in given if exact or _TYPES.search(w[1])]
    if OVERLAP in str(error):
        raise error.with_traceback(None) from None
    text = _text(error)
    if (op, text) in _artifacts:
        return []
    _, again = ask(op, make(values, filled=True))
    if again is None or _text(again) != text:
        return []  # it was about values
    if not readable or mode.current.capture is not None:
        if exact or _TYPES.search(text):
            raise error.with_traceback(None) from None
        return []
    attempt(op, values)
    if len(_artifacts) >= _LIMIT:
        _artifacts.clear()
    _artifacts.add((op, text))
    return []


def _choice(values: Values) -> tuple[Callable[..., Values], bool]:
    """Return what makes stand-ins for a call, and whether they have the sizes of its tensors."""
    tensors = tensors_of(values)
    if sum([buffer_of(t).signature.nbytes for t in tensors]) <= _BYTES:
        return stand_ins, True
    if sum([t.numel() for t in tensors]) <= _ELEMENTS:
        return functools.partial(compact, sizes={}), True
    large = sorted({n for t in tensors for n in t.shape if n > _KEPT})
    return functools.partial(compact, sizes={n: _KEPT + 1 + at for at, n in enumerate(large)}), False


def _text(error: Exception) -> str:
    """Return what an error says, sizes and addresses aside."""
    return f"{type(error).__name__}: {_DIGITS.sub('#', str(error).split(chr(10))[0])}"


def ask(op: OpOverload, values: Values) -> tuple[Warnings, Exception | None]:
    """Run an op on stand-ins; return the warnings and the refusal of the CPU, if its answer says anything."""
    chosen = _SAME_AS.get(op, op)
    args, kwargs = schema_of(op).split(numbers_as_tensors(op, values))
    random = torch.Tag.nondeterministic_seeded in op.tags
    state = torch.get_rng_state() if random else None
    call = plain_call(chosen)
    with torch.no_grad(), below_autograd(), _recorded() as given:
        try:
            call(*args, **kwargs)  # from here, so that torch warns of this file
        except Warning as warning:
            given.append((type(warning), str(warning)))  # the user wants warnings raised: each call does
        except Exception as error:
            return given, error if says_anything(op, error) else None
        finally:
            if state is not None:
                torch.set_rng_state(state)
    return given, None


def says_anything(op: OpOverload, error: Exception) -> bool:
    """Return whether what the CPU raises says something about the call rather than about the CPU or the values."""
    if isinstance(error, torch.linalg.LinAlgError):  # type: ignore[attr-defined]
        return False
    text = str(error)
    if isinstance(error, NotImplementedError) and "not implemented for '" not in text:
        return False  # the CPU has no such op
    return not (_NO_KERNEL.search(text) or (op._schema.name in _ACCEPTED and "not implemented for" in text))


@contextlib.contextmanager
def _recorded() -> Iterator[Warnings]:
    """Keep the warnings of this file from being shown.

    ``warnings.catch_warnings`` would make Python show old warnings again each time.
    """
    given: Warnings = []
    shown = warnings.showwarning

    def keep(message: Any, category: type[Warning], filename: str, *more: Any, **named: Any) -> None:
        if filename != __file__:
            shown(message, category, filename, *more, **named)
        elif _REPEATED not in str(message):  # the Meta kernel says so
            given.append((category, str(message)))

    globals().get("__warningregistry__", {}).clear()  # it would keep a text from being given twice
    warnings.showwarning = keep
    try:
        yield given
    finally:
        warnings.showwarning = shown


def warning(plan: Callable[..., Any], given: Warnings) -> Callable[..., Any]:
    """Return a plan that gives warnings with every call."""
    if not given:
        return plan

    def warned(inputs: list[Any], values: Values) -> Any:
        for category, text in given:
            warn_user(category, text)
        return plan(inputs, values)

    return warned


def attempt(op: OpOverload, values: Values) -> None:
    """Run ``op`` on copies on the CPU, for the error it raises."""
    if mode.current.capture is not None:
        values = stand_ins(values)  # values cannot be read while a function is recorded, sizes can
    try:
        on_cpu(_SAME_AS.get(op, op), values)
    except Exception as error:
        if "Could not run" in str(error):
            return  # the CPU has no such op, which says nothing about the call
        raise error.with_traceback(None) from None


def on_cpu(op: OpOverload, values: Values) -> tuple[Values, Any]:
    """Return the arguments on the CPU, and what ``op`` makes of them there."""
    copies: dict[int, Tensor] = {}
    moved = tuple(_to_cpu(value, copies) for value in values)
    args, kwargs = schema_of(op).split(numbers_as_tensors(op, moved))
    return moved, op(*args, **kwargs)


def _to_cpu(value: Any, moved: dict[int, Tensor]) -> Any:
    if isinstance(value, Tensor):
        if value.device.type == "jax" and id(value) not in moved:
            moved[id(value)] = value.cpu()
        return moved.get(id(value), value)
    if isinstance(value, (list, tuple)):
        return [_to_cpu(item, moved) for item in value]
    if isinstance(value, torch.device) and value.type == "jax":
        return torch.device("cpu")
    return value


def stand_ins(values: Values, filled: bool = False) -> Values:
    """Return a call's arguments with CPU tensors, of zeros or ones, that lie in memory as those of the device do."""
    bases: dict[int, Tensor] = {}

    def make(tensor: Tensor) -> Tensor:
        nbytes, width = buffer_of(tensor).signature.nbytes, tensor.dtype.itemsize
        place = tensor.untyped_storage()._cdata
        if place not in bases:
            blank = torch.zeros(nbytes, dtype=torch.uint8)
            if filled:
                blank[: nbytes // width * width].view(tensor.dtype).fill_(1)
            bases[place] = blank
        typed = bases[place][: nbytes // width * width].view(tensor.dtype)
        return typed.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())

    return tuple(_replaced(value, make, {}) for value in values)


def compact(values: Values, sizes: dict[int, int], filled: bool = False) -> Values:
    """Return a call's arguments with CPU tensors of other sizes; what is given twice still is."""
    made: dict[Any, Tensor] = {}
    new = torch.ones if filled else torch.zeros

    def make(tensor: Tensor) -> Tensor:
        place = (tensor.untyped_storage()._cdata, tensor.storage_offset(), tensor.shape, tensor.stride())
        if (place, tensor.dtype) not in made:
            made[place, tensor.dtype] = new([sizes.get(n, n) for n in tensor.shape], dtype=tensor.dtype)
        return made[place, tensor.dtype]

    return tuple(_replaced(value, make, sizes) for value in values)


def _replaced(value: Any, make: Callable[[Tensor], Tensor], sizes: dict[int, int]) -> Any:
    """Return an argument with tensors that ``make`` made, and sizes that go with them."""
    if isinstance(value, Tensor):
        return make(value) if value.device.type == "jax" else value
    if isinstance(value, (list, tuple)):
        return [_replaced(item, make, sizes) for item in value]
    if isinstance(value, torch.device):
        return torch.device("cpu")
    if isinstance(value, torch.Generator):
        return None
    return sizes.get(value, value) if type(value) is int else value


def tensors_of(values: Values) -> list[Tensor]:
    """Return the "jax" tensors of a call, those in lists among them."""
    flat = [item for v in values for item in (v if isinstance(v, (list, tuple)) else (v,))]
    return [v for v in flat if isinstance(v, Tensor) and v.device.type == "jax"]
