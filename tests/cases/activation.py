"""Cases for activations and their gradients; values sit on the kinks too."""

from isthmus._graph.names import aten
from tests.support import bf16, case, f32, f64, fails, i64, values

KINKS = values([-6.0, -3.0, -1.0, -0.5, -0.0, 0.0, 0.5, 1.0, 3.0, 6.0, 25.0, -25.0, float("nan")])
GRADS = values([1.0, -2.0, 0.5, 3.0, 1.0, 1.0, 2.0, -1.0, 0.25, 1.0, 1.0, 1.0, 1.0])
EXP = lambda made: made.then(lambda t: t.abs().neg().exp())  # noqa: E731  # what the forward saves
T = lambda t: t.t()  # noqa: E731

CASES = []
for _op in (aten.gelu, aten.silu, aten.hardswish, aten.hardsigmoid, aten.mish, aten.log_sigmoid_forward):
    CASES += [
        case(_op.default, f32(3, 4).then(T)),
        case(_op.default, bf16(3, 4)),
        case(_op.default, KINKS, id="kinks"),
        case(_op.default, f32(0, 4), id="empty"),
    ]
for _op in (aten.gelu_backward, aten.silu_backward, aten.hardswish_backward, aten.hardsigmoid_backward):
    CASES += [
        case(_op.default, GRADS, KINKS, id="kinks"),
        case(_op.default, f32(3, 4).then(T), f32(4, 3)),
        case(_op.default, bf16(3, 4), bf16(3, 4)),
    ]
CASES += [
    case(aten.mish_backward.default, f32(3, 4).then(T), f32(4, 3)),
    case(aten.mish_backward.default, f64(3, 4), f64(3, 4)),
    case(aten.gelu.default, f32(3, 4), approximate="tanh", id="tanh"),
    case(aten.gelu.default, bf16(3, 4), approximate="tanh", id="tanh bf16"),
    case(aten.gelu_backward.default, f32(3, 4), f32(3, 4), approximate="tanh", id="tanh"),
    case(aten.gelu_backward.default, bf16(3, 4), bf16(3, 4), approximate="tanh", id="tanh bf16"),
    case(aten.elu.default, KINKS, 1.5, 1.1, 0.7, id="kinks"),
    case(aten.elu.default, bf16(3, 4), 1.5),
    case(aten.elu_backward.default, GRADS, 1.5, 1.1, 0.7, False, KINKS, id="from input"),
    case(aten.elu_backward.default, GRADS, 1.5, 1.1, 0.7, True, KINKS, id="from result"),
    case(aten.elu_.default, f32(3, 4).then(T), 2, id="in place"),
    case(aten.leaky_relu.default, KINKS, 0.2, id="kinks"),
    case(aten.leaky_relu.default, bf16(3, 4)),
    case(aten.leaky_relu_backward.default, GRADS, KINKS, 0.2, False, id="kinks"),
    case(aten.leaky_relu_backward.default, bf16(3, 4), bf16(3, 4), 0.2, True),
    case(aten.hardtanh.default, KINKS, id="kinks"),
    case(aten.hardtanh.default, i64(3, 4), 0, 2),
    case(aten.hardtanh_backward.default, GRADS, KINKS, -1, 1, id="kinks"),
    case(aten.hardtanh_backward.default, bf16(3, 4), bf16(3, 4), 0, 6),
    case(aten.hardshrink.default, KINKS, id="kinks"),
    case(aten.hardshrink.default, bf16(3, 4), 1),
    case(aten.hardshrink_backward.default, GRADS, KINKS, 0.5, id="kinks"),
    case(aten.hardshrink_backward.default, bf16(3, 4), bf16(3, 4), 1),
    case(aten.softshrink.default, KINKS, id="kinks"),
    case(aten.softshrink.default, bf16(3, 4), 1),
    case(aten.softshrink_backward.default, GRADS, KINKS, 0.5, id="kinks"),
    case(aten.softshrink_backward.default, f32(0, 4), f32(0, 4), 0.5, id="empty"),
    case(aten.threshold.default, KINKS, 0.5, 20, id="kinks"),
    case(aten.threshold.default, i64(3, 4), 1, 7),
    case(aten.threshold_backward.default, GRADS, KINKS, 0.5, id="kinks"),
    case(aten.threshold_backward.default, bf16(3, 4), bf16(3, 4), 0),
    case(aten.softplus.default, KINKS, 2, 10, id="kinks"),
    case(aten.softplus.default, bf16(3, 4)),
    case(aten.softplus_backward.default, GRADS, KINKS, 2, 10, id="kinks"),
    case(aten.softplus_backward.default, bf16(3, 4), bf16(3, 4), 1, 20),
    case(aten._prelu_kernel.default, f32(2, 3, 4), f32(1, 3, 1)),
    case(aten._prelu_kernel.default, bf16(2, 3), bf16(1, 1)),
    case(aten._prelu_kernel_backward.default, f32(2, 3, 4), f32(2, 3, 4), f32(1, 3, 1)),
    case(aten._prelu_kernel_backward.default, GRADS, KINKS, f32(1), id="kinks"),
    case(aten.sigmoid_backward.default, f32(3, 4).then(T), f32(4, 3)),
    case(aten.sigmoid_backward.default, bf16(3, 4), bf16(3, 4).between(0, 1)),
    case(aten.tanh_backward.default, f32(3, 4).then(T), f32(4, 3)),
    case(aten.tanh_backward.default, bf16(3, 4), bf16(3, 4).between(-1, 1)),
    case(aten.logit.default, f32(9).between(-0.2, 1.2)),
    case(aten.logit.default, f32(9).between(-0.2, 1.2), 0.1),
    case(aten.logit_backward.default, f32(9), f32(9).between(-0.2, 1.2)),
    case(aten.logit_backward.default, f32(9), f32(9).between(-0.2, 1.2), 0.1),
    case(aten.log_sigmoid_backward.default, GRADS, KINKS, EXP(KINKS), id="kinks"),
    case(aten.log_sigmoid_backward.default, f32(3, 4).then(T), f32(4, 3), EXP(f32(4, 3))),
    case(aten.glu.default, f32(4, 6), 0),
    case(aten.glu.default, bf16(4, 6)),
    case(aten.glu_backward.default, f32(2, 6), f32(4, 6), 0),
    case(aten.glu_backward.default, bf16(4, 3), bf16(4, 6), -1),
    case(aten.rrelu.default, f32(3, 4)),
    case(aten.rrelu.default, bf16(3, 4), 0.1, 0.5),
    fails(aten.glu.default, f32(3, 5), 1, error=RuntimeError, match="Halving dimension must be even"),
    fails(
        aten.gelu.default,
        f32(3),
        approximate="fast",
        error=RuntimeError,
        match="approximate argument must be",
    ),
    fails(aten.prelu.default, f32(2, 3), f32(4), error=RuntimeError, match="Mismatch of parameter numbers"),
]
