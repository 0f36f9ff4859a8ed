"""Tensors and modules as objects: copied, saved, loaded, shared, moved, cast."""

import contextlib
import copy
import gc
import io
import pickle
import weakref
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import safetensors.torch
import torch
from torch import nn

import isthmus
from tests.interpreters import forked_early


def equal(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.dtype == b.dtype and torch.equal(a.cpu(), b.cpu())


def saved(value: object, **options: object) -> io.BytesIO:
    file = io.BytesIO()
    torch.save(value, file, **options)
    file.seek(0)
    return file


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(5, 4), nn.Linear(4, 5, bias=False)
        self.head.weight = self.embed.weight


def test_deepcopy_keeps_sharing_and_shares_nothing() -> None:
    base = torch.arange(12.0).reshape(3, 4).to("jax")
    new, row = copy.deepcopy([base, base[1]])
    assert equal(new, base)
    assert equal(row, base[1])
    row.zero_()
    assert not new[1].any()
    assert base[1].tolist() == [4, 5, 6, 7]
    base.add_(1)
    assert new[0].tolist() == [0, 1, 2, 3]


def test_deepcopy_keeps_gradient_layout_and_kind() -> None:
    weight = torch.randn(3, 4).to("jax").requires_grad_()
    (weight * weight).sum().backward()
    new = copy.deepcopy(weight)
    assert new.requires_grad
    assert equal(new.grad, weight.grad)
    assert new.grad is not weight.grad
    assert isinstance(copy.deepcopy(nn.Parameter(weight.detach())), nn.Parameter)
    turned = torch.randn(3, 4).to("jax").t()
    assert copy.deepcopy(turned).stride() == turned.stride()
    assert equal(copy.deepcopy(torch.tensor([1 + 2j]).to("jax").conj()), torch.tensor([1 - 2j]))
    with pytest.raises(RuntimeError, match="graph leaves"):
        copy.deepcopy(weight * 2)


def test_copy_shares() -> None:
    base = torch.zeros(3).to("jax")
    copy.copy(base).add_(1)
    assert base.tolist() == [1, 1, 1]


def test_pickle() -> None:
    turned = torch.arange(6.0).reshape(2, 3).to("jax").t()
    back = pickle.loads(pickle.dumps(turned))
    assert back.device.type == "jax"
    assert back.stride() == turned.stride()
    assert equal(back, turned)
    back.zero_()
    assert turned.sum() == 15


@pytest.mark.parametrize("weights_only", [True, False])
@pytest.mark.parametrize(
    ("source", "location"), [("jax", "cpu"), ("cpu", "jax"), ("jax", None), ("jax", "jax:0")]
)
def test_save_and_load(source: str, location: str | None, weights_only: bool) -> None:
    base = nn.Parameter(torch.randn(3, 4).to(source))
    state = {
        "base": base,
        "part": base.detach()[1:],
        "turned": torch.arange(6).reshape(2, 3).to(source).t(),
        "half": torch.ones((), dtype=torch.bfloat16).to(source),
        "complex": torch.tensor([1 + 2j]).to(source),
        "flags": torch.tensor([True, False]).to(source),
        "empty": torch.empty(0, 3).to(source),
    }
    back = torch.load(saved(state), map_location=location, weights_only=weights_only)
    for name, tensor in state.items():
        assert back[name].device.type == torch.device(location or source).type, name
        assert equal(back[name], tensor), name
        assert back[name].stride() == tensor.stride(), name
    assert isinstance(back["base"], nn.Parameter)
    assert back["base"].requires_grad
    back["part"].zero_()
    assert not back["base"][1:].any()


def test_old_file_format() -> None:
    base = torch.arange(6.0).reshape(2, 3).to("jax")
    back, row = torch.load(saved([base, base[1]], _use_new_zipfile_serialization=False))
    assert equal(back, base)
    assert back.device.type == "jax"
    row.zero_()
    assert not back[1].any()


def test_saved_here_loads_without_the_device(tmp_path: Path) -> None:
    torch.save(nn.Linear(2, 2).to("jax").state_dict(), tmp_path / "file.pt")
    state = torch.load(tmp_path / "file.pt", map_location=lambda storage, location: storage)
    assert state["weight"].device.type == "cpu"
    assert torch.load(tmp_path / "file.pt", map_location="jax", mmap=True)["weight"].device.type == "jax"


def test_storages() -> None:
    a, b = torch.zeros(4).to("jax"), torch.zeros(4).to("jax")
    assert a.data_ptr() != b.data_ptr()
    assert a.data_ptr() == a.view(2, 2).data_ptr() == a.untyped_storage().data_ptr()
    assert a[1:].data_ptr() - a.data_ptr() == 4
    storage = a.untyped_storage()
    assert storage.nbytes() == storage.size() == len(storage) == 16
    assert storage.device.type == "jax"
    assert torch.arange(2, dtype=torch.uint8).to("jax").untyped_storage().tolist() == [0, 1]
    clone = storage.clone()
    clone.fill_(255)
    assert a.tolist() == [0, 0, 0, 0]
    storage.copy_(torch.ones(4).untyped_storage())
    assert a.tolist() == [1, 1, 1, 1]
    new = torch.empty(0, dtype=torch.int16, device="jax").set_(torch.UntypedStorage(8, device="jax"))
    assert new.shape == (4,)
    storage.resize_(32)
    assert storage.nbytes() == 32
    assert a.tolist() == [1, 1, 1, 1]


def test_state_dict() -> None:
    def make() -> nn.Module:
        return nn.Sequential(nn.Linear(4, 2), nn.BatchNorm1d(2)).to("jax")

    one, two = make(), make()
    two.load_state_dict(one.state_dict())
    assert equal(two[0].weight, one[0].weight)
    assert two[0].weight is not one[0].weight
    state = {name: value.cpu() for name, value in one.state_dict().items()}
    two.load_state_dict(state)
    assert two[0].weight.device.type == "jax"
    two.load_state_dict(state, assign=True)
    assert two[0].weight.device.type == "cpu"
    assert two[0].weight.data_ptr() == state["0.weight"].data_ptr()
    here = make().cpu()
    here.load_state_dict(one.state_dict())
    assert here[0].weight.device.type == "cpu"
    assert equal(here[0].weight, one[0].weight)
    with pytest.raises(RuntimeError, match="Missing key"):
        two.load_state_dict({"0.weight": state["0.weight"]})
    with pytest.raises(RuntimeError, match="size mismatch"):
        two.load_state_dict({**state, "0.weight": torch.zeros(1, 1)})


def test_safetensors(tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)).to("jax")
    safetensors.torch.save_file(model.state_dict(), file)
    back = safetensors.torch.load_file(file)
    assert all(equal(back[name], value) for name, value in model.state_dict().items())
    new = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)).to("jax")
    safetensors.torch.load_model(new, file)
    assert equal(new[1].weight, model[1].weight)


