"""Gradients of log-softmax and cross-entropy in every mode: CPU torch's, and no second array as large as the logits."""

import pytest
import torch
import torch.nn.functional as F

import isthmus
from isthmus._dynamo import backend

LOSSES = {
    "mean": {},
    "sum": {"reduction": "sum"},
    "none": {"reduction": "none"},
    "weight": {"weight": True},
    "ignored": {"ignore_index": 2},
    "weight, ignored, sum": {"weight": True, "ignore_index": 2, "reduction": "sum"},
    "smoothed": {"label_smoothing": 0.1},
    "smoothed, weight": {"label_smoothing": 0.1, "weight": True},
}
SHAPES = [(5, 7), (7,), (2, 7, 3), (2, 7, 3, 2), (0, 7)]


def loss_of(options):
    """Return a loss of logits and targets, in one number."""

    def loss(x, y, w):
        given = {**options, "weight": w} if "weight" in options else options
        return F.cross_entropy(x * 2, y, **given).sum()

    return loss


def gradient(function, device, *args):
    """Return a loss and the gradient for its first argument, on the CPU."""
    x, *others = [arg.to(device) for arg in args]
    x = x.detach().requires_grad_()
    loss = function(x, *others)
    loss.backward()
    return loss.detach().cpu(), x.grad.cpu()


@pytest.fixture
def kept(monkeypatch):
    """Return the shapes that forward graphs keep for backward."""
    shapes = []
    split = backend._partition

    def watched(options, joint, *args, **kwargs):
        forward, backward = split(options, joint, *args, **kwargs)
        inputs = [node for node in backward.graph.nodes if node.op == "placeholder"]
        shapes.extend(tuple(node.meta["val"].shape) for node in inputs)
        return forward, backward

    monkeypatch.setattr(backend, "_partition", watched)
    return shapes


def cases():
    """Return every loss with every shape in every mode; one of each in ``make test``."""
    for at, name in enumerate(LOSSES):
        for other, shape in enumerate(SHAPES):
            for mode in ("compile", "lazy", "jit"):
                often = other == 0 or (at in (0, 5) and mode == "compile")
                marks = [] if often else pytest.mark.slow
                yield pytest.param(name, shape, mode, marks=marks, id=f"{name}, {shape}, {mode}")


def in_mode(mode, function, *args):
    """Return a loss and the gradient for its first argument, computed on the device in a mode."""
    if mode == "compile":
        return gradient(torch.compile(function, backend="isthmus"), "jax", *args)
    if mode == "lazy":
        with isthmus.lazy():
            return gradient(function, "jax", *args)

    @isthmus.jit
    def step(x, *others):
        loss = function(x, *others)
        return loss.detach(), torch.autograd.grad(loss, x)[0]

    x, *others = [arg.to("jax") for arg in args]
    x = x.requires_grad_()
    for _ in range(2):  # recorded, then replayed
        loss, grad = step(x, *others)
    return loss.cpu(), grad.cpu()


@pytest.mark.parametrize(("name", "shape", "mode"), cases())
@pytest.mark.usefixtures("fresh_dynamo")
def test_cross_entropy_is_the_cpus(name, shape, mode):
    torch.manual_seed(0)
    function = loss_of(LOSSES[name])
    classes = shape[0] if len(shape) == 1 else shape[1]
    targets = torch.randint(classes, shape[:1] * (len(shape) > 1) + shape[2:])
    args = torch.randn(shape), targets, torch.rand(classes)
    wanted = gradient(function, "cpu", *args)
    found = in_mode(mode, function, *args)
    torch.testing.assert_close(found, wanted, equal_nan=True)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
@pytest.mark.usefixtures("fresh_dynamo")
def test_in_other_dtypes(dtype):
    torch.manual_seed(0)
    x, y, w = torch.randn(6, 9, dtype=dtype), torch.randint(9, (6,)), torch.rand(9, dtype=dtype)
    function = loss_of({})
    wanted = gradient(function, "cpu", x.double(), y, w)
    found = gradient(torch.compile(function, backend="isthmus"), "jax", x, y, w)
    rtol, atol = (1e-7, 1e-7) if dtype == torch.float64 else (2e-2, 2e-3)
    torch.testing.assert_close(found, wanted, check_dtype=False, rtol=rtol, atol=atol)
    assert found[1].dtype == dtype


