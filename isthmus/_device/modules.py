"""``module.to("jax")`` keeps its parameters the objects they were, as ``module.to("cuda")`` does.

torch cannot put a "jax" tensor into a CPU parameter, so it makes a new one wherever the old one is used:
weights tied by identity would come apart, and an optimizer made before the move would update the old ones.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import nn


def install() -> None:
    """Wrap the method behind ``Module.to``, ``cpu``, ``jax`` and their like."""
    theirs = nn.Module._apply

    @functools.wraps(theirs)
    def apply(self: nn.Module, fn: Callable[..., Any], recurse: bool = True) -> Any:
        before = dict(self._parameters)
        result = theirs(self, fn, recurse)
        for name, old in before.items():
            new = self._parameters.get(name)
            if old is not None and new is not None and new is not old and _crossed(old, new):
                self._parameters[name] = _moved(old, new, name)
        return result

    nn.Module._apply = apply  # type: ignore[method-assign]


def _crossed(old: Any, new: Any) -> bool:
    return old.device.type != new.device.type and "jax" in (old.device.type, new.device.type)


def _moved(old: Any, new: Any, name: str) -> Any:
    """Return ``old`` holding what ``new`` holds: tensor, gradient and all."""
    try:
        torch.utils.swap_tensors(old, new)
    except RuntimeError as error:
        warnings.warn(
            f"parameter {name!r} could not be moved in place and was replaced: tie its weights again and "
            f"give it to the optimizer again ({error})",
            stacklevel=4,
        )
        return new
    return old