def test_safetensors_knows_tied_weights(tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    model = Tied().to("jax")
    assert model.head.weight is model.embed.weight
    with pytest.raises(RuntimeError, match="share memory"):
        safetensors.torch.save_file(model.state_dict(), file)
    safetensors.torch.save_model(model, str(file))
    assert list(safetensors.torch.load_file(file)) == ["embed.weight"]
    new = Tied().to("jax")
    safetensors.torch.load_model(new, file)
    assert equal(new.head.weight, model.head.weight)
    assert new.head.weight is new.embed.weight


def test_tied_weights_stay_tied() -> None:
    model = Tied().to("jax")
    for new in (copy.deepcopy(model), torch.load(saved(model), weights_only=False)):
        assert new.head.weight is new.embed.weight
        assert new.head.weight.device.type == "jax"
        assert equal(new.head.weight, model.head.weight)


def test_modules_move_and_cast() -> None:
    model = nn.Linear(4, 2)
    weight = model.weight.detach().clone()
    assert copy.deepcopy(model).to("jax").half().weight.dtype == torch.float16
    assert copy.deepcopy(model).jax().bfloat16().weight.dtype == torch.bfloat16
    assert copy.deepcopy(model).to("jax", torch.float64).float().weight.dtype == torch.float32
    back = copy.deepcopy(model).to("jax").cpu()
    assert back.weight.device.type == "cpu"
    assert torch.equal(back.weight, weight)
    parameter = model.weight
    assert model.to("jax").weight is parameter
    assert parameter.device.type == "jax"
    empty = nn.Linear(2, 2, device="meta").to_empty(device="jax")
    assert empty.weight.device.type == "jax"
    assert nn.Linear(2, 2, device="jax").weight.is_jax


def test_moving_a_module_keeps_its_parameters() -> None:
    model = nn.LSTM(3, 3)
    parameters = list(model.parameters())
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    parameters[0].grad = torch.ones_like(parameters[0])
    model.to("jax")
    assert all(new is old for new, old in zip(model.parameters(), parameters, strict=True))
    assert all(flat is old for flat, old in zip(model._flat_weights, parameters, strict=True))
    assert parameters[0].grad.device.type == "jax"
    assert parameters[0].is_leaf
    before = parameters[0].detach().clone()
    optimizer.step()
    torch.testing.assert_close(parameters[0].detach(), before - 0.1)
    assert next(model.cpu().parameters()) is parameters[0]
    assert parameters[0].device.type == "cpu"


@pytest.mark.parametrize("mode", ["eager", "lazy"])
def test_a_parameter_others_hold_is_moved_in_place(mode: str) -> None:
    model = nn.Linear(2, 2, bias=False)
    parameter, shown = weakref.ref(model.weight), model.weight.detach()
    with isthmus.lazy() if mode == "lazy" else contextlib.nullcontext():
        model.to("jax")
        assert model.weight is parameter()
        assert model.weight.device.type == "jax"
        assert equal(model.weight, shown)
        assert shown.device.type == "cpu"
        assert model.cpu().weight is parameter()
        assert equal(model.weight, shown)


@pytest.mark.parametrize("mode", ["eager", "lazy"])
def test_data_crosses_devices(mode: str) -> None:
    parameter = nn.Parameter(torch.arange(3.0))
    with isthmus.lazy() if mode == "lazy" else contextlib.nullcontext():
        parameter.data = parameter.data.to("jax") * 2
        assert parameter.is_jax
        assert parameter.is_leaf
        (parameter * parameter).sum().backward()
        assert parameter.grad.tolist() == [0, 4, 8]
        parameter.grad = None
        parameter.data = torch.ones(4)
        parameter.sum().backward()
        assert parameter.grad.device.type == "cpu"
    with torch.inference_mode():
        parameter.data = torch.ones(2, device="jax")
        assert parameter.tolist() == [1, 1]


def test_data_of_another_kind_is_refused_as_torch_does() -> None:
    for other in (torch.eye(2).to_sparse(), torch.ones(2, device="meta")):
        with pytest.raises(RuntimeError, match="incompatible tensor type"):
            torch.ones(2, device="jax").data = other
        with pytest.raises(RuntimeError, match="incompatible tensor type"):
            other.data = torch.ones(2, device="jax")
    assert nn.Linear(2, 2, device="meta").to_empty(device="jax").weight.is_jax


def test_a_parameter_moved_between_compiled_calls() -> None:
    torch._dynamo.reset()
    model = nn.Linear(2, 2)
    parameter, inputs = model.weight, torch.ones(1, 2)
    compiled = torch.compile(model, backend="isthmus")
    here = compiled(inputs)
    model.to("jax")
    assert model.weight is parameter
    torch.testing.assert_close(compiled(inputs.to("jax")).cpu(), here)


FIRST_MOVE = """
import torch
model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.BatchNorm1d(2))
parameters = list(model.parameters())
model.to("jax")
assert all(a is b and a.is_jax for a, b in zip(model.parameters(), parameters, strict=True))
"""


def test_the_first_tensors_of_a_process_may_be_those_of_a_module() -> None:
    ran = forked_early(FIRST_MOVE)
    assert ran.returncode == 0, ran.stderr


def test_parameter_containers() -> None:
    listed = nn.ParameterList([torch.ones(2), torch.ones(2)]).to("jax")
    named = nn.ParameterDict({"a": torch.ones(2)}).to("jax")
    (listed[0] * listed[1] + named["a"]).sum().backward()
    assert named["a"].grad.tolist() == [1, 1]
    model = nn.Linear(4, 2).to("jax")
    vector = nn.utils.parameters_to_vector(model.parameters())
    nn.utils.vector_to_parameters(torch.zeros_like(vector), model.parameters())
    assert not model.weight.any()


def test_optimizers_are_copied_and_saved() -> None:
    model = nn.Linear(4, 2).to("jax")
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(3, 4).to("jax")).sum().backward()
    optimizer.step()
    new = torch.optim.Adam(model.parameters())
    new.load_state_dict(torch.load(saved(optimizer.state_dict())))
    momentum = new.state[model.weight]["exp_avg"]
    assert momentum.device.type == "jax"
    assert equal(momentum, optimizer.state[model.weight]["exp_avg"])
    new.step()
    assert copy.deepcopy(optimizer).state_dict()["state"][0]["step"] == 1


