"""Programs that leave home: what is exported computes what the model does, with torch and without it."""

from __future__ import annotations

import json
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from jax import export as jax_export
from torch import Tensor, nn

import isthmus
from isthmus._export import container, loader
from isthmus.errors import DamagedFile, ExportError


@pytest.fixture(autouse=True)
def no_fallback() -> Iterator[None]:
    isthmus.metrics.clear()
    yield
    assert isthmus.metrics.fallbacks() == {}


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 4))


def arrays(tree: Any) -> Any:
    """Return tensors as numpy arrays."""
    return jax.tree.map(lambda t: t.detach().cpu().numpy(), tree, is_leaf=lambda t: isinstance(t, Tensor))


class Tied(nn.Module):
    """An embedding whose weight is the head's too, a constant, and a buffer that is not saved."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 6)
        self.head = nn.Linear(6, 11, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("scale", torch.tensor(3.0), persistent=False)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.embed(ids)) * self.scale + torch.tensor([0.5])


class Nested(nn.Module):
    """Containers in and out, an argument by name, and arguments that are no tensors."""

    def forward(self, batch: dict[str, Tensor], pair: list[Tensor], *, mask: Tensor, times: int) -> Any:
        total = batch["a"] + pair[0] * times - pair[1]
        return {"total": total, "more": (total * mask, None, [mask.to(torch.int64)])}


def nested_inputs() -> tuple[tuple[Any, ...], dict[str, Any]]:
    batch, pair = {"a": torch.ones(2, 3), "b": torch.zeros(1)}, [torch.full((3,), 2.0), torch.ones(2, 1)]
    return (batch, pair), {"mask": torch.tensor([True, False, True]), "times": 3}


@pytest.mark.parametrize("device", ["cpu", "jax"])
def test_a_model_on_either_device(device: str, tmp_path: Path) -> None:
    model = mlp()
    x = torch.randn(2, 8)
    want = model(x).detach()
    artifact = isthmus.export(model.to(device), (x.to(device),), path=tmp_path / "out")
    for found in (artifact.module(), isthmus.load(tmp_path / "out")):
        for there in ("cpu", "jax"):
            result = found(x.to(there))
            assert result.device.type == there
            torch.testing.assert_close(result.cpu(), want, rtol=1e-5, atol=1e-6)


def test_a_folder_and_a_file_hold_the_same(tmp_path: Path) -> None:
    artifact = isthmus.export(mlp(), torch.randn(2, 8), path=tmp_path / "out")
    artifact.save(tmp_path / "out.isthmus")
    folder = {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()}
    assert set(folder) == {"program.json", "program.mlirbc", "weights.safetensors", "run.py"}
    with zipfile.ZipFile(tmp_path / "out.isthmus") as file:
        assert {name: file.read(name) for name in file.namelist()} == folder
    x = np.ones((2, 8), np.float32)
    np.testing.assert_array_equal(
        loader.load(tmp_path / "out")(x), loader.load(tmp_path / "out.isthmus")(input=x)
    )


def test_the_loader_is_short_and_knows_no_torch() -> None:
    for module in ("loader", "executables"):
        lines = Path(find_spec(f"isthmus._export.{module}").origin).read_text().splitlines()
        assert len(lines) < 120
        assert not any("import torch" in line or "isthmus import" in line for line in lines)


def test_weights_are_arguments_and_tied_ones_are_stored_once(tmp_path: Path) -> None:
    model = Tied()
    ids = torch.tensor([[1, 2, 10]])
    artifact = isthmus.export(model, (ids,), path=tmp_path)
    stored = json.loads((tmp_path / "program.json").read_text())
    assert stored["tied"] in ({"head.weight": "embed.weight"}, {"embed.weight": "head.weight"})
    assert len(stored["weights"]) == 3
    loaded = isthmus.load(tmp_path)
    assert loaded.head.weight is loaded.embed.weight
    assert set(loaded.state_dict()) == set(model.state_dict())
    torch.testing.assert_close(loaded(ids), model(ids).detach())
    with torch.no_grad():
        loaded.embed.weight.mul_(2)
    torch.testing.assert_close(loaded(ids), 4 * (model(ids).detach() - 0.5) + 0.5)
    assert "66xf32" not in artifact.stablehlo.replace("11x6xf32", "")
    loaded.load_state_dict(model.state_dict())
    torch.testing.assert_close(loaded(ids), model(ids).detach())


def test_an_artifact_keeps_the_weights_of_its_time() -> None:
    for device in ("cpu", "jax"):
        model, x = nn.Linear(2, 2).to(device), torch.ones(1, 2, device=device)
        want = model(x).detach().clone()
        artifact = isthmus.export(model, x)
        with torch.no_grad():
            model.weight.mul_(5)
        torch.testing.assert_close(artifact.module()(x), want)
        loaded = artifact.module()
        with torch.no_grad():
            loaded.weight.mul_(5)
        torch.testing.assert_close(artifact.module()(x), want)


def test_names_a_module_has_itself() -> None:
    class Odd(nn.Module):
        def __init__(self, name: str) -> None:
            super().__init__()
            self.add_module(name, nn.Linear(2, 2))
            self.called = name

        def forward(self, x: Tensor) -> Tensor:
            return self.get_submodule(self.called)(x)

    assert isthmus.export(Odd("exported"), torch.ones(1, 2)).module()(torch.ones(1, 2)).shape == (1, 2)
    with pytest.raises(ExportError, match=r"the model has a program\.\w+"):
        isthmus.export(Odd("program"), torch.ones(1, 2)).module()


def test_a_loaded_program_in_a_compiled_function() -> None:
    model, x = mlp(), torch.randn(2, 8)
    loaded = isthmus.export(model, x).module()
    compiled = torch.compile(lambda x: loaded(x * 2) + 1, backend="isthmus")
    torch.testing.assert_close(compiled(x), model(x * 2).detach() + 1)


def test_assertions_on_values_hold_where_it_runs() -> None:
    def positive(x: Tensor) -> Tensor:
        torch._assert_async((x > 0).all(), "not positive")
        return x + 1

    loaded = isthmus.export(positive, torch.ones(2)).module()
    assert loaded(torch.ones(2)).tolist() == [2, 2]
    with pytest.raises(RuntimeError, match="not positive"):
        loaded(-torch.ones(2))


def test_containers_names_and_constants(tmp_path: Path) -> None:
    args, kwargs = nested_inputs()
    want = Nested()(*args, **kwargs)
    isthmus.export(Nested(), args, kwargs, path=tmp_path)
    loaded = isthmus.load(tmp_path)
    del kwargs["times"]
    found = loaded(*args, **kwargs)
    assert list(found) == ["total", "more"]
    torch.testing.assert_close(found["total"], want["total"])
    torch.testing.assert_close(found["more"][0], want["more"][0])
    assert found["more"][1] is None
    assert found["more"][2][0].tolist() == [1, 0, 1]
    assert found["more"][2][0].dtype == torch.int64
    torch.testing.assert_close(loaded(*args, **kwargs, times=3)["total"], want["total"])
    with pytest.raises(ValueError, match="times is 3 in this program, which was exported so; it got 4"):
        loaded(*args, **kwargs, times=4)
    bare = loader.load(tmp_path)(*arrays(args), **arrays(kwargs))
    np.testing.assert_array_equal(bare["total"], want["total"].numpy())
    assert bare["more"][2][0].dtype == np.int64
    assert not jax.config.jax_enable_x64


def test_fields_by_name_become_a_dict() -> None:
    @dataclass
    class Answer:
        first: Tensor
        second: Tensor | None = None

    torch.export.register_dataclass(Answer)

    def answer(x: Tensor) -> Answer:
        return Answer(x + 1)

    found = isthmus.export(answer, torch.ones(2)).module()(torch.ones(2))
    assert set(found) == {"first"}
    assert found["first"].tolist() == [2, 2]


def test_an_exported_program_of_torchs() -> None:
    model, x = mlp(), torch.randn(3, 8)
    batch = torch.export.Dim("batch")
    program = torch.export.export(model, (x,), dynamic_shapes=({0: batch},))
    artifact = isthmus.export(program)
    assert artifact.spec["inputs"] == {"input": {"dtype": "float32", "shape": ["input_0", 8]}}
    torch.testing.assert_close(artifact.module()(x[:2]), model(x[:2]).detach())


def test_state_is_returned_and_kept(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Conv1d(3, 4, 1), nn.BatchNorm1d(4))
    x = torch.randn(5, 3, 7)
    isthmus.export(model, (x,), path=tmp_path)
    loaded, bare = isthmus.load(tmp_path), loader.load(tmp_path)
    for _ in range(2):
        want = model(x).detach()
        torch.testing.assert_close(loaded(x), want)
        np.testing.assert_allclose(bare(x.numpy()), want.numpy(), rtol=1e-5, atol=1e-6)
    for name, buffer in model.named_buffers():
        torch.testing.assert_close(loaded.get_buffer(name).cpu(), buffer)
        np.testing.assert_allclose(bare.weights[name], buffer.numpy(), rtol=1e-5)
    assert int(bare.weights["1.num_batches_tracked"]) == 2


def test_dtypes_survive(tmp_path: Path) -> None:
    class Wide(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.small = nn.Parameter(torch.tensor([1.0, 2.5]).bfloat16())
            self.register_buffer("big", torch.tensor(2**40))
            self.register_buffer("precise", torch.tensor(1 / 3, dtype=torch.float64))
            self.register_buffer("turn", torch.tensor(1j, dtype=torch.complex128))
            self.register_buffer("tiny", torch.tensor([0.5]).to(torch.float8_e4m3fn))

        def forward(self, n: Tensor) -> tuple[Tensor, ...]:
            tiny = self.tiny.to(torch.float32)
            return self.small * 2, n + self.big, self.precise * n, n > 0, self.turn * n, tiny

    n = torch.tensor([1, -2])
    isthmus.export(Wide(), (n,), path=tmp_path)
    want = Wide()(n)
    for one, other in zip(isthmus.load(tmp_path)(n), want, strict=True):
        assert one.dtype == other.dtype
        torch.testing.assert_close(one, other.detach())
    bare = loader.load(tmp_path)(n.numpy())
    assert [str(array.dtype) for array in bare] == [
        *("bfloat16", "int64", "float64", "bool", "complex128", "float32")
    ]
    assert bare[1].tolist() == [2**40 + 1, 2**40 - 2]
    assert not jax.config.jax_enable_x64


class Sizes(nn.Module):
    """What models do with sizes: counting to one, as a number, cutting, the last position, a join."""

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
        batch, length = x.shape[:2]
        places = torch.arange(length, device=x.device) * 2 + batch
        return (
            x.flatten(0, 1).sum(1) / length,
            places,
            x[:, 1:].sum((1, 2)) + x[:, -1, 0],
            torch.cat([x, y], 1).view(batch, -1),
            torch.tril(torch.ones(length, length, device=x.device)),
            F.pad(x, (0, 0, 1, 2)),
        )


def test_dynamic_sizes(tmp_path: Path) -> None:
    length = torch.export.Dim("length", min=3)  # torch's own guards of x[:, 1:]
    shapes = {"x": {0: "batch", 1: length}, "y": {0: "batch", 1: "rest"}}
    isthmus.export(
        Sizes(), (torch.randn(3, 4, 2), torch.randn(3, 5, 2)), dynamic_shapes=shapes, path=tmp_path
    )
    loaded = isthmus.load(tmp_path)
    for batch, length, rest in [(3, 4, 5), (1, 3, 1), (2, 9, 3)]:
        x, y = torch.randn(batch, length, 2), torch.randn(batch, rest, 2)
        for found, want in zip(loaded(x, y), Sizes()(x, y), strict=True):
            torch.testing.assert_close(found, want)


def test_bounds_of_sizes_are_kept(tmp_path: Path) -> None:
    seq = torch.export.Dim("seq", min=2, max=6)
    isthmus.export(mlp(), torch.randn(3, 8), dynamic_shapes=({0: seq},), path=tmp_path)
    assert json.loads((tmp_path / "program.json").read_text())["constraints"] == ["seq >= 2", "seq <= 6"]
    loaded = isthmus.load(tmp_path)
    assert loaded(torch.randn(6, 8)).shape == (6, 4)
    with pytest.raises(ValueError, match="seq"):
        loaded(torch.randn(7, 8))


def test_sizes_derived_from_others() -> None:
    half = torch.export.Dim("half")

    def fold(x: Tensor, y: Tensor) -> Tensor:
        return x.view(2, -1) + y

    shapes = {"x": {0: 2 * half}, "y": {0: half}}
    loaded = isthmus.export(fold, (torch.ones(6), torch.ones(3)), dynamic_shapes=shapes).module()
    assert loaded(torch.ones(8), torch.ones(4)).shape == (2, 4)
    with pytest.raises(ValueError, match="half"):
        loaded(torch.ones(8), torch.ones(3))


def test_many_platforms() -> None:
    artifact = isthmus.export(mlp(), torch.randn(2, 8), platforms=("cpu", "cuda", "tpu"))
    assert artifact.exported.platforms == ("cpu", "cuda", "tpu")
    assert artifact.module()(torch.randn(2, 8)).shape == (2, 4)
    elsewhere = isthmus.export(mlp(), torch.randn(2, 8), platforms=("tpu",)).module()
    with pytest.raises(ValueError, match="tpu"):
        elsewhere(torch.randn(2, 8))


def test_a_wrong_index_raises_as_in_eager(tmp_path: Path) -> None:
    isthmus.export(nn.Embedding(5, 2), (torch.tensor([1]),), path=tmp_path)
    for program, ids in ((isthmus.load(tmp_path), torch.tensor([5])), (loader.load(tmp_path), np.array([5]))):
        with pytest.raises(IndexError, match="index out of range"):
            program(ids)


def lookups(table: Tensor, i: Tensor, j: Tensor) -> Tensor:
    return F.embedding(i, table) - F.embedding(j, table)


def test_one_tensor_as_two_examples_is_two_inputs() -> None:
    ids = torch.tensor([1, 2])
    program = isthmus.export(lookups, (torch.eye(3), ids, ids)).module()
    assert torch.equal(program(torch.eye(3), ids, ids.flip(0)), lookups(torch.eye(3), ids, ids.flip(0)))


def test_a_program_of_the_format_before_is_read(tmp_path: Path) -> None:
    """Format 2 returned a flag for each value check, where programs now return the number of one that failed."""
    ids, wrong = torch.tensor([1, 2]), torch.tensor([1, 9])
    table = torch.eye(5)
    artifact = isthmus.export(lookups, (table, ids, ids))
    assert len(artifact.spec["conditions"]) == 2

    def flags(weights: Any, inputs: Any) -> Any:
        outputs, state, code = artifact.exported.call(weights, inputs)
        return outputs, state, jnp.arange(1, 3) != code

    args, _ = jax.tree.unflatten(artifact.exported.in_tree, artifact.exported.in_avals)
    with jax.enable_x64(True):
        old = jax_export.export(jax.jit(flags))(*args)
    results = {"tuple": [*artifact.spec["results"]["tuple"][:2], {"dtype": "bool", "shape": [2]}]}
    spec = {**artifact.spec, "format": 2, "results": results}
    replace(artifact, exported=old, spec=spec).save(tmp_path)
    for program, given in ((isthmus.load(tmp_path), torch.as_tensor), (loader.load(tmp_path), np.asarray)):
        found = program(*map(given, (table, ids, ids.flip(0))))
        np.testing.assert_array_equal(np.asarray(found), table[ids] - table[ids.flip(0)])
        for rows in ((ids, wrong), (wrong, ids)):
            with pytest.raises(IndexError, match="index out of range"):
                program(*map(given, (table, *rows)))


def test_text_for_other_compilers_and_interchange_with_jax() -> None:
    model, x = mlp(), torch.randn(2, 8)
    artifact = isthmus.export(model, x)
    assert "stablehlo.dot_general" in artifact.stablehlo
    exported = artifact.module().program.exported
    assert artifact.stablehlo == exported.mlir_module()
    weights = isthmus.to_jax({name: tensor.detach() for name, tensor in model.state_dict().items()})
    outputs, state, code = exported.call(weights, {"input": x.numpy()})
    np.testing.assert_allclose(outputs, model(x).detach(), rtol=1e-5, atol=1e-6)
    assert (state, code) == ({}, None)
    with pytest.raises(TypeError):
        jax.grad(lambda w: exported.call(w, {"input": x.numpy()})[0].sum())(weights)


def test_what_jax_exported_is_a_module() -> None:
    def scaled(tree: dict[str, Any], *, by: Any) -> dict[str, Any]:
        return {"z": tree["x"] * by, "a": [tree["x"].sum()]}

    (n,) = jax.export.symbolic_shape("n")
    x = jax.ShapeDtypeStruct((n,), jnp.float32)
    exported = jax.export.export(jax.jit(scaled))({"x": x}, by=jax.ShapeDtypeStruct((), jnp.float32))
    module = isthmus.load(exported)
    for device in ("cpu", "jax"):
        found = module({"x": torch.ones(3, device=device)}, by=torch.tensor(2.0, device=device))
        assert found["z"].tolist() == [2, 2, 2]
        assert found["a"][0].device.type == device


def test_executables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = mlp(), torch.randn(2, 8)
    shapes = {"input": {0: "batch"}}
    isthmus.export(model, x, dynamic_shapes=shapes, precompile=True, path=tmp_path / "out.isthmus")
    loaded = isthmus.load(tmp_path / "out.isthmus", executables=True)
    with monkeypatch.context() as patch:
        patch.setattr(jax.stages.Lowered, "compile", lambda *_, **__: pytest.fail("compiled"))
        torch.testing.assert_close(loaded(x), model(x).detach())
    y = torch.randn(5, 8)
    torch.testing.assert_close(loaded(y), model(y).detach())
    monkeypatch.setattr("isthmus._export.executables.target", lambda: "tpu (v9)")
    with pytest.warns(UserWarning, match=r"has no executable for tpu \(v9\), it has \w+ \("):
        loaded = isthmus.load(tmp_path / "out.isthmus", executables=True)
    torch.testing.assert_close(loaded(x), model(x).detach())


def fails_to_export(model: Any, *args: Any, **options: Any) -> str:
    with pytest.raises(ExportError) as raised:
        isthmus.export(model, args, **options)
    return str(raised.value)


def test_random_numbers_are_refused() -> None:
    said = fails_to_export(nn.Dropout(), torch.ones(3))
    assert "draws random numbers" in said
    assert "model.eval()" in said
    assert isthmus.export(nn.Dropout().eval(), torch.ones(3)).module()(torch.ones(3)).tolist() == [1, 1, 1]
    assert "aten.rand" in fails_to_export(lambda x: x + torch.rand(3), torch.ones(3))


def test_a_write_to_an_input_is_refused() -> None:
    assert "return what is written to an input" in fails_to_export(lambda x: x.add_(1) * 2, torch.ones(3))


def test_sizes_that_depend_on_values_are_refused() -> None:
    said = fails_to_export(lambda x: x.nonzero() + 1, torch.ones(3))
    assert "aten.nonzero.default cannot be exported" in said


def test_an_op_without_a_lowering_is_named() -> None:
    library = torch.library.Library("isthmus_test_export", "DEF")
    library.define("odd(Tensor x) -> Tensor")
    library.impl("odd", lambda x: x.clone(), "CPU")
    library.impl("odd", lambda x: torch.empty_like(x), "Meta")
    said = fails_to_export(lambda x: torch.ops.isthmus_test_export.odd(x), torch.ones(3))
    assert "isthmus_test_export.odd.default cannot be exported, since nothing lowers it" in said


def test_an_op_and_the_dim_it_cannot_take_are_named() -> None:
    class Volume(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.linalg.det(x @ x.T)

    said = fails_to_export(Volume(), torch.ones(6, 4), dynamic_shapes={"x": {0: "count"}})
    assert "aten._linalg_det.default cannot be exported with dynamic dimension 'count'" in said
    assert "test_export.py" in said
    assert "leave those dims out of dynamic_shapes" in said


def test_a_platform_that_has_no_such_op_is_named() -> None:
    said = fails_to_export(lambda x: torch.linalg.eigvals(x), torch.ones(3, 3), platforms=("tpu",))
    assert "JAX has no program for tpu" in said
    assert "eig" in said


def test_what_torch_refuses_is_refused_in_its_words() -> None:
    said = fails_to_export(lambda x: x.reshape(3, 2), torch.ones(6), dynamic_shapes=({0: "n"},))
    assert "torch.export refused the model" in said
    assert "n" in said
    said = fails_to_export(lambda x: x if x.sum() > 0 else -x, torch.ones(6))
    assert "torch.export refused the model" in said


def test_numbers_are_arrays_and_text_is_refused() -> None:
    loaded = isthmus.export(lambda x: (x, 3, x.shape[0]), torch.ones(2), dynamic_shapes=({0: "n"},)).module()
    assert [value.tolist() for value in loaded(torch.ones(4))] == [[1, 1, 1, 1], 3, 4]
    assert "the model returns 'done'" in fails_to_export(lambda x: (x + 1, "done"), torch.ones(2))


def test_a_number_that_varies_is_refused() -> None:
    said = fails_to_export(
        lambda x, n: x * n, torch.ones(2), 3, dynamic_shapes=(None, torch.export.Dim.DYNAMIC)
    )
    assert "the input n is a number that varies" in said


def test_keys_that_are_no_names_are_refused() -> None:
    assert "a dict with keys [1, 2]" in fails_to_export(lambda x: {1: x + 1, 2: x}, torch.ones(3))


@pytest.mark.parametrize(
    ("args", "kwargs", "words"),
    [
        ((), {}, r"the program takes \['x', 'y'\]; it got 0 unnamed"),
        ((torch.ones(2, 3),) * 3, {}, "it got 3 unnamed"),
        ((torch.ones(2, 3),), {"z": torch.ones(2)}, r"it got 1 unnamed and \['z'\]"),
        ((torch.ones(2, 3),), {"x": torch.ones(2, 3)}, r"it got 1 unnamed and \['x'\]"),
        ((torch.ones(2, 4), torch.ones(2)), {}, r"\['x'\] must be float32\[batch, 3\] .* is float32\[2, 4\]"),
        ((torch.ones(2, 3), torch.ones(3)), {}, r"\['y'\] must be float32\[batch\] with {'batch': 2}"),
        ((torch.ones(2), torch.ones(2)), {}, r"it is float32\[2\]"),
        ((torch.ones(2, 3).double(), torch.ones(2)), {}, r"it is float64\[2, 3\]"),
        ((None, torch.ones(2)), {}, r"\['x'\] must be float32"),
    ],
)
def test_wrong_inputs_are_told(args: Any, kwargs: Any, words: str) -> None:
    def add(x: Tensor, y: Tensor) -> Tensor:
        return x + y[:, None]

    shapes = {"x": {0: "batch"}, "y": {0: "batch"}}
    loaded = isthmus.export(add, (torch.ones(4, 3), torch.ones(4)), dynamic_shapes=shapes).module()
    with pytest.raises((TypeError, ValueError), match=words):
        loaded(*args, **kwargs)


def test_gradients_are_refused() -> None:
    loaded = isthmus.export(mlp(), torch.ones(2, 8)).module()
    x = torch.ones(2, 8, requires_grad=True)
    with pytest.raises(ExportError, match="has no gradients"):
        loaded(x)
    with torch.no_grad():
        assert loaded(x).shape == (2, 4)
    assert not any(parameter.requires_grad for parameter in loaded.parameters())


def test_bad_paths_are_told(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="there is no"):
        isthmus.load(tmp_path / "nothing")
    with pytest.raises(ExportError, match=r"is no program that isthmus\.export wrote"):
        isthmus.load(tmp_path)
    (tmp_path / "text").write_text("hello")
    with pytest.raises(ExportError, match=r"is no program that isthmus\.export wrote"):
        isthmus.load(tmp_path / "text")
    with pytest.raises(ExportError, match="is a file; name a folder"):
        isthmus.export(mlp(), torch.ones(2, 8), path=tmp_path / "text")
    isthmus.export(mlp(), torch.ones(2, 8), path=tmp_path / "out")
    (tmp_path / "out" / "weights.safetensors").unlink()
    with pytest.raises(DamagedFile, match=r"weights\.safetensors is not what was written\n.*it is not there"):
        isthmus.load(tmp_path / "out")


def test_a_newer_format_is_told(tmp_path: Path) -> None:
    isthmus.export(mlp(), torch.ones(2, 8), path=tmp_path)
    spec = json.loads((tmp_path / "program.json").read_text())
    del spec["sha256"]
    for change in ({"format": 4}, {"convention": 10_000}):
        (tmp_path / "program.json").write_bytes(container._sealed({**spec, **change}))
        with pytest.raises(ExportError, match="is too new: isthmus"):
            isthmus.load(tmp_path)
        with pytest.raises(ValueError, match="is too new: isthmus"):
            loader.load(tmp_path)


def test_a_program_without_checksums_is_refused(tmp_path: Path) -> None:
    isthmus.export(mlp(), torch.ones(2, 8), path=tmp_path)
    spec = json.loads((tmp_path / "program.json").read_text())
    del spec["sha256"], spec["parts"]
    (tmp_path / "program.json").write_text(json.dumps({**spec, "format": 1}, indent=1))
    with pytest.raises(DamagedFile, match="an older Isthmus wrote it, without one"):
        isthmus.load(tmp_path)
    with pytest.raises(ValueError, match="or of an older Isthmus: copy or export it again"):
        loader.load(tmp_path)
    isthmus.export(mlp(), torch.ones(2, 8), path=tmp_path)
    assert isthmus.load(tmp_path)(torch.ones(2, 8)).shape == (2, 4)


PACKAGES = (
    "jax",
    "jaxlib",
    "numpy",
    "numpy.libs",
    "ml_dtypes",
    "safetensors",
    "opt_einsum",
    "scipy",
    "scipy.libs",
)


@pytest.fixture(scope="session")
def without_torch(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of packages with JAX, numpy, safetensors and what they need, and no torch."""
    folder = tmp_path_factory.mktemp("site")
    for name in PACKAGES:
        package = name.split(".")[0]
        origin = find_spec(package)
        assert origin is not None
        assert origin.origin is not None
        found = Path(origin.origin).parent.parent / name
        if found.exists():
            (folder / name).symlink_to(found)
    return folder


