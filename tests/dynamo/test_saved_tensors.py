"""What forward keeps for backward in one tensor: gradients, hooks, lifetimes and graphs that are cut."""

import copy
import gc

import jax
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from isthmus._dynamo import returns, saved_tensors
from isthmus._graph.layout import channels_last_strides
from isthmus.errors import IsthmusError

WAYS = ["together", "apart"]


class Block(nn.Module):
    """Attention on views of one product, a norm, and a wide layer: kept are views, whole results and statistics."""

    def __init__(self, width=8, dropout=0.0):
        super().__init__()
        self.norm, self.other = nn.LayerNorm(width), nn.LayerNorm(width)
        self.cut, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.wide, self.back = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x):
        pieces = self.cut(self.norm(x)).chunk(3, -1)
        q, k, v = [piece.unflatten(-1, (2, -1)).transpose(1, 2) for piece in pieces]
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.dropout(self.out(mixed.transpose(1, 2).flatten(-2)))
        return x + self.back(F.gelu(self.wide(self.other(x))))


def compiled(function, keep="together", **options):
    """Compile with a way to keep."""
    return torch.compile(function, backend="isthmus", options={"keep": keep, **options})


def saved_by(loss):
    """Return the tensors that the compiled graph behind a loss saved."""
    node = loss.grad_fn
    while "CompiledFunction" not in type(node).__name__:
        node = node.next_functions[0][0]
    return node.saved_tensors


def gradients(model):
    return [parameter.grad.cpu() for parameter in model.parameters()]


@pytest.fixture(autouse=True)
def fresh(fresh_dynamo):
    torch.manual_seed(0)


@pytest.mark.parametrize("keep", WAYS)
def test_gradients_are_the_cpus(keep):
    model, x = nn.Sequential(Block(), Block()), torch.randn(2, 5, 8)
    other = copy.deepcopy(model).to("jax")
    function = compiled(other, keep)
    for _ in range(2):
        model(x).square().sum().backward()
        function(x.to("jax")).square().sum().backward()
    torch.testing.assert_close(gradients(other), gradients(model), rtol=1e-4, atol=1e-4)


def test_one_tensor_is_saved_for_all_that_is_new():
    model, x = nn.Sequential(Block(), Block()).to("jax"), torch.randn(2, 5, 8, device="jax")
    together = saved_by(compiled(model, "together")(x).sum())
    torch._dynamo.reset()
    apart = saved_by(compiled(model, "apart")(x).sum())
    own = {id(tensor) for tensor in (*model.parameters(), x)}
    assert len([t for t in together if id(t) not in own]) == 1
    assert len([t for t in apart if id(t) not in own]) > 10


def test_views_that_share_nothing_are_kept_by_themselves():
    model, x = Block().to("jax"), torch.randn(2, 5, 8, device="jax")
    contents = [
        c for t in saved_by(compiled(model)(x).sum()) if (c := saved_tensors.contents_of(t)) is not None
    ]
    (kept,) = contents
    assert (2, 5, 24) not in [signature.shape for signature in kept.arrays]
    assert [signature.shape for signature in kept.arrays].count((2, 5, 2, 4)) >= 3


@pytest.mark.parametrize("keep", WAYS)
def test_masks_are_those_of_forward(keep):
    def function(x):
        y = F.dropout(x, 0.5)
        return y, y.sin().cos().exp().tanh()

    x = torch.rand(64, device="jax") + 1
    x.requires_grad_()
    shown, other = compiled(function, keep)(x)
    (shown.sum() + 0 * other.sum()).backward()
    assert 0 < shown.count_nonzero() < 64
    torch.testing.assert_close(x.grad.cpu(), (shown / x).detach().cpu())


