"""A condition on values as an op: ``isthmus::require`` gives its input back, and its program raises unless all hold.

torch checks values of some composite ops on the CPU alone, since on another device it would have to wait for them.
As an op of its own the check is part of the program that computes, in every mode, and nothing waits.
"""

from __future__ import annotations

import torch
from torch import Tensor

from isthmus._ops.common import Array
from isthmus._ops.registry import lowering
from isthmus._ops.value_checks import require


def _on_meta(self: Tensor, holds: Tensor, message: str) -> Tensor:
    return torch.empty_like(self)


_library = torch.library.Library("isthmus", "FRAGMENT")
_library.define(
    "require(Tensor self, Tensor holds, str message) -> Tensor", tags=(torch.Tag.pt2_compliant_tag,)
)
_library.impl("require", _on_meta, "Meta")


@lowering(torch.ops.isthmus.require.default)
def _required(self: Array, holds: Array, message: str) -> Array:
    """``self``, if every element of ``holds`` is true; a RuntimeError else."""
    require(holds, RuntimeError, message)
    return self
