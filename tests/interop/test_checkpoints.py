"""Checkpoints: torch.save, safetensors and orbax, from torch to JAX and back, with nothing lost on the way."""

from __future__ import annotations

import collections
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
import safetensors.flax
import safetensors.numpy
import safetensors.torch
import torch

import isthmus
from isthmus.errors import IsthmusError
from tests.interpreters import forked

DTYPES = [
    torch.float32,
    torch.float64,
    torch.bfloat16,
    torch.float16,
    torch.int64,
    torch.uint8,
    torch.bool,
    torch.complex64,
]


def every_kind() -> dict[str, torch.Tensor]:
    """Return a tensor of each dtype, with and without dimensions; integers that 32 bits do not hold."""
    found = {str(d).removeprefix("torch."): (torch.arange(4) % 3).to(d).to("jax") for d in DTYPES}
    found |= {f"{name}_scalar": value[2].clone() for name, value in found.items()}
    return {
        **found,
        "large": torch.tensor([2**40 + 1, -(2**62)]).to("jax"),
        "third": torch.tensor(1 / 3).to("jax"),
    }


class Tied(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(5, 3)
        self.norm = torch.nn.BatchNorm1d(3)
        self.head = torch.nn.Linear(3, 5)
        self.head.weight = self.embed.weight
        self.register_buffer("nothing", torch.empty(0))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.norm(self.embed(ids)))


def same(a: dict[str, Any], b: dict[str, Any]) -> None:
    assert a.keys() == b.keys()
    for name in a:
        assert a[name].dtype == b[name].dtype, name
        assert torch.equal(a[name].cpu(), b[name].cpu()), name


def is_tied(model: Tied) -> bool:
    with torch.no_grad():
        model.embed.weight.fill_(3)
    return model.head.weight is model.embed.weight and bool((model.head.weight == 3).all())


def plainly(path: Path) -> Any:
    """Read a checkpoint as a JAX program does."""
    with ocp.StandardCheckpointer() as checkpointer:
        return checkpointer.restore(path)


def plainly_saved(path: Path, tree: Any) -> None:
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(path, tree)
        checkpointer.wait_until_finished()


def test_orbax_keeps_every_kind_of_tensor(tmp_path: Path) -> None:
    assert not jax.config.read("jax_enable_x64")
    want = every_kind()
    isthmus.checkpoint.save(tmp_path / "a", want)
    there = plainly(tmp_path / "a")
    for name, tensor in want.items():
        array = np.asarray(isthmus.to_jax(tensor))
        assert (there[name].dtype, there[name].shape) == (array.dtype, array.shape)
        assert there[name].tobytes() == array.tobytes(), name
    found = isthmus.checkpoint.load(tmp_path / "a")
    same(found, want)
    assert {t.device.type for t in found.values()} == {"jax"}


@pytest.mark.parametrize("lazy", [False, True], ids=["eager", "lazy"])
def test_orbax_nests_names_and_keeps_numbers(tmp_path: Path, lazy: bool) -> None:
    isthmus.set_mode("lazy" if lazy else "eager")
    try:
        weight = torch.arange(6.0, device="jax").reshape(2, 3) * 2
        state = {
            "model": {"0.weight": weight, "block.1.bias": weight.t()[1], "cpu": torch.ones(1)},
            "step": 7,
            "rates": [0.1, (0.9, 0.999), None, True, "cosine"],
            3: {"seed": 2**40, "array": jnp.ones(2), "empty": {}},
        }
        isthmus.checkpoint.save(tmp_path / "a", state)
    finally:
        isthmus.set_mode("eager")
    there = plainly(tmp_path / "a")
    np.testing.assert_array_equal(there["model"]["0"]["weight"], 2 * np.arange(6.0).reshape(2, 3))
    assert there["model"]["block"]["1"]["bias"].tolist() == [2, 8]
    assert there["model"]["cpu"].tolist() == [1]
    assert there["step"] == 7
    assert there["rates"] == [0.1, [0.9, 0.999], None, True, "cosine"]
    assert (there["3"]["seed"], there["3"]["empty"]) == (2**40, {})
    rest = isthmus.checkpoint.load(tmp_path / "a", {"model": {"0.weight": weight.zero_()}})
    assert weight.sum().item() == 30
    assert rest["model"].keys() == {"block", "cpu"}
    assert (rest["step"], rest["rates"], rest["3"]["seed"]) == (7, there["rates"], 2**40)


