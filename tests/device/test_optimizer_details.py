"""Every optimizer of torch.optim, against itself on the CPU; a changing learning rate compiles nothing."""

import copy
import inspect
import warnings

import pytest
import torch
from torch import nn, optim

from isthmus._runtime import counters

# SparseAdam needs sparse gradients, and the device has no sparse layout.
OPTIMIZERS = {
    "SGD": (optim.SGD, {"lr": 0.1}),
    "SGD momentum": (optim.SGD, {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.01}),
    "SGD dampening": (optim.SGD, {"lr": 0.1, "momentum": 0.9, "dampening": 0.3, "maximize": True}),
    "SGD nesterov": (optim.SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True}),
    "Adam": (optim.Adam, {"lr": 0.01}),
    "Adam amsgrad": (optim.Adam, {"lr": 0.01, "amsgrad": True, "weight_decay": 0.1, "maximize": True}),
    "AdamW": (optim.AdamW, {"lr": 0.01, "weight_decay": 0.1}),
    "AdamW amsgrad": (optim.AdamW, {"lr": 0.01, "amsgrad": True}),
    "Adamax": (optim.Adamax, {"lr": 0.01, "weight_decay": 0.1}),
    "NAdam": (optim.NAdam, {"lr": 0.01, "weight_decay": 0.1}),
    "NAdam decoupled": (optim.NAdam, {"lr": 0.01, "weight_decay": 0.1, "decoupled_weight_decay": True}),
    "RAdam": (optim.RAdam, {"lr": 0.01, "weight_decay": 0.1}),
    "RMSprop": (optim.RMSprop, {"lr": 0.01}),
    "RMSprop centered": (optim.RMSprop, {"lr": 0.01, "centered": True, "momentum": 0.9, "weight_decay": 0.1}),
    "Rprop": (optim.Rprop, {"lr": 0.01}),
    "Adagrad": (optim.Adagrad, {"lr": 0.1, "lr_decay": 0.1, "weight_decay": 0.1}),
    "Adadelta": (optim.Adadelta, {"lr": 1.0, "weight_decay": 0.1}),
    "ASGD": (optim.ASGD, {"lr": 0.1, "weight_decay": 0.1, "t0": 2}),
    "Adafactor": (optim.Adafactor, {"lr": 0.1}),
    "LBFGS": (optim.LBFGS, {"lr": 0.1, "max_iter": 3}),
    "LBFGS line search": (optim.LBFGS, {"lr": 1.0, "max_iter": 3, "line_search_fn": "strong_wolfe"}),
    "Muon": (getattr(optim, "Muon", None), {"lr": 0.01}),
}


def takes(make, name):
    return make is not None and name in inspect.signature(make).parameters


def model_on(device, matrices=False):
    torch.manual_seed(3)
    layers = [nn.Linear(4, 6, bias=not matrices), nn.Tanh(), nn.Linear(6, 3, bias=not matrices)]
    return nn.Sequential(*layers).to(device)


def batches(device, steps, dtype=torch.float32):
    g = torch.Generator().manual_seed(5)
    make = [(torch.randn(8, 4, generator=g), torch.randn(8, 3, generator=g)) for _ in range(steps)]
    return [(x.to(device, dtype), y.to(device, dtype)) for x, y in make]


def train(model, optimizer, steps=5, schedule=None, skip=0):
    device = next(model.parameters()).device
    for x, y in batches(device, skip + steps)[skip:]:

        def closure(x=x, y=y):
            optimizer.zero_grad()
            loss = ((model(x) - y) ** 2).mean()
            loss.backward()
            return loss

        optimizer.step(closure)
        if schedule is not None:
            schedule.step()


def same(model, other):
    for (name, got), want in zip(model.state_dict().items(), other.state_dict().values(), strict=True):
        assert got.device.type == "jax"
        torch.testing.assert_close(got.cpu(), want, msg=lambda m, name=name: f"{name}: {m}")


def pair(name, **options):
    """The same model and optimizer on the CPU, done by its plain loop, and on the device."""
    make, given = OPTIMIZERS[name]
    if make is None:
        pytest.skip("this torch has no Muon")
    plain = {"foreach": False} if takes(make, "foreach") else {}
    cpu, here = model_on("cpu", name == "Muon"), model_on("jax", name == "Muon")
    return (cpu, make(cpu.parameters(), **given, **plain)), (
        here,
        make(here.parameters(), **given, **options),
    )


def same_state(optimizer, other):
    """Moments, sums and steps agree, not only the parameters they lead to."""
    found, wanted = optimizer.state_dict()["state"], other.state_dict()["state"]
    assert found.keys() == wanted.keys()
    for index, state in wanted.items():
        for name, want in state.items():
            if isinstance(want, torch.Tensor):
                got = found[index][name]
                # Some forms keep a counter in a tensor where another keeps it in a number.
                torch.testing.assert_close(torch.as_tensor(got).cpu(), want, check_dtype=False, msg=name)


