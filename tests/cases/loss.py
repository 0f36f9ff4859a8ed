"""Cases for losses and their gradients, in each reduction."""

import torch

from isthmus._graph.names import aten
from tests.support import bf16, case, f32, f64, fails, values

TARGET, TARGET2 = values([0, 6, 3, -100, 2]), values([[[0, 1], [4, 2]], [[3, 3], [1, 0]]])
INF = float("inf")
PAIRS = {"mse_loss": (), "smooth_l1_loss": (0.5,), "huber_loss": (0.5,), "soft_margin_loss": ()}

CASES = []
for _reduction in (0, 1, 2):
    _shape = (5, 7) if _reduction == 0 else ()
    for _name, _option in PAIRS.items():
        _forward, _backward = getattr(aten, _name).default, getattr(aten, f"{_name}_backward").default
        CASES += [
            case(_forward, f32(5, 7), f32(7, 5).then(lambda t: t.t()), _reduction, *_option),
            case(_backward, f32(*_shape), f32(5, 7), f32(7, 5).then(lambda t: t.t()), _reduction, *_option),
        ]
    _chance, _grad = f32(5, 7).between(0, 1), f32(*_shape)
    _wanted = f32(7, 5).between(0, 1).then(lambda t: t.t())
    CASES += [
        case(aten.binary_cross_entropy.default, _chance, _wanted, None, _reduction),
        case(
            aten.binary_cross_entropy.default, _chance, _wanted, f32(7), _reduction, id=f"weight {_reduction}"
        ),
        case(aten.binary_cross_entropy_backward.default, _grad, _chance, _wanted, None, _reduction),
        case(
            aten.binary_cross_entropy_backward.default,
            _grad,
            _chance,
            _wanted,
            f32(5, 7),
            _reduction,
            id=f"weight {_reduction}",
        ),
        case(aten.binary_cross_entropy_with_logits.default, f32(5, 7), _wanted, None, None, _reduction),
        case(aten.binary_cross_entropy_with_logits.default, f32(5, 7), _wanted, f32(7), f32(7), _reduction),
    ]
    _each, _each2 = (f32(5), f32(2, 2, 2)) if _reduction == 0 else (f32(), f32())
    _weight, _total = f32(7).between(0.1, 2), f32().between(1, 2)
    CASES += [
        case(aten.nll_loss_forward.default, f32(5, 7), TARGET, _weight, _reduction, -100),
        case(
            aten.nll_loss_forward.default,
            f32(7),
            values(3),
            None,
            _reduction,
            -100,
            id=f"vector {_reduction}",
        ),
        case(aten.nll_loss_backward.default, _each, f32(5, 7), TARGET, _weight, _reduction, -100, _total),
        case(
            aten.nll_loss_backward.default,
            f32(),
            f32(7),
            values(3),
            None,
            _reduction,
            -100,
            _total,
            id=f"vector {_reduction}",
        ),
        case(
            aten.nll_loss2d_forward.default, f32(2, 5, 2, 2), TARGET2, f32(5).between(0.1, 2), _reduction, 1
        ),
        case(
            aten.nll_loss2d_backward.default,
            _each2,
            f32(2, 5, 2, 2),
            TARGET2,
            f32(5).between(0.1, 2),
            _reduction,
            1,
            _total,
        ),
    ]
CASES += [
    case(aten.mse_loss.default, bf16(5, 7), bf16(5, 7)),
    case(aten.mse_loss.default, f32(0), f32(0), id="nothing"),
    case(aten.smooth_l1_loss.default, bf16(5, 7), bf16(5, 7)),
    case(aten.huber_loss.default, bf16(5, 7), bf16(5, 7)),
    case(aten.binary_cross_entropy.default, values([0.0, 1.0]), values([1.0, 0.0]), id="extremes"),
    case(
        aten.binary_cross_entropy_with_logits.default, values([1e3, -1e3]), values([0.0, 1.0]), id="extremes"
    ),
    case(aten.nll_loss_forward.default, bf16(5, 7), TARGET, None, 1, -100),
    case(aten.nll_loss_forward.default, values([[-INF, 0.0]]), values([0]), None, 1, 0, id="all ignored"),
    case(
        aten.nll_loss_forward.default, f32(0, 7), values([], dtype=torch.int64), None, 1, -100, id="nothing"
    ),
    fails(
        aten.nll_loss_forward.default,
        f32(2, 3),
        values([0, 3]),
        None,
        1,
        -100,
        error=IndexError,
        match="out of bounds",
    ),
    fails(
        aten.nll_loss_forward.default,
        f32(2, 3),
        values([0]),
        None,
        1,
        -100,
        error=RuntimeError,
        match="size mismatch",
    ),
    fails(
        aten.nll_loss2d_forward.default,
        f32(2, 3, 2, 2),
        TARGET2,
        None,
        1,
        -100,
        error=IndexError,
        match="out of bounds",
    ),
    fails(aten.mse_loss.default, f32(3), f32(4), error=RuntimeError, match="must match the size"),
    fails(
        aten.binary_cross_entropy.default,
        values([1.5]),
        values([1.0]),
        error=RuntimeError,
        match="between 0 and 1",
    ),
]
LABELS = values([[0, 2, 2, -1], [-1, 0, 0, 0], [1, 2, 3, 0]])
ODD_SCORES = values([[1.0, float("nan"), INF, 2.0]])
for _reduction in (0, 1, 2):
    _grad, _scores, _target = f32(3) if _reduction == 0 else f32(), f32(3, 4), values([0, 3, 1])
    _weight, _one = f32(4).between(0.1, 2), f64(4)
    CASES += [
        case(aten.multi_margin_loss.default, _scores, _target, 1, 0.7, None, _reduction),
        case(aten.multi_margin_loss.default, _scores, _target, 2, 1, _weight, _reduction),
        case(aten.multi_margin_loss.default, _one, values(2), 1, 1, None, _reduction, id=f"one {_reduction}"),
        case(
            aten.multi_margin_loss.default,
            ODD_SCORES,
            values([0]),
            1,
            1,
            None,
            _reduction,
            id=f"nan {_reduction}",
        ),
        case(aten.multi_margin_loss_backward.default, _grad, _scores, _target, 1, 0.7, _weight, _reduction),
        case(aten.multi_margin_loss_backward.default, _grad, _scores, _target, 2, 1, None, _reduction),
        case(aten.multilabel_margin_loss_forward.default, _scores, LABELS, _reduction),
        case(
            aten.multilabel_margin_loss_forward.default,
            _one,
            values([1, 3, -1, 0]),
            _reduction,
            id=f"one {_reduction}",
        ),
        case(
            aten.multilabel_margin_loss_backward.default,
            _grad,
            _scores,
            LABELS,
            _reduction,
            values([[1.0, 0.0, 1.0, 0.0], [0.0] * 4, [1.0] * 4]),
        ),
    ]
CASES += [
    fails(
        aten.multi_margin_loss.default,
        f32(2, 3),
        values([0, 3]),
        error=RuntimeError,
        match="target out of range",
    ),
    fails(
        aten.multilabel_margin_loss_forward.default,
        f32(3),
        values([0, 3, -1]),
        1,
        error=RuntimeError,
        match="out of range",
    ),
]
