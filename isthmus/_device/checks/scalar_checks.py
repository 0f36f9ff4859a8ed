"""Numbers that do not fit a call: refused where torch refuses them, in its words.

Numbers are run-time inputs, so a plan that was compiled for one runs for all; each is looked at before.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from isthmus._device.checks.ask_cpu import AcceptedCalls, raise_number_refusal
from isthmus._graph.private import OpOverload
from isthmus._graph.schema import Schema

Suspicion = Callable[[Any, Any, Any], bool]
_INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
_WHOLE = (torch.bool, *_INTEGERS)
_FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_FLOAT8 = tuple(d for d in vars(torch).values() if isinstance(d, torch.dtype) and "float8" in str(d))
_RANGES: dict[Any, tuple[float, float]] = {
    **{dtype: (torch.iinfo(dtype).min, torch.iinfo(dtype).max) for dtype in _INTEGERS},
    **{dtype: (torch.finfo(dtype).min, torch.finfo(dtype).max) for dtype in (*_FLOATS, *_FLOAT8)},
}
_DIVISIONS = ("aten::floor_divide", "aten::remainder", "aten::fmod", "aten::div")
_accepted = AcceptedCalls("suspicious numbers that the CPU accepts", 1024)


def too_large(value: Any, like: Any, dtype: Any) -> bool:
    """Return whether a number may be one that a dtype, or else that of the tensor it meets, cannot hold."""
    kind = type(value)
    if kind is not int and kind is not float:
        return kind is complex
    chosen = dtype if type(dtype) is torch.dtype else _dtype(like)
    low, high = _RANGES.get(chosen, (-math.inf, math.inf))
    if low <= value <= high:
        return False
    return math.isfinite(value) or chosen in _INTEGERS or chosen in _FLOAT8


def negative(value: Any, like: Any, dtype: Any) -> bool:
    """Return whether an exponent is negative, where the tensor has integers, or too large."""
    if type(value) is int and value < 0:
        return _dtype(like) in _WHOLE
    return too_large(value, like, dtype)


def zero(value: Any, like: Any, dtype: Any) -> bool:
    """Return whether integers are divided by zero, or by what wraps around to it."""
    if type(value) is not int or _dtype(like) not in _WHOLE:
        return False
    return value == 0 or too_large(value, like, dtype)


def _dtype(like: Any) -> Any:
    """Return the dtype of a tensor, or of the first in a list."""
    return getattr(like[0] if type(like) is list and like else like, "dtype", None)


# By name. What torch stores or compares with as it is must fit; other numbers take part in arithmetic and wrap around.
_SUSPICIONS: dict[str, Suspicion] = {"exponent": negative, "other": zero}
_SUSPICIONS |= dict.fromkeys(("value", "fill_value", "min", "max", "s"), too_large)


def watched(schema: Schema) -> dict[str, Suspicion]:
    """Return the numbers of an op that torch may refuse, each with what makes it suspicious."""
    divides = schema.name.rstrip("_") in _DIVISIONS
    numbers = [a.name for a in schema.arguments if (divides if a.name == "other" else a.kind == "scalar")]
    return {name: _SUSPICIONS[name] for name in numbers if name in _SUSPICIONS}


def refuse(op: OpOverload, values: tuple[Any, ...]) -> None:
    """Raise what the CPU raises for a call with a suspicious number, if it does."""
    key = (op, *[value.dtype if isinstance(value, Tensor) else repr(value) for value in values])
    _accepted.ask(key, lambda: raise_number_refusal(op, values))
