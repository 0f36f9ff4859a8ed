"""Arguments and results of ATen calls: nested lists of tensors, and numbers where a schema has a tensor.

Used by the device (``_device/``) and by the reference backend; imports no JAX.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

Value = Any  # type: ignore[explicit-any]
"""An argument or result of a call: a tensor or an array, a number, a Python value, a list of them; the schema of the
call's op says which."""
Arguments = dict[str, Value]  # type: ignore[explicit-any]
"""The arguments of a call by their names in its schema."""
AnyFunction = Callable[..., Value]  # type: ignore[explicit-any]
"""A function that is called as the schema of some op says."""

NUMBERS = frozenset({int, float, bool, complex})
"""The types of Python numbers that torch takes."""


def flatten(value: Value) -> list[Value]:
    """Return the leaves of nested lists and tuples in order, Nones included.

    >>> flatten((1, [2, None], 3))
    [1, 2, None, 3]
    """
    if isinstance(value, (list, tuple)):
        return [leaf for item in value for leaf in flatten(item)]
    return [value]


def tensors_in(value: object) -> list[Tensor]:
    """Return the tensors in nested lists and tuples."""
    return [leaf for leaf in flatten(value) if isinstance(leaf, Tensor)]


def number_as_tensor(value: complex, others: Sequence[Tensor]) -> Tensor:
    """Return a 0-dim CPU tensor that promotes with the ``others`` of a call as the number ``value`` does.

    torch hands a kernel the number itself where the schema has a tensor (``torch.eq(x, 2.5)`` calls ``eq.Tensor``), but
    takes it back in a call of the op for a few ops only. ``torch.tensor(2.5)`` would not do: beside a 0-dim float16
    tensor it is a float32, while the number leaves the result float16.
    """
    # torch keeps integers above int64 as uint64, and only these.
    is_large = type(value) is int and value > torch.iinfo(torch.int64).max
    tensor = torch.tensor(value, dtype=torch.uint64 if is_large else None, device="cpu")
    if not others:
        return tensor
    # result_type takes no number above int64; one below it has the same type.
    number = value % 2**63 if is_large else value  # type: ignore[operator]
    dtypes = [torch.result_type(other, number) for other in others]
    # Converted as a tensor, since ``torch.tensor(300, dtype=torch.uint8)`` raises where a call wraps around.
    return tensor.to(functools.reduce(torch.promote_types, dtypes))