def test_nothing_is_kept_alive() -> None:
    tensor = torch.ones(3).to("jax")
    array = weakref.ref(tensor.untyped_storage()._buffer.value)
    reference = weakref.ref(tensor)
    other = tensor.detach()
    del tensor
    gc.collect()
    assert reference() is None
    assert array() is not None
    assert other.tolist() == [1, 1, 1]
    del other
    gc.collect()
    assert array() is None


def test_threads_run_side_by_side() -> None:
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))

    def work(number: int) -> bool:
        x = torch.full((3, 4), number / 10)
        here, there = copy.deepcopy(model), copy.deepcopy(model).to("jax")
        here(x).sum().backward()
        there(x.to("jax")).sum().backward()
        torch.testing.assert_close(there[0].weight.grad.cpu(), here[0].weight.grad)
        return True

    with ThreadPoolExecutor(6) as pool:
        assert all(pool.map(work, range(40)))


@pytest.mark.parametrize("device", ["cpu", "jax"])
def test_is_set_to_compares_storage_and_layout(device: str) -> None:
    x = torch.arange(6.0, device=device).reshape(2, 3)
    for other in (x, x.view(2, 3), x.detach(), x.view(6).view(2, 3), x.view(torch.int32)):
        assert x.is_set_to(other)
    for other in (x.view(6), x.clone(), x.t(), x[:1], torch.zeros(2, 3, device=device)):
        assert not x.is_set_to(other)
    assert x[1:].is_set_to(x[1:])
    assert not x[1:].is_set_to(x[:1])


