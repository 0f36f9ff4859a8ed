"""Cases for the CTC loss: the loss and the gradient, not the alphas, of which torch leaves some unset."""

from typing import Any

import torch
from torch.nn.functional import ctc_loss

from tests.support import case, f32, f64, fails, values

PADDED = values([[1, 2, 2, 5], [3, 3, 3, 1], [4, 1, 0, 0]])
JOINED = values([1, 2, 2, 5, 4, 1])
LOG = lambda t: t.log_softmax(-1)  # noqa: E731
IMPOSSIBLE = lambda t: t.log_softmax(-1).index_fill(2, torch.tensor([3]), -float("inf"))  # noqa: E731


def loss(log_probs: torch.Tensor, targets: torch.Tensor, *lengths: Any, **options: Any) -> torch.Tensor:
    """The loss of each sequence."""
    return ctc_loss(log_probs, targets, *lengths, **{"reduction": "none", **options})


def gradient(log_probs: torch.Tensor, targets: torch.Tensor, *lengths: Any, **options: Any) -> torch.Tensor:
    """The gradient of the sum of the losses, each with its own weight."""
    leaf = log_probs.detach().requires_grad_()
    found = ctc_loss(leaf, targets, *lengths, **{"reduction": "none", **options})
    weights = torch.arange(1, found.numel() + 1, device=found.device).to(found.dtype).reshape(found.shape)
    return torch.autograd.grad(found, leaf, weights)[0]


def by_tensors(log_probs: torch.Tensor, targets: torch.Tensor, *lengths: torch.Tensor) -> list[torch.Tensor]:
    """The loss and its gradient from the overloads that take lengths as tensors."""
    found, alphas = torch.ops.aten._ctc_loss.Tensor(log_probs, targets, *lengths)
    backward = torch.ops.aten._ctc_loss_backward.Tensor
    grad = torch.ones_like(found)
    return [found, backward(grad, log_probs, targets, *lengths, found, alphas, 0)]


CASES = [
    case(
        by_tensors,
        f32(12, 3, 6).then(LOG),
        PADDED,
        values([12, 9, 7]),
        values([4, 4, 2]),
        id="padded tensors",
    ),
    case(
        by_tensors,
        f32(12, 3, 6).then(LOG),
        JOINED,
        values([12, 9, 7]),
        values([4, 0, 2]),
        id="joined tensors",
    ),
    fails(loss, f32(12, 3, 6), PADDED, (13, 9, 7), (4, 4, 2), error=RuntimeError, match="at most 12"),
    fails(
        loss, f32(12, 3, 6), PADDED, (12, 9, 7), (4, 4, 2), blank=6, error=RuntimeError, match="label range"
    ),
]
for _function in (loss, gradient):
    CASES += [
        case(_function, f32(12, 3, 6).then(LOG), PADDED, (12, 9, 7), (4, 4, 2), id="padded"),
        case(_function, f64(12, 3, 6).then(LOG), PADDED, (12, 9, 7), (3, 1, 0), id="padded, shorter"),
        case(_function, f32(12, 3, 6).then(LOG), JOINED, (12, 9, 7), (4, 0, 2), id="joined"),
        case(_function, f32(12, 3, 6).then(LOG), JOINED, (12, 9, 7), (2, 3, 1), blank=3, id="another blank"),
        case(_function, f32(12, 6).then(LOG), values([1, 2, 2]), (12,), (3,), id="one sequence"),
        case(_function, f32(12, 3, 6).then(LOG), PADDED, (3, 0, 0), (4, 0, 2), id="too short"),
        case(
            _function, f32(12, 3, 6).then(LOG), PADDED, (3, 0, 9), (4, 4, 2), zero_infinity=True, id="zeroed"
        ),
        case(_function, f32(12, 3, 6).then(IMPOSSIBLE), PADDED, (12, 9, 7), (4, 4, 2), id="impossible class"),
    ]
