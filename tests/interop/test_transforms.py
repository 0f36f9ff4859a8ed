"""What torch does around ops: autograd in all its forms, torch.func, autocast, checkpoints, hooks."""

import copy
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

import isthmus

X = torch.linspace(-2, 2, 12).reshape(3, 4)
W = torch.linspace(-1, 1, 20).reshape(5, 4)
FUNCTIONS = {
    "grad": torch.func.grad(lambda x: (x.sin() * x).sum()),
    "grad_and_value": torch.func.grad_and_value(lambda x: (x * x).mean()),
    "vmap": torch.func.vmap(lambda x: (W.to(x.device) @ x).tanh()),
    "vmap over columns": torch.func.vmap(lambda x: x.softmax(0), in_dims=1, out_dims=1),
    "vmap of grad": torch.func.vmap(torch.func.grad(lambda x: (x * x * x).sum())),
    "vjp": lambda x: torch.func.vjp(torch.sin, x)[1](x),
    "jvp": lambda x: torch.func.jvp(torch.sin, (x,), (x * 2,)),
    "jvp of a transposed tensor": lambda x: torch.func.jvp(torch.sin, (x.t(),), (x.t().contiguous(),)),
    "jacrev": lambda x: torch.func.jacrev(torch.sin)(x[0]),
    "jacfwd": lambda x: torch.func.jacfwd(lambda y: y.sin() * y.sum())(x[0]),
    "hessian": lambda x: torch.func.hessian(lambda y: (y**3).sum())(x[0]),
    "linearize": lambda x: torch.func.linearize(torch.sin, x)[1](x),
}


def there(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to("jax")


def close(ours: torch.Tensor, theirs: torch.Tensor) -> None:
    torch.testing.assert_close(ours.detach().cpu(), theirs.detach().cpu())


def agree(function, *tensors: torch.Tensor) -> None:
    """Assert that a function gives the same on both devices."""
    ours = torch.utils._pytree.tree_leaves(function(*[there(t) for t in tensors]))
    theirs = torch.utils._pytree.tree_leaves(function(*tensors))
    for a, b in zip(ours, theirs, strict=True):
        assert a.device.type == "jax"
        close(a, b)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_func(name: str) -> None:
    agree(FUNCTIONS[name], X)


def test_vmap_with_randomness() -> None:
    x = torch.zeros(6, 4, device="jax")
    for randomness, rows in (("different", 6), ("same", 1)):
        noise = torch.func.vmap(lambda row: row + torch.rand_like(row), randomness=randomness)(x)
        assert len({tuple(row) for row in noise.tolist()}) == rows


def test_functional_call() -> None:
    model = nn.Linear(4, 2)
    state = {name: value.detach() * 2 for name, value in model.state_dict().items()}
    moved = {name: there(value) for name, value in state.items()}
    ours = torch.func.functional_call(copy.deepcopy(model).to("jax"), moved, there(X))
    close(ours, torch.func.functional_call(model, state, X))


def test_ensemble() -> None:
    models = [nn.Linear(4, 2).to("jax") for _ in range(3)]
    parameters, buffers = torch.func.stack_module_state(models)
    run = torch.func.vmap(lambda p, b, x: torch.func.functional_call(models[0], (p, b), x), (0, 0, None))
    close(run(parameters, buffers, there(X)), torch.stack([model(there(X)) for model in models]))


def test_forward_mode() -> None:
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(there(X), there(X))
        close(torch.autograd.forward_ad.unpack_dual(dual.sin()).tangent, X.cos() * X)


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_checkpoint_draws_the_same_numbers_again(use_reentrant: bool) -> None:
    layer = nn.Linear(4, 4).to("jax")
    found = []
    for wrap in (lambda f, x: f(x), lambda f, x: checkpoint(f, x, use_reentrant=use_reentrant)):
        x = there(X).requires_grad_()
        layer.zero_grad()
        torch.manual_seed(3)
        y = wrap(lambda x: F.dropout(layer(x).tanh(), 0.5), x)
        noise = torch.rand(4, device="jax")
        y.sum().backward()
        assert not torch.equal(torch.rand(4, device="jax"), noise)
        found.append((y, x.grad, layer.weight.grad.clone(), noise))
    for ours, theirs in zip(*found, strict=True):
        assert torch.equal(ours, theirs)


def test_checkpoint_sequential() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4)).to("jax")
    close(checkpoint_sequential(model, 2, there(X), use_reentrant=False), model(there(X)))


