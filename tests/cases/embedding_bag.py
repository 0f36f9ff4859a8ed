"""Cases for bags of embeddings and their gradients."""

from dataclasses import dataclass
from typing import Any

import torch

from tests.support import bf16, case, f32, f64, fails, i64, values


@dataclass(frozen=True)
class Bags:
    """Bags and, if asked, the gradients of table and weights: what else torch returns depends on the device."""

    backward: bool = False

    def __call__(self, weight: Any, indices: Any, offsets: Any, samples: Any = None, **options: Any) -> Any:
        leaves = [x for x in (weight, samples) if x is not None]
        for leaf in leaves:
            leaf.requires_grad_(self.backward)
        found = torch.nn.functional.embedding_bag(
            indices, weight, offsets, per_sample_weights=samples, **options
        )
        if not self.backward:
            return found
        cotangent = torch.linspace(-1, 2, found.numel(), device=found.device).reshape(found.shape)
        return (found.detach(), *torch.autograd.grad(found, leaves, cotangent.to(found.dtype)))

    def __str__(self) -> str:
        return "embedding_bag_and_gradients" if self.backward else "embedding_bag"


FOUND = values([0, 1, 3, 1, 1, 0, 4])
STARTS = values([0, 2, 2, 5])  # the second bag is empty
TWICE = values([0, 1, 3, 1, 3, 0])
NAN = values([[1.0], [float("nan")], [2.0]])
CASES = [
    case(Bags(), NAN, values([0, 1, 2, 1, 2, 0]), values([0, 3]), mode="max", id="nan"),
    case(Bags(), f32(5, 3), i64(0), values([0, 0]), mode="mean", id="no indices"),
    case(Bags(), f32(5, 3), i64(0), values([0, 0]), mode="max", id="no indices,max"),
    case(Bags(), f32(5, 3), i64(2, 3).between(0, 4), None, id="two dims"),
    # Equal frequencies: with others the CPU's kernel looks up the count of another index than its own.
    case(Bags(True), f32(5, 3), TWICE, STARTS, scale_grad_by_freq=True, id="by frequency"),
    case(Bags(True), f64(5, 3), FOUND, STARTS, f64(7), mode="sum", padding_idx=1, id="weights and padding"),
    case(Bags(True), f32(5, 3), FOUND, STARTS, f32(7), mode="sum", id="weights"),
    case(Bags(), f32(5, 3), FOUND.then(lambda t: t.int()), STARTS, mode="mean", id="two integer types"),
]
for _mode in ("sum", "mean", "max"):
    CASES += [
        case(Bags(), f32(5, 3), FOUND, STARTS, mode=_mode, id=_mode),
        case(Bags(), bf16(5, 3), FOUND, STARTS, mode=_mode, id=f"bfloat16,{_mode}"),
        case(Bags(True), f64(5, 3), FOUND, STARTS, mode=_mode, id=_mode),
        case(Bags(True), f32(5, 3), FOUND, STARTS, mode=_mode, padding_idx=1, id=f"padding,{_mode}"),
        case(
            Bags(True), f32(5, 3), FOUND, values([0, 2, 2, 7]),
            mode=_mode, include_last_offset=True, id=f"last offset,{_mode}",
        ),
        fails(
            Bags(), f32(3, 2), values([0, 1]), values([0, 5]), mode=_mode,
            error=RuntimeError, match=r"offsets\[-1\] can not be greater", id=f"offset too great,{_mode}",
        ),
        fails(
            Bags(), f32(3, 2), values([0, 1]), values([1, 2]), mode=_mode,
            error=RuntimeError, match=r"offsets\[0\] has to be 0", id=f"offset not 0,{_mode}",
        ),
        fails(
            Bags(), f32(3, 2), values([0, 3]), values([0]), mode=_mode,
            error=RuntimeError, match="idx < num_embeddings", id=f"no such row,{_mode}",
        ),
    ]  # fmt: skip