def trained(optimizer: Any, **options: Any) -> tuple[Tied, Any, Any]:
    model = Tied().to("jax")
    made = optimizer(model.parameters(), lr=0.1, **options)
    schedule = torch.optim.lr_scheduler.MultiStepLR(made, [1, 4])
    for _ in range(2):
        step(model, made)
        schedule.step()
    return model, made, schedule


def step(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    model(torch.tensor([0, 1, 4, 1]).to("jax")).square().mean().backward()
    optimizer.step()


@pytest.mark.parametrize(
    ("optimizer", "options"),
    [
        (torch.optim.Adam, {}),
        (torch.optim.SGD, {"momentum": 0.9}),
        (torch.optim.SGD, {}),
        (torch.optim.Adagrad, {}),
    ],
)
def test_a_torch_program_resumes_from_orbax(tmp_path: Path, optimizer: Any, options: Any) -> None:
    model, made, schedule = trained(optimizer, **options)
    isthmus.checkpoint.save(
        tmp_path / "a", {"model": model, "optimizer": made, "schedule": schedule, "epoch": 2}
    )
    assert plainly(tmp_path / "a")["model"].keys() == {"embed", "norm", "head"}

    other = Tied().to("jax")
    fresh = optimizer(other.parameters(), lr=1.0, **options)
    later = torch.optim.lr_scheduler.MultiStepLR(fresh, [1, 4])
    into = {"model": other, "optimizer": fresh, "schedule": later}
    assert isthmus.checkpoint.load(tmp_path / "a", into) == {"epoch": 2}
    same(other.state_dict(), model.state_dict())
    for p, q in zip(model.parameters(), other.parameters(), strict=True):
        kept, found = made.state[p], fresh.state[q]
        assert kept.keys() == found.keys()
        for name in kept:
            if kept[name] is not None:
                assert kept[name].device == found[name].device, name
    for kept, found in zip(made.param_groups, fresh.param_groups, strict=True):
        assert {k: repr(found[k]) for k in found if k != "params"} == {
            k: repr(kept[k]) for k in kept if k != "params"
        }
    assert later.state_dict() == schedule.state_dict()
    assert isinstance(later.milestones, collections.Counter)
    for _ in range(3):  # over a milestone
        for m, o, s in ((model, made, schedule), (other, fresh, later)):
            step(m, o)
            s.step()
    same(other.state_dict(), model.state_dict())
    assert is_tied(other)


def test_tied_weights_that_came_apart_are_noticed(tmp_path: Path) -> None:
    model = Tied().to("jax")
    isthmus.checkpoint.save(tmp_path / "a", model)
    tree = plainly(tmp_path / "a")
    assert tree["head"].keys() == {"bias"}
    tree["head"]["weight"] = tree["embed"]["weight"]
    plainly_saved(tmp_path / "b", tree)
    assert isthmus.checkpoint.load(tmp_path / "b", model) == {}
    tree["head"]["weight"] = tree["embed"]["weight"] + 1
    plainly_saved(tmp_path / "c", tree)
    with pytest.raises(IsthmusError, match=r"embed.weight and head.weight are one tensor here"):
        isthmus.checkpoint.load(tmp_path / "c", model)


def test_a_checkpoint_of_jax_fills_torch(tmp_path: Path) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.BatchNorm1d(2)).to("jax", torch.bfloat16)
    tree = {
        "0": {"weight": jnp.ones((2, 3)), "bias": jnp.zeros(2, jnp.bfloat16)},
        "1": {"weight": jnp.ones(2), "bias": np.zeros(2, np.float64), "num_batches_tracked": 7}
        | {"running_mean": jnp.zeros(2), "running_var": jnp.ones(2)},
    }
    tree["1"]["num_batches_tracked"] = jnp.int32(7)
    plainly_saved(tmp_path / "a", tree)
    isthmus.checkpoint.load(tmp_path / "a", model)
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    assert model[1].num_batches_tracked.dtype == torch.int64
    assert model[1].num_batches_tracked.item() == 7
    assert model[0].weight.sum().item() == 6