GPT = """
import sys
sys.path[:0] = [{site!r}, {program!r}]
for name in ("torch", "isthmus", "flatbuffers"):
    try:
        __import__(name)
    except ImportError:
        continue
    raise SystemExit(name + " is here")
import jax, numpy as np
from run import load
program = load({program!r})
for size in ("small", "large"):
    data = np.load({data!r} + "/" + size + ".npz")
    found = program(data["ids"])
    np.testing.assert_allclose(found, data["logits"], rtol=0, atol=1e-5)
assert not jax.config.jax_enable_x64
print("same", found.shape)
"""


class GPT2(nn.Module):
    """The shape of GPT-2: learned positions, layers with normalization first, and a head that is the embedding."""

    def __init__(self, vocabulary: int = 50, width: int = 32, heads: int = 4, layers: int = 2) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(vocabulary, width), nn.Embedding(64, width)
        self.layers = nn.ModuleList(
            nn.ModuleDict(
                {
                    "before": nn.LayerNorm(width),
                    "attend": nn.Linear(width, 3 * width),
                    "join": nn.Linear(width, width),
                    "after": nn.LayerNorm(width),
                    "up": nn.Linear(width, 4 * width),
                    "down": nn.Linear(4 * width, width),
                }
            )
            for _ in range(layers)
        )
        self.last = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.tokens.weight
        self.heads = heads
        for parameter in self.parameters():
            if parameter.dim() > 1:
                nn.init.normal_(parameter, std=0.02)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.tokens(ids) + self.places(torch.arange(ids.shape[1], device=ids.device))
        for layer in self.layers:
            q, k, v = (
                part.unflatten(-1, (self.heads, -1)).transpose(1, 2)
                for part in layer["attend"](layer["before"](x)).chunk(3, -1)
            )
            mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
            x = x + layer["join"](mixed)
            x = x + layer["down"](F.gelu(layer["up"](layer["after"](x)), approximate="tanh"))
        return self.head(self.last(x))