@pytest.mark.parametrize("keep", WAYS)
def test_statistics_are_written_as_in_eager(keep):
    model = nn.Sequential(
        nn.Conv2d(2, 3, 3), nn.BatchNorm2d(3), nn.ReLU(), nn.Conv2d(3, 2, 3), nn.BatchNorm2d(2)
    )
    other = copy.deepcopy(model).to("jax")
    function = compiled(other, keep)
    for _ in range(3):
        x = torch.randn(2, 2, 8, 8)
        model(x).square().sum().backward()
        function(x.to("jax")).square().sum().backward()
    torch.testing.assert_close(gradients(other), gradients(model), rtol=1e-3, atol=1e-3)
    for found, wanted in zip(other.buffers(), model.buffers(), strict=True):
        torch.testing.assert_close(found.cpu(), wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("keep", WAYS)
def test_calls_may_be_nested_and_backward_repeated(keep):
    model = Block().to("jax")
    function = compiled(model, keep)
    first, second = (torch.randn(2, 5, 8, device="jax", requires_grad=True) for _ in range(2))
    losses = [function(first).sum(), function(second).square().sum()]
    losses[0].backward(retain_graph=True)
    once = first.grad.clone()
    losses[1].backward()
    losses[0].backward()
    torch.testing.assert_close(first.grad.cpu(), 2 * once.cpu())
    eager = torch.autograd.grad(model(second).square().sum(), second)[0]
    torch.testing.assert_close(second.grad.cpu(), eager.cpu(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("keep", WAYS)
def test_a_result_that_is_kept_may_not_be_written_to(keep):
    def function(x):
        y = (x * 2).exp()
        return y, y.sin().cos().exp().tanh()

    x = torch.randn(3, device="jax", requires_grad=True)
    shown, result = compiled(function, keep)(x)
    torch.testing.assert_close(shown.cpu(), (x.detach().cpu() * 2).exp())
    with torch.no_grad():
        shown.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        result.sum().backward()


def test_what_was_kept_is_freed():
    model, x = nn.Sequential(Block(64), Block(64)).to("jax"), torch.randn(8, 50, 64, device="jax")
    function = compiled(model)

    def live():
        gc.collect()
        return sum(array.nbytes for array in jax.live_arrays())

    function(x).sum().backward()
    before = live()
    loss = function(x).sum()
    assert live() > before + 8 * 50 * 64 * 4 * 10
    loss.backward()
    assert live() < before + 10_000
    dropped = function(x).sum()
    del dropped
    assert live() < before + 10_000


def test_checkpoints_around_a_compiled_block():
    model, x = Block().to("jax"), torch.randn(2, 5, 8, device="jax", requires_grad=True)
    function = compiled(model)
    checkpoint(function, x, use_reentrant=False).square().sum().backward()
    wanted = torch.autograd.grad(model(x).square().sum(), x)[0]
    torch.testing.assert_close(x.grad.cpu(), wanted.cpu(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("keep", WAYS)
def test_hooks_that_copy_what_is_saved(keep):
    model, x = Block().to("jax"), torch.randn(2, 5, 8, device="jax", requires_grad=True)
    with torch.autograd.graph.save_on_cpu():
        loss = compiled(model, keep)(x).square().sum()
    loss.backward()
    wanted = torch.autograd.grad(model(x).square().sum(), x)[0]
    torch.testing.assert_close(x.grad.cpu(), wanted.cpu(), rtol=1e-4, atol=1e-5)


def test_hooks_that_come_later_are_refused():
    model, x = Block().to("jax"), torch.randn(2, 5, 8, device="jax", requires_grad=True)
    function = compiled(model)
    function(x).sum().backward()
    with torch.autograd.graph.save_on_cpu(), pytest.raises(IsthmusError, match='"keep": "apart"'):
        function(x)
    function(x).sum().backward()


@pytest.mark.parametrize("keep", WAYS)
@pytest.mark.filterwarnings("ignore:.*runs outside the compiled programs")
def test_graphs_that_are_cut(keep):
    @torch.library.custom_op("keeping::doubled", mutates_args=())
    def doubled(x: torch.Tensor) -> torch.Tensor:
        return x * 2

    doubled.register_fake(torch.empty_like)
    doubled.register_autograd(lambda ctx, g: g * 2)

    def function(x):
        y = (x.sin() * x.cos()).exp()
        return doubled(y.tanh() * y).sin() * y.sigmoid()

    x = torch.randn(4, device="jax", requires_grad=True)
    compiled(function, keep)(x).sum().backward()
    wanted = torch.autograd.grad(function(x).sum(), x)[0]
    torch.testing.assert_close(x.grad.cpu(), wanted.cpu())


def test_sizes_that_change_and_other_devices_keep_apart():
    model = Block()
    function = compiled(model)
    x = torch.randn(2, 5, 8, requires_grad=True)
    function(x).square().sum().backward()
    wanted = torch.autograd.grad(model(x).square().sum(), x)[0]
    torch.testing.assert_close(x.grad, wanted, rtol=1e-4, atol=1e-5)
    dynamic = torch.compile(Block().to("jax"), backend="isthmus", dynamic=True)
    for batch in (2, 3, 4):
        dynamic(torch.randn(batch, 5, 8, device="jax")).sum().backward()


@pytest.mark.parametrize("keep", WAYS)
def test_compiled_autograd_takes_what_was_kept(keep):
    model, x = Block().to("jax"), torch.randn(2, 5, 8, device="jax", requires_grad=True)
    with torch._dynamo.compiled_autograd._enable(torch.compile(backend="isthmus")):
        compiled(model, keep)(x).square().sum().backward()
    wanted = torch.autograd.grad(model(x).square().sum(), x)[0]
    torch.testing.assert_close(x.grad.cpu(), wanted.cpu(), rtol=1e-4, atol=1e-5)


def test_a_number_of_the_cpu_beside():
    model, x, number = (
        Block().to("jax"),
        torch.randn(2, 5, 8, device="jax", requires_grad=True),
        torch.tensor(2.0),
    )
    compiled(lambda x, n: model(x) * n)(x, number).sum().backward()
    wanted = torch.autograd.grad((model(x) * 2).sum(), x)[0]
    torch.testing.assert_close(x.grad.cpu(), wanted.cpu(), rtol=1e-4, atol=1e-5)


class Images(nn.Module):
    """Convolutions, batch norm, pooling and a residual path: what images go through."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 8, 3, padding=1, bias=False)
        self.norm, self.head = nn.BatchNorm2d(8), nn.Linear(8, 4)

    def forward(self, x):
        x = nn.functional.max_pool2d(self.first(x).relu(), 2)
        return self.head((self.norm(self.second(x)).relu() + x).mean((2, 3)))


@pytest.mark.parametrize("platform", ["cpu", "gpu"])
def test_images_are_saved_with_their_channels_last_on_gpus(platform, monkeypatch):
    asked = []
    monkeypatch.setattr(returns, "platform", lambda: asked.append(1) or platform)
    torch.manual_seed(0)
    model = Images().double()
    ours = copy.deepcopy(model).to("jax")
    x = torch.randn(3, 3, 8, 6, dtype=torch.float64)
    compiled = torch.compile(ours, backend="isthmus", options={"fallback": "error"})
    model(x).square().sum().backward()
    compiled(x.to("jax")).square().sum().backward()
    assert asked
    for (name, p), q in zip(model.named_parameters(), ours.parameters(), strict=True):
        assert torch.allclose(p.grad, q.grad.cpu()), name


def test_strides_with_channels_last():
    x = torch.empty(2, 3, 4, 5).contiguous(memory_format=torch.channels_last)
    assert channels_last_strides((2, 3, 4, 5)) == x.stride()


@pytest.mark.parametrize("fallback", ["error", "cpu"])
def test_graphs_of_cpu_tensors_keep_theirs_in_one_tensor_of_the_device(fallback):
    def loss_of(model, x):
        y = model(x)
        if (
            fallback == "cpu"
        ):  # an op that nothing lowers cuts the graph, and what is kept crosses between programs
            y = y * torch.geqrf(y.detach()[0])[0].sum().sin()
        return y.square().mean()

    model = Block()
    ours = copy.deepcopy(model)
    x = torch.randn(2, 4, 8)
    run = compiled(loss_of, fallback=fallback)
    for _ in range(2):
        loss = run(ours, x)
        kept = [tensor for tensor in saved_by(loss) if saved_tensors.contents_of(tensor) is not None]
        assert [tensor.device.type for tensor in kept] == ["jax"]
        loss.backward()
        loss_of(model, x).backward()
        for a, b in zip(gradients(ours), gradients(model), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