def test_mistakes_are_named(tmp_path: Path) -> None:
    model = torch.nn.Linear(2, 2).to("jax")
    isthmus.checkpoint.save(tmp_path / "a", {"model": model})
    for call, error, match in [
        (lambda: isthmus.checkpoint.save(tmp_path / "a", {"x": 1}), ValueError, "already exists"),
        (
            lambda: isthmus.checkpoint.save(tmp_path / "b", {"x": {"y": object()}}),
            IsthmusError,
            r"state\.x\.y is a object",
        ),
        (
            lambda: isthmus.checkpoint.save(tmp_path / "b", {"a.b": 1, "a": {"b": 2}}),
            IsthmusError,
            "a is the name",
        ),
        (
            lambda: isthmus.checkpoint.save(tmp_path / "b", {"a": 1, "a.b": 2}),
            IsthmusError,
            r"a\.b is the name",
        ),
        (
            lambda: isthmus.checkpoint.load(tmp_path / "a", {"other": model}),
            KeyError,
            "no other; it has model",
        ),
        (lambda: isthmus.checkpoint.load(tmp_path / "a", model), RuntimeError, "Missing key"),
        (
            lambda: isthmus.checkpoint.load(tmp_path / "a", {"model": torch.nn.Linear(2, 3)}),
            RuntimeError,
            "size mismatch",
        ),
        (
            lambda: isthmus.checkpoint.load(tmp_path / "a", {"model.weight": torch.ones(3, 2, 2)}),
            IsthmusError,
            r"weight is \(2, 2\) in the checkpoint and \(3, 2, 2\) here",
        ),
        (lambda: isthmus.checkpoint.load(tmp_path / "a", {"model": 3}), TypeError, "is a int"),
        (lambda: isthmus.checkpoint.load(tmp_path / "a", {"model.bias": model}), IsthmusError, "not a dict"),
    ]:
        with pytest.raises(error, match=match):
            call()
    isthmus.checkpoint.save(tmp_path / "a", {"x": 1}, force=True)
    assert isthmus.checkpoint.load(tmp_path / "a") == {"x": 1}


JAX_PROGRAM = """
import sys
import jax, jax.numpy as jnp, optax
import orbax.checkpoint as ocp

def loss(params):
    x = jnp.linspace(-1, 1, 12).reshape(4, 3)
    hidden = jnp.tanh(x @ params["0"]["weight"].T + params["0"]["bias"])
    return ((hidden @ params["2"]["weight"].T + params["2"]["bias"]) ** 2).mean()

source, target, transformation = sys.argv[1:]
transformation = eval(transformation)
with ocp.StandardCheckpointer() as checkpointer:
    params = checkpointer.restore(source)["model"]
    like = {"model": params, "moments": transformation.init(params), "step": 0}
    state = checkpointer.restore(source, like)
    params, moments = state["model"], state["moments"]
    for _ in range(3):
        updates, moments = transformation.update(jax.grad(loss)(params), moments, params)
        params = optax.apply_updates(params, updates)
    checkpointer.save(target, {"model": params, "moments": moments, "step": state["step"] + 3})
    checkpointer.wait_until_finished()
assert not {"torch", "isthmus"} & set(sys.modules)
"""