@pytest.mark.parametrize("foreach", [False, True], ids=["loop", "foreach"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_steps_agree_with_the_cpu(name, foreach):
    if foreach and not takes(OPTIMIZERS[name][0], "foreach"):
        pytest.skip("it has no foreach form")
    options = {"foreach": foreach} if takes(OPTIMIZERS[name][0], "foreach") else {}
    on_cpu, here = pair(name, **options)
    train(*on_cpu)
    train(*here)
    same(here[0], on_cpu[0])
    same_state(here[1], on_cpu[1])


def test_foreach_is_what_torch_picks():
    from torch.optim.optimizer import _default_to_fused_or_foreach

    params = list(model_on("jax").parameters())
    assert _default_to_fused_or_foreach(params, differentiable=False) == (False, True)


@pytest.mark.parametrize("name", [n for n, (make, _) in OPTIMIZERS.items() if takes(make, "capturable")])
@pytest.mark.parametrize("foreach", [False, True], ids=["loop", "foreach"])
def test_capturable(name, foreach):
    on_cpu, here = pair(name, foreach=foreach, capturable=True)
    train(*on_cpu)
    train(*here)
    same(here[0], on_cpu[0])
    same_state(here[1], on_cpu[1])


@pytest.mark.parametrize("name", [n for n, (make, _) in OPTIMIZERS.items() if takes(make, "fused")])
def test_fused(name):
    on_cpu, here = pair(name, fused=True)
    train(*on_cpu)
    train(*here)
    same(here[0], on_cpu[0])
    same_state(here[1], on_cpu[1])


@pytest.mark.parametrize("name", ["SGD", "Adam", "RMSprop"])
def test_differentiable(name):
    make, given = OPTIMIZERS[name]

    def gradient(device):
        start = torch.full((3,), 0.5, device=device, requires_grad=True)
        weight = start.clone()
        weight.grad = torch.linspace(1, 2, 3, device=device) * start
        make([weight], **given, differentiable=True).step()
        (weight**2).sum().backward()
        return start.grad.cpu()

    torch.testing.assert_close(gradient("jax"), gradient("cpu"))


@pytest.mark.parametrize("name", [n for n in OPTIMIZERS if "LBFGS" not in n])
def test_state_survives_a_round_trip(name):
    on_cpu, (model, optimizer) = pair(name)
    train(*on_cpu, steps=4)
    train(model, optimizer, steps=2)
    make, given = OPTIMIZERS[name]
    weights = {k: v.clone() for k, v in model.state_dict().items()}
    state = copy.deepcopy(optimizer.state_dict())
    fresh = model_on("jax", name == "Muon")
    fresh.load_state_dict(weights)
    resumed = make(fresh.parameters(), **given)
    resumed.load_state_dict(state)
    train(fresh, resumed, steps=2, skip=2)
    same(fresh, on_cpu[0])


def test_state_loads_from_the_cpu():
    (cpu, optimizer), (here, other) = pair("Adam")
    train(cpu, optimizer, steps=2)
    here.load_state_dict(cpu.state_dict())
    other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    train(cpu, optimizer, steps=2, skip=2)
    train(here, other, steps=2, skip=2)
    same(here, cpu)


@pytest.mark.parametrize("form", ["loop", "foreach", "fused"])
@pytest.mark.parametrize("name", ["Adam", "AdamW", "SGD momentum", "Adagrad", "RMSprop", "NAdam", "RAdam"])
def test_a_changing_learning_rate_compiles_nothing(name, form):
    make, given = OPTIMIZERS[name]
    if form == "fused" and not takes(make, "fused"):
        pytest.skip("it has no fused form")
    model = model_on("jax")
    optimizer = make(
        model.parameters(),
        **given,
        **({"fused": True} if form == "fused" else {"foreach": form == "foreach"}),
    )
    x, y = batches("jax", 1)[0]
    before = 0
    for step in range(100):
        if step == 10 if name == "RAdam" else step == 2:
            before = counters.counts["compilations"]  # RAdam has another formula from its sixth step on
        optimizer.param_groups[0]["lr"] = 0.01 / (step + 1)
        optimizer.zero_grad()
        ((model(x) - y) ** 2).mean().backward()
        optimizer.step()
    assert counters.counts["compilations"] == before


@pytest.mark.parametrize("norm", [1.0, 2.0, float("inf")])
@pytest.mark.parametrize("foreach", [False, True])
def test_clip_grad_norm(norm, foreach):
    def clipped(device):
        model = model_on(device)
        x, y = batches(device, 1)[0]
        ((model(x) - y) ** 2).mean().backward()
        total = nn.utils.clip_grad_norm_(model.parameters(), 0.1, norm, foreach=foreach)
        return [total.cpu(), *[p.grad.cpu() for p in model.parameters()]]

    torch.testing.assert_close(clipped("jax"), clipped("cpu"))


@pytest.mark.parametrize("foreach", [False, True])
def test_clip_grad_value(foreach):
    def clipped(device):
        model = model_on(device)
        x, y = batches(device, 1)[0]
        ((model(x) - y) ** 2).mean().backward()
        nn.utils.clip_grad_value_(model.parameters(), 0.05, foreach=foreach)
        return [p.grad.cpu() for p in model.parameters()]

    torch.testing.assert_close(clipped("jax"), clipped("cpu"))


AVERAGES = {
    "swa": lambda: {},
    "ema": lambda: {"multi_avg_fn": optim.swa_utils.get_ema_multi_avg_fn(0.9)},
    "ema loop": lambda: {"avg_fn": optim.swa_utils.get_ema_avg_fn(0.9)},
}


@pytest.mark.parametrize("kind", AVERAGES)
def test_averaged_models(kind):
    def averaged(device):
        model = model_on(device)
        average = optim.swa_utils.AveragedModel(model, **AVERAGES[kind]())
        optimizer = optim.SGD(model.parameters(), lr=0.5)
        for step in range(4):
            train(model, optimizer, steps=1, skip=step)
            average.update_parameters(model)
        return [p.detach().cpu() for p in average.parameters()], average.n_averaged.item()

    torch.testing.assert_close(averaged("jax"), averaged("cpu"))


SCHEDULES = {
    "StepLR": lambda o: optim.lr_scheduler.StepLR(o, 2, 0.5),
    "CosineAnnealingLR": lambda o: optim.lr_scheduler.CosineAnnealingLR(o, 10),
    "OneCycleLR": lambda o: optim.lr_scheduler.OneCycleLR(o, 0.1, total_steps=10),
    "LambdaLR": lambda o: optim.lr_scheduler.LambdaLR(o, lambda step: 1 / (step + 1)),
    "ExponentialLR": lambda o: optim.lr_scheduler.ExponentialLR(o, 0.9),
}


@pytest.mark.parametrize("name", SCHEDULES)
def test_schedules(name):
    on_cpu, here = pair("SGD momentum")
    train(*on_cpu, schedule=SCHEDULES[name](on_cpu[1]))
    train(*here, schedule=SCHEDULES[name](here[1]))
    same(here[0], on_cpu[0])


@pytest.mark.parametrize("fused", [False, True])
def test_a_learning_rate_in_a_tensor(fused):
    options = {"fused": True} if fused else {"capturable": True, "foreach": True}
    cpu, here = model_on("cpu"), model_on("jax")
    train(cpu, optim.Adam(cpu.parameters(), lr=0.01, foreach=False))
    train(here, optim.Adam(here.parameters(), lr=torch.tensor(0.01), **options))
    same(here, cpu)


@pytest.mark.parametrize("fused", [False, True], ids=["foreach", "fused"])
@pytest.mark.parametrize("name", ["SGD momentum", "Adam", "AdamW"])
def test_grad_scaler(name, fused):
    make, given = OPTIMIZERS[name]

    def scaled(device, **options):
        model = model_on(device)
        optimizer = make(model.parameters(), **given, **options)
        scaler = torch.amp.GradScaler(device, init_scale=2.0**10, growth_interval=2)
        scales = []
        for step, (x, y) in enumerate(batches(device, 6)):
            optimizer.zero_grad()
            loss = ((model(x) - y) ** 2).mean() * (float("inf") if step == 3 else 1.0)
            scaler.scale(loss).backward()
            if not options:
                scaler.unscale_(optimizer)
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
            scales.append(scaler.get_scale())
        return model, scales

    options = {"fused": True} if fused else {}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        (here, scales), (cpu, want) = scaled("jax", **options), scaled("cpu", **options)
    assert scales == want
    assert want[3] == want[2] / 2
    same(here, cpu)


def test_update_scale_never_overflows():
    for device in ("cpu", "jax"):
        scale, tracker = torch.tensor(3e38, device=device), torch.tensor(1, dtype=torch.int32, device=device)
        torch._amp_update_scale_(scale, tracker, torch.tensor(0.0, device=device), 2.0, 0.5, 2)
        assert scale.item() == torch.tensor(3e38).item()
        assert tracker.item() == 0


def test_foreach_copies_between_devices():
    here = [torch.zeros(3, device="jax"), torch.zeros(2, 2, device="jax")]
    there = [torch.arange(3.0), torch.ones(2, 2)]
    torch._foreach_copy_(here, there)
    assert here[0].tolist() == [0.0, 1.0, 2.0]
    torch._foreach_mul_(here, 2)
    torch._foreach_copy_(there, here)
    assert there[0].tolist() == [0.0, 2.0, 4.0]
    assert there[1].sum().item() == 8


def test_foreach_takes_numbers_from_a_tensor():
    a, b = [torch.ones(2, device="jax"), torch.ones(3, device="jax")], torch.tensor([2.0, 3.0])
    torch._foreach_addcmul_(a, a, a, b)
    assert [t.tolist() for t in a] == [[3.0] * 2, [4.0] * 3]
    with pytest.raises(RuntimeError, match="on CPU"):
        torch._foreach_addcdiv_(a, a, a, b.to("jax"))


def test_foreach_writes_views_that_share_a_storage():
    base = torch.zeros(4, 3, device="jax")
    rows = list(base.unbind(0))
    torch._foreach_add_(rows, [1.0, 2.0, 3.0, 4.0])
    torch._foreach_mul_(rows, rows)
    assert base.tolist() == [[k * k] * 3 for k in (1.0, 2.0, 3.0, 4.0)]