@pytest.mark.parametrize("lazy", [False, True])
@pytest.mark.skipif(not hasattr(torch.UntypedStorage, "_swap_data_ptr_"), reason="torch has no such method")
def test_storages_exchange_what_they_hold(lazy: bool) -> None:
    with isthmus.lazy() if lazy else contextlib.nullcontext():
        a, b = torch.arange(4.0, device="jax") + 1, torch.zeros(2, 2, device="jax") - 1
        view = a[1:3]
        a.untyped_storage()._swap_data_ptr_(b.untyped_storage())
        assert view.tolist() == [-1.0, -1.0]
        assert b.tolist() == [[1.0, 2.0], [3.0, 4.0]]
        view.mul_(2)
        assert a.tolist() == [-1.0, -2.0, -2.0, -1.0]
        assert b.sum().item() == 10
        with pytest.raises(RuntimeError, match="same nbytes"):
            a.untyped_storage()._swap_data_ptr_(torch.zeros(5, device="jax").untyped_storage())
        with pytest.raises(RuntimeError, match="same device"):
            a.untyped_storage()._swap_data_ptr_(torch.zeros(4).untyped_storage())
        with pytest.raises(RuntimeError, match="same device"):
            torch.zeros(4).untyped_storage()._swap_data_ptr_(a.untyped_storage())