# Adam divides by moments that may be next to nothing, so that a last bit of float32 becomes many.
RESUMED = {
    "adam": (lambda ps: torch.optim.Adam(ps, lr=0.05), "optax.adam(0.05)"),
    "adamw": (
        lambda ps: torch.optim.AdamW(ps, lr=0.05, weight_decay=0.1),
        "optax.adamw(lambda count: 0.05, weight_decay=0.1)",
    ),
    "sgd": (lambda ps: torch.optim.SGD(ps, lr=0.05, momentum=0.9), "optax.sgd(0.05, momentum=0.9)"),
    "nesterov": (
        lambda ps: torch.optim.SGD(ps, lr=0.05, momentum=0.9, nesterov=True),
        "optax.sgd(0.05, momentum=0.9, nesterov=True)",
    ),
}


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[pytest.mark.slow] * (n in ("adamw", "nesterov"))) for n in RESUMED]
)
def test_a_jax_program_resumes_a_torch_one_and_back(tmp_path: Path, name: str) -> None:
    make, transformation = RESUMED[name]
    dtype = torch.float64 if "adam" in name else torch.float32

    def program() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Tanh(), torch.nn.Linear(4, 2))
        return model.to("jax", dtype), make(model.parameters())

    def train(model: torch.nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> None:
        for _ in range(steps):
            optimizer.zero_grad()
            x = torch.linspace(-1, 1, 12, device="jax", dtype=dtype).reshape(4, 3)
            model(x).square().mean().backward()
            optimizer.step()

    model, optimizer = program()
    train(model, optimizer, 3)
    moments = isthmus.checkpoint.to_optax(eval(transformation), model, optimizer)
    isthmus.checkpoint.save(tmp_path / "torch", {"model": model, "moments": moments, "step": 3})
    ran = subprocess.run(
        [sys.executable, "-c", JAX_PROGRAM, str(tmp_path / "torch"), str(tmp_path / "jax"), transformation],
        cwd=tmp_path,
        env={**os.environ, "JAX_ENABLE_X64": str(int(dtype == torch.float64))},
        capture_output=True,
        text=True,
    )
    assert ran.returncode == 0, ran.stderr
    back, again = program()
    rest = isthmus.checkpoint.load(tmp_path / "jax", {"model": back})
    assert rest["step"] == 6
    isthmus.checkpoint.from_optax(rest["moments"], back, again)
    train(model, optimizer, 3)
    for _ in range(2):  # after the six steps, and after two more
        for (key, found), want in zip(back.state_dict().items(), model.state_dict().values(), strict=True):
            torch.testing.assert_close(
                found, want, rtol=1e-5, atol=1e-8, msg=lambda m, key=key: f"{key}: {m}"
            )
        train(model, optimizer, 2)
        train(back, again, 2)
    for p, q in zip(model.parameters(), back.parameters(), strict=True):
        assert optimizer.state[p].keys() == again.state[q].keys()


def test_states_without_a_counterpart_are_refused() -> None:
    model = torch.nn.Linear(2, 2).to("jax")
    model(torch.ones(1, 2, device="jax")).sum().backward()

    def stepped(make: Any, **options: Any) -> torch.optim.Optimizer:
        optimizer = make(model.parameters(), lr=0.1, **options)
        optimizer.step()
        return optimizer

    params = isthmus.to_jax(dict(model.named_parameters()))
    adam, sgd = stepped(torch.optim.Adam), stepped(torch.optim.SGD, momentum=0.9)
    to_optax, from_optax = isthmus.checkpoint.to_optax, isthmus.checkpoint.from_optax
    for call, match in [
        (lambda: to_optax(optax.sgd(0.1), model, adam), "exp_avg, exp_avg_sq the optax state must have one"),
        (lambda: to_optax(optax.adam(0.1), model, sgd), "momentum_buffer the optax state must have one"),
        (lambda: to_optax(optax.adam(0.1), model, stepped(torch.optim.SGD)), "for torch's nothing"),
        (
            lambda: to_optax(optax.adam(0.1), model, stepped(torch.optim.Adam, amsgrad=True)),
            "Adam with amsgrad",
        ),
        (lambda: to_optax(optax.adam(0.1), model, stepped(torch.optim.RMSprop)), "RMSprop"),
        (lambda: to_optax(optax.sgd(lambda n: 0.1, momentum=0.9), model, sgd), "counts steps"),
        (lambda: to_optax(optax.chain(optax.adam(0.1), optax.ema(0.9)), model, adam), "state other than"),
        (lambda: from_optax(optax.sgd(0.1, 0.9).init(params), model, adam), "must have one"),
        (
            lambda: from_optax(optax.adam(0.1).init({"bias": params["bias"]}), model, adam),
            "nothing for weight",
        ),
        (
            lambda: from_optax(optax.adam(0.1).init({**params, "weight": jnp.ones(2)}), model, adam),
            r"weight is \(2, 2\)",
        ),
    ]:
        with pytest.raises(IsthmusError, match=match):
            call()


def test_safetensors_both_ways(tmp_path: Path) -> None:
    want, file = {k: v for k, v in every_kind().items() if not v.is_complex()}, tmp_path / "a.safetensors"
    safetensors.torch.save_file(want, file)
    same(safetensors.torch.load_file(file), want)
    there = safetensors.flax.load_file(file)
    assert there["bfloat16"].dtype == jnp.bfloat16
    assert there["third"].shape == ()
    for name in ("float32", "bfloat16", "float16", "uint8", "bool", "third"):
        np.testing.assert_array_equal(np.asarray(there[name]), np.asarray(isthmus.to_jax(want[name])))
    safetensors.flax.save_file({"weight": jnp.full((2, 3), 2, jnp.bfloat16), "bias": jnp.ones(2)}, file)
    model = torch.nn.Linear(3, 2).to("jax")
    model.load_state_dict(safetensors.torch.load_file(file))
    assert model(torch.ones(1, 3, device="jax")).tolist() == [[7, 7]]


def test_safetensors_of_a_model_with_tied_weights(tmp_path: Path) -> None:
    model, other, file = Tied().to("jax"), Tied().to("jax"), tmp_path / "a.safetensors"
    with pytest.raises(RuntimeError, match="share memory"):
        safetensors.torch.save_file(model.state_dict(), file)
    safetensors.torch.save_model(model, file)
    assert safetensors.torch.load_model(other, file) == (set(), [])
    same(other.state_dict(), model.state_dict())
    assert is_tied(other)


@pytest.mark.parametrize("where", ["jax", "cpu"])
def test_torch_save(tmp_path: Path, where: str) -> None:
    model, optimizer, _ = trained(torch.optim.Adam)
    state = {
        "kinds": every_kind(),
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "step": 2,
    }
    torch.save(state, tmp_path / "a.pt")
    found = torch.load(tmp_path / "a.pt", map_location=where)
    assert {t.device.type for t in found["kinds"].values()} == {where}
    same(found["kinds"], state["kinds"])
    same(found["model"], model.state_dict())
    found["model"]["head.weight"].zero_()
    assert found["model"]["embed.weight"].count_nonzero().item() == 0
    other = Tied().to("jax")
    other.load_state_dict(torch.load(tmp_path / "a.pt")["model"])
    fresh = torch.optim.Adam(other.parameters())
    fresh.load_state_dict(found["optimizer"])
    step(model, optimizer)
    step(other, fresh)
    same(other.state_dict(), model.state_dict())


def test_orbax_is_asked_for_by_name() -> None:
    code = """
import sys
sys.modules["orbax"] = None  # importing it fails
import isthmus
try:
    isthmus.checkpoint.load("nowhere")
except ImportError as error:
    print(error)
"""
    ran = forked(code)
    assert "pip install orbax-checkpoint" in ran.stdout, ran.stderr