def test_a_gpt_on_the_device_in_other_sizes() -> None:
    model = GPT2().eval().to("jax")
    shapes = {"ids": {0: "batch", 1: torch.export.Dim("length", max=64)}}
    ids = torch.zeros(2, 8, dtype=torch.int64, device="jax")
    loaded = isthmus.export(model, ids, dynamic_shapes=shapes).module()
    for shape in [(1, 1), (3, 64)]:
        ids = torch.randint(0, 50, shape, device="jax")
        torch.testing.assert_close(loaded(ids), model(ids).detach())


@pytest.mark.parametrize("device", ["cpu", "jax"])
@pytest.mark.parametrize("masked", [False, True])
def test_attention_of_every_number_of_dims(masked: bool, device: str) -> None:
    def attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, mask)

    for lead in [(), (2,), (2, 3), (2, 1, 3)]:
        q, k, v = (torch.randn(*lead, n, 4, device=device) for n in (5, 6, 6))
        mask = torch.randn(*lead, 5, 6, device=device) if masked else None
        loaded = isthmus.export(attend, (q, k, v, mask)).module()
        torch.testing.assert_close(loaded(q, k, v, mask), attend(q, k, v, mask))


def test_a_gpt_runs_without_torch(tmp_path: Path, without_torch: Path) -> None:
    model = GPT2().eval()
    shapes = {"ids": {0: "batch", 1: torch.export.Dim("length", max=64)}}
    ids = torch.zeros(2, 8, dtype=torch.int64)
    isthmus.export(model, ids, dynamic_shapes=shapes, platforms=("cpu",), path=tmp_path / "gpt")
    for size, shape in {"small": (1, 5), "large": (3, 64)}.items():
        ids = torch.randint(0, 50, shape)
        np.savez(tmp_path / f"{size}.npz", ids=ids.numpy(), logits=model(ids).detach().numpy())
    code = GPT.format(site=str(without_torch), program=str(tmp_path / "gpt"), data=str(tmp_path))
    # Without the interpreter's own site-packages: what is not in that folder is not there.
    ran = subprocess.run(
        [sys.executable, "-I", "-S", "-c", code], capture_output=True, text=True, cwd=tmp_path
    )
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.strip() == "same (3, 64, 50)"


def test_run_py_is_a_command(tmp_path: Path, without_torch: Path) -> None:
    isthmus.export(lambda x: x * 2, torch.ones(3), platforms=("cpu",), path=tmp_path / "out")
    np.save(tmp_path / "x.npy", np.arange(3, dtype=np.float32))
    code = "import runpy, sys; sys.path.insert(0, sys.argv.pop(1)); del sys.argv[0]; "
    code += "runpy.run_path(sys.argv[0], run_name='__main__')"
    command = [sys.executable, "-I", "-S", "-c", code, str(without_torch), str(tmp_path / "out" / "run.py")]
    ran = subprocess.run([*command, f"x={tmp_path / 'x.npy'}"], capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.strip() == "[0. 2. 4.]"