def test_autocast_policies() -> None:
    low, wide = torch.bfloat16, torch.float32
    x, h = there(X), there(X).bfloat16()
    with torch.autocast("jax", dtype=low):
        assert torch.is_autocast_enabled("jax")
        assert torch.get_autocast_dtype("jax") == low
        for result in (x @ x.t(), F.linear(x, x), torch.bmm(x[None], x.t()[None]), torch.mv(x, x[0])):
            assert result.dtype == low
        assert F.conv1d(x[None], torch.ones(2, 3, 1, device="jax")).dtype == low
        widened = (h.softmax(-1), h.log_softmax(0), h.exp(), h.pow(2), h.sum(), h.norm(), F.mse_loss(h, h))
        for result in widened:
            assert result.dtype == wide
        assert F.layer_norm(h, (4,)).dtype == wide
        assert h.sum(dtype=low).dtype == low
        assert torch.cat([h, x]).dtype == wide
        assert torch.cat([h, h]).dtype == low
        assert torch.stack([h, x]).dtype == wide
        assert torch.addcmul(h, h, x).dtype == wide
        assert (h + h).dtype == low
        assert (h + x).dtype == wide
        assert h.relu().dtype == low
        assert (x.double() @ x.t().double()).dtype == torch.float64
        with torch.autocast("jax", enabled=False):
            assert (x @ x.t()).dtype == wide
        with pytest.raises(RuntimeError, match="unsafe to autocast"):
            F.binary_cross_entropy(h.sigmoid(), h.sigmoid())
    assert (x @ x.t()).dtype == wide


def test_autocast_trains_as_on_the_cpu() -> None:
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    twin = copy.deepcopy(model).to("jax")
    for device, net in (("cpu", model), ("jax", twin)):
        with torch.autocast(device, dtype=torch.bfloat16):
            out = net(X.to(device))
            assert out.dtype == torch.bfloat16
            loss = F.cross_entropy(out.float(), torch.tensor([0, 1, 0], device=device))
        loss.backward()
        assert net[0].weight.grad.dtype == torch.float32
    torch.testing.assert_close(twin[0].weight.grad.cpu(), model[0].weight.grad, rtol=2**-7, atol=2**-9)


def test_grad_scaler() -> None:
    model = nn.Linear(4, 2).to("jax")
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    scaler = torch.amp.GradScaler("jax", init_scale=8.0)
    before = model.weight.detach().clone()
    scaler.scale(model(there(X)).sum()).backward()
    scaler.unscale_(optimizer)
    close(model.weight.grad, X.sum(0).expand(2, 4))
    scaler.step(optimizer)
    scaler.update()
    close(model.weight, before - 0.1 * there(X).sum(0))
    before = model.weight.detach().clone()
    optimizer.zero_grad()
    scaler.scale(model(there(X) * float("inf")).sum()).backward()
    scaler.step(optimizer)
    scaler.update()
    assert torch.equal(model.weight, before)
    assert scaler.get_scale() == 4.0


@pytest.mark.parametrize("foreach", [True, False])
def test_clip_gradients(foreach: bool) -> None:
    model = nn.Linear(4, 2)
    twin = copy.deepcopy(model).to("jax")
    model(X).pow(2).sum().backward()
    twin(there(X)).pow(2).sum().backward()
    norms = [nn.utils.clip_grad_norm_(m.parameters(), 1.0, foreach=foreach) for m in (twin, model)]
    close(*norms)
    close(twin.weight.grad, model.weight.grad)
    for m in (twin, model):
        nn.utils.clip_grad_value_(m.parameters(), 0.1, foreach=foreach)
    close(twin.weight.grad, model.weight.grad)