@pytest.mark.parametrize("dim", [0, 1, -1])
@pytest.mark.usefixtures("fresh_dynamo")
def test_log_softmax_along_any_dim(dim):
    x = torch.randn(4, 5, 3)
    weights = torch.randn(4, 5, 3)

    def function(x, w):
        return (F.log_softmax(x * 2, dim) * w).sum()

    wanted = gradient(function, "cpu", x, weights)
    found = gradient(torch.compile(function, backend="isthmus"), "jax", x, weights)
    torch.testing.assert_close(found, wanted)


@pytest.mark.usefixtures("fresh_dynamo")
def test_rows_of_minus_infinity_are_the_cpus():
    x = torch.tensor([[1.0, -torch.inf, 2.0], [-torch.inf, -torch.inf, -torch.inf], [3.0, torch.inf, 0.0]])

    def function(x):
        return F.log_softmax(x * 1, 1)[:, 0].sum()

    wanted = gradient(function, "cpu", x)
    found = gradient(torch.compile(function, backend="isthmus"), "jax", x)
    torch.testing.assert_close(found, wanted, equal_nan=True)


@pytest.mark.usefixtures("fresh_dynamo")
def test_a_result_used_twice():
    x, y = torch.randn(4, 5), torch.randint(5, (4,))

    def function(x, y):
        found = F.log_softmax(x * 2, 1)
        return F.nll_loss(found, y) + (found.exp() * found).sum()

    wanted = gradient(function, "cpu", x, y)
    found = gradient(torch.compile(function, backend="isthmus"), "jax", x, y)
    torch.testing.assert_close(found, wanted)


@pytest.mark.usefixtures("fresh_dynamo")
def test_sizes_may_change():
    compiled = torch.compile(loss_of({}), backend="isthmus", dynamic=True)
    for rows in (3, 5, 9):
        args = torch.randn(rows, 7), torch.randint(7, (rows,)), torch.rand(7)
        torch.testing.assert_close(gradient(compiled, "jax", *args), gradient(loss_of({}), "cpu", *args))


@pytest.mark.parametrize("wide", [False, True])
@pytest.mark.usefixtures("fresh_dynamo")
def test_only_the_logits_are_kept(kept, wide):
    weight = torch.randn(11, 4, dtype=torch.bfloat16, device="jax", requires_grad=True)
    x, y = torch.randn(6, 4, dtype=torch.bfloat16, device="jax"), torch.randint(11, (6,), device="jax")

    @torch.compile(backend="isthmus", options={"keep": "apart"})
    def function(x, y):
        logits = x @ weight.T
        return F.cross_entropy(logits.float() if wide else logits, y)

    function(x, y).backward()
    assert kept.count((6, 11)) == 1


@pytest.mark.parametrize("device", ["cpu", "jax"])
@pytest.mark.usefixtures("fresh_dynamo")
def test_logits_that_are_given_may_be_written_to_before_backward(device):
    x, y = torch.randn(4, 5, requires_grad=True), torch.randint(5, (4,))
    wanted = torch.autograd.grad(F.cross_entropy(x * 1, y), x)[0]
    given = x.detach().to(device).requires_grad_()
    logits = given * 1
    loss = torch.compile(lambda x, y: F.cross_entropy(x.view(4, 5), y), backend="isthmus")(
        logits, y.to(device)
    )
    logits.data.zero_()
    with torch.no_grad():
        logits.zero_()
    loss.backward()
    torch.testing.assert_close(given.grad.cpu(), wanted)


def test_targets_out_of_bounds_are_refused():
    function = torch.compile(loss_of({}), backend="isthmus")
    args = torch.randn(3, 4), torch.tensor([0, 9, 1]), torch.rand(4)
    with pytest.raises(IndexError, match="out of bounds"):
        gradient(function, "jax", *args)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_functions_run_outside_of_programs_too(dtype):
    x, y = torch.randn(4, 5, dtype=dtype), torch.randint(5, (4,))
    result, largest, total = torch.ops.isthmus.log_softmax_with_sums(x, 1, False)
    torch.testing.assert_close(result, F.log_softmax(x, 1))
    exact = gradient(lambda x, y: F.cross_entropy(x, y), "cpu", x.double(), y)[1]
    one, count = torch.ones((), dtype=dtype), torch.tensor(4, dtype=dtype)
    found = torch.ops.isthmus.cross_entropy_gradient(
        x, largest, total, 1, dtype, dtype, one, y, None, 1, -100, count
    )
    # A logarithm below 8 is rounded to bfloat16 by at most 1/64, its exponential by that share; four rows have a mean.
    atol = 1e-6 if dtype == torch.float32 else 1 / 64 / 4 + 2**-10
    assert found.dtype == dtype
    torch.testing.assert_close(found.double(), exact, rtol=0, atol=atol)