def test_parametrizations() -> None:
    for parametrize in (nn.utils.parametrizations.weight_norm, nn.utils.parametrizations.spectral_norm):
        model = parametrize(nn.Linear(4, 2))
        twin = copy.deepcopy(model).to("jax")
        close(twin(there(X)), model(X))
        model(X).pow(2).sum().backward()
        twin(there(X)).pow(2).sum().backward()
        for ours, theirs in zip(twin.parameters(), model.parameters(), strict=True):
            close(ours.grad, theirs.grad)


def test_orthogonal_parametrization_may_use_the_cpu() -> None:
    isthmus.config.fallback = "cpu"
    layer = nn.utils.parametrizations.orthogonal(nn.Linear(4, 4)).to("jax")
    close(layer.weight @ layer.weight.t(), torch.eye(4))
    layer(there(X)).sum().backward()
    assert layer.bias.grad is not None


def test_hooks() -> None:
    model, seen = nn.Linear(4, 2).to("jax"), []
    model.register_forward_pre_hook(lambda module, args: seen.append("before"))
    model.register_forward_hook(lambda module, args, out: seen.append("after"))
    model.register_full_backward_hook(lambda module, grad_in, grad_out: seen.append("backward"))
    model.weight.register_post_accumulate_grad_hook(lambda parameter: seen.append("accumulated"))
    x = there(X).requires_grad_()
    x.register_hook(lambda grad: grad * 2)
    model(x).sum().backward()
    assert sorted(seen) == ["accumulated", "after", "backward", "before"]
    close(x.grad, 2 * model.weight.sum(0).expand(3, 4))


def test_saved_on_the_cpu() -> None:
    x = there(X).requires_grad_()
    with torch.autograd.graph.save_on_cpu():
        y = x.exp()
    y.sum().backward()
    close(x.grad, X.exp())


def test_versions_and_leaves() -> None:
    x = there(X).requires_grad_()
    y = x.exp()
    y.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()
    with pytest.raises(RuntimeError, match="a leaf Variable that requires grad"):
        x.add_(1)
    with pytest.raises(RuntimeError, match="a view of a leaf Variable"):
        x[0].zero_()
    y = x * 2
    y[0] = 0
    y.sum().backward()
    assert x.grad.tolist() == [[0] * 4, [2] * 4, [2] * 4]


def test_grad_modes() -> None:
    with torch.inference_mode():
        x = there(X) * 2
        x.add_(1)
        assert x.is_inference()
    with pytest.raises(RuntimeError, match="inference"):
        x.requires_grad_()
    y = x.clone().requires_grad_()
    with torch.no_grad():
        assert not (y * 2).requires_grad
    z = y * 2
    z.retain_grad()
    z.sum().backward()
    assert z.grad.tolist() == [[1] * 4] * 3
    assert y.grad.tolist() == [[2] * 4] * 3


def test_anomaly_mode_finds_the_nan() -> None:
    x = torch.zeros(1, device="jax", requires_grad=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with torch.autograd.detect_anomaly(), pytest.raises(RuntimeError, match="returned nan values"):
            (x.sqrt() * 0).sum().backward()


def test_double_backward() -> None:
    def second(x: torch.Tensor) -> torch.Tensor:
        x = x.detach().requires_grad_()
        (first,) = torch.autograd.grad((x**3).sum(), x, create_graph=True)
        return torch.autograd.grad(first.sum(), x)[0]

    agree(second, X)


def test_gradcheck() -> None:
    x = there(X.double()).requires_grad_()
    assert torch.autograd.gradcheck(lambda x: x.sin() * x, x)
    assert torch.autograd.gradgradcheck(lambda x: x.tanh(), x)


def test_custom_function() -> None:
    class Twice(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x)
            return x * 2

        @staticmethod
        def backward(ctx, grad):
            (x,) = ctx.saved_tensors
            assert grad.device.type == "jax"
            return grad * x

    x = there(X).requires_grad_()
    Twice.apply(x).sum().backward()
    close(x.grad, X)
