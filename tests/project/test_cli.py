"""The command line, the doctor and the metrics."""

from __future__ import annotations

import inspect
import re
import sys
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch

import isthmus
from isthmus import _upstream, doctor, metrics
from isthmus.cli import main
from tests.interpreters import fresh

ROOT = Path(__file__).parents[2]


def lines_of(capsys: pytest.CaptureFixture[str]) -> dict[str, str]:
    """Return what a command printed, by the first word of each line."""
    rows = [line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines() if line.strip()]
    return {row[0]: row[-1] for row in rows}


def line_at(place: str) -> str:
    """Return the source line a ``file:line`` points at."""
    file, number = place.rsplit(":", 1)
    return (ROOT / file).read_text().splitlines()[int(number) - 1]


def test_doctor_finds_this_installation_healthy(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor"]) == 0
    said = capsys.readouterr().out
    for part in (
        torch.__version__.split("+")[0],
        "devices",
        "lowerings",
        "missing",
        "refused",
        "smoke run",
        "agree with the CPU",
    ):
        assert part in said


def test_doctor_lists_what_was_refused_and_switched_off_without_failing(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from isthmus._ops.registry import refused

    monkeypatch.setitem(refused, "aten.toy.default", "aten.toy.default lost an argument")
    monkeypatch.setitem(_upstream.switched_off, "fast_call", "calls take longer (TypeError: no)")
    assert main(["doctor"]) == 0
    said = capsys.readouterr().out
    assert "refused        aten.toy.default lost an argument" in said
    assert "switched off   fast_call: calls take longer (TypeError: no)" in said


@pytest.mark.parametrize("first", ["isthmus.coverage", "isthmus.doctor"])
def test_asking_about_ops_first_leaves_a_whole_device(first: str, tmp_path: Path) -> None:
    code = f"""
import importlib, torch
module = importlib.import_module({first!r})
if hasattr(module, "_registry"):  # what doctor prints of the lowerings
    module._registry(type("Report", (), {{"say": print}}))
x = torch.arange(4.0, device="jax")
torch.save(x, {str(tmp_path / "x.pt")!r})
assert torch.equal(torch.load({str(tmp_path / "x.pt")!r}).cpu(), x.cpu())
"""
    ran = fresh(code)
    assert ran.returncode == 0, ran.stderr


def test_doctor_lists_skipped_patches_without_failing(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from isthmus._device.torch_glue import patches

    torch.zeros(1, device="jax")  # with it the patches come that wait for the first tensor
    patch = patches.Patch("torch.Tensor", "no_such_name", patches.TENSOR, "it shows what is lost")
    monkeypatch.setitem(patches.skipped, patch, "no attribute")
    assert main(["doctor"]) == 0
    said = capsys.readouterr().out
    assert re.search(r"^patches +.*\d+ since the first tensor", said, re.MULTILINE)
    assert "patches        skipped torch.Tensor.no_such_name: no attribute (it shows what is lost)" in said


def test_doctor_tells_a_release_that_was_not_checked(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(_upstream.NEWEST, "torch", "2.1")
    assert main(["doctor"]) == 0
    assert "newer than 2.1, the newest that Isthmus was checked with" in capsys.readouterr().out


def test_a_release_that_was_not_checked_is_warned_about_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(_upstream.NEWEST, "jax", "0.1")
    for function in (_upstream.unchecked, _upstream.warn_if_unchecked):
        function.cache_clear()
    with pytest.warns(isthmus.errors.VersionWarning, match="jax .* is newer than .* checked with"):
        _upstream.warn_if_unchecked()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        _upstream.warn_if_unchecked()
    _upstream.unchecked.cache_clear()


def test_doctor_tells_a_missing_overload_without_failing(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from isthmus._graph import names
    from isthmus._ops.registry import refused

    monkeypatch.setitem(refused, "aten.no_such_op.default", "set back at the end")
    isthmus.lowering(names.aten.no_such_op.default)(lambda self: self)
    assert main(["doctor"]) == 0
    (line,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("missing")]
    assert "aten.no_such_op.default" in line


def test_doctor_fails_when_the_answer_is_wrong(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor, "_losses", lambda device: iter([1.0 if device == "cpu" else 1.5]))
    assert main(["doctor"]) == 1
    assert "differs from the CPU" in capsys.readouterr().err


def test_doctor_fails_when_the_smoke_run_does(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(device: str) -> None:
        raise RuntimeError("no such device\nand a long story")

    monkeypatch.setattr(doctor, "_losses", broken)
    assert main(["doctor"]) == 1
    assert "smoke: failed with RuntimeError: no such device\n" in capsys.readouterr().err


def test_doctor_fails_on_an_old_version(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(_upstream.OLDEST, "torch", "99.0")
    assert main(["doctor"]) == 1
    assert "is older than 99.0" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("version", "newer"), [("2.9.1", "2.11"), ("0.9", "0.10.2"), ("2.11.0+cpu", "2.13.0a0")]
)
def test_versions_compare_by_number(version: str, newer: str) -> None:
    assert _upstream.release(version) < _upstream.release(newer)


@pytest.mark.parametrize(
    ("name", "op"),
    [
        ("aten.mm.default", "aten.mm.default"),
        ("aten::add.Tensor", "aten.add.Tensor"),
        ("add_", "aten.add.Tensor"),
        ("cos", "aten.cos.default"),
        ("torch.baddbmm", "aten.baddbmm.default"),
        ("torch.ops.aten.linear.default", "aten.linear.default"),
    ],
)
def test_where_points_at_the_line_that_names_the_op(
    name: str, op: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["where", name]) == 0
    places = [text.split()[0] for text in lines_of(capsys).values() if "_ops/" in text]
    assert any(op in line_at(place) for place in places), places


def test_where_softmax_opens_its_family(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["where", "softmax"]) == 0
    found = lines_of(capsys)
    assert found["aten._softmax.default"].startswith("isthmus/_ops/nn/softmax.py:")
    assert "composite" in found["aten.softmax.int"]


def test_where_tells_every_other_tier(capsys: pytest.CaptureFixture[str]) -> None:
    for name, text in {
        "aten.transpose.int": "a view",
        "aten.copy_.default": "isthmus/_device/core/transfers.py",
        "aten._add_relu.Tensor": "CPU",
    }.items():
        assert main(["where", name]) == 0
        assert text in lines_of(capsys)[name], name


def test_where_finds_a_decomposed_op(capsys: pytest.CaptureFixture[str]) -> None:
    from isthmus import coverage

    decomposed = coverage.tiers()[coverage.DECOMPOSED]
    assert main(["where", str(decomposed[0])]) == 0
    assert "decomposed" in capsys.readouterr().out


def test_where_finds_a_users_lowering(capsys: pytest.CaptureFixture[str]) -> None:
    library = torch.library.Library("isthmus_test_cli", "DEF")
    library.define("twice(Tensor x) -> Tensor")

    @isthmus.lowering(torch.ops.isthmus_test_cli.twice.default)
    def twice(x):
        return x + x

    assert main(["where", "isthmus_test_cli::twice"]) == 0
    assert f"tests/project/test_cli.py:{inspect.getsourcelines(twice)[1]}" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("name", "hint"),
    [("sofmax", "did you mean softmax"), ("mylib.nothing", "names are torch's"), ("", "torch has no op")],
)
def test_where_of_an_unknown_op_is_kind(name: str, hint: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["where", name]) == 1
    said = capsys.readouterr()
    assert not said.out
    assert hint in said.err


def test_every_lowering_has_a_place_in_its_family() -> None:
    from isthmus import coverage
    from isthmus._ops.registry import registry

    families = coverage.families()
    assert {"binary", "unary", "matmul"} <= set(families)
    assert sum(len(ops) for ops in families.values()) == len(registry)
    for helper in ("common", "registry", "families", "value_checks"):
        assert helper not in families, families[helper]


def test_ops_counts_every_family_and_tier(capsys: pytest.CaptureFixture[str]) -> None:
    from isthmus import coverage

    assert main(["ops"]) == 0
    found = lines_of(capsys)
    assert int(found["matmul"].split()[0]) == len(coverage.families()["matmul"])
    assert int(found["cpu"]) == len(coverage.tiers()["cpu"])


def test_ops_lists_a_family(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["ops", "matmul"]) == 0
    assert "aten.mm.default" in capsys.readouterr().out.splitlines()
    assert main(["ops", "cooking"]) == 1
    assert "there is no family 'cooking'" in capsys.readouterr().err


def test_misuse_exits_with_two(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments in ([], ["dance"], ["where"]):
        with pytest.raises(SystemExit) as stopped:
            main(arguments)
        assert stopped.value.code == 2
        assert "usage: isthmus" in capsys.readouterr().err


def test_metrics_count_compilations_and_falls() -> None:
    metrics.clear()
    assert metrics.counts() == {}
    assert metrics.report() == "ran on the CPU: nothing"
    torch.full((2, 3, 5, 7), 2.0, device="jax").mul(3.25)
    assert metrics.counts()["compilations"] >= 1
    isthmus.config.fallback = "cpu"
    x = torch.tensor([-2.0, 3.0], device="jax")
    assert torch.ops.aten._add_relu.Tensor(x, x).tolist() == [0.0, 6.0]
    assert metrics.fallbacks() == {"aten._add_relu.Tensor": 1}
    assert "aten._add_relu.Tensor  1  (" in metrics.report()
    metrics.clear()
    assert metrics.fallbacks() == {}


MODEL = """
import torch
class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = torch.nn.Embedding(9, 4)
    def forward(self, ids, scale=None):
        rows = self.embed(ids)
        return {"rows": rows * scale, "count": ids.sum()}
made = Model()
number = lambda: 3
class Picky(torch.nn.Module):
    def __init__(self, size):
        super().__init__()
class Many(torch.nn.Module):
    def forward(self, *args):
        return args[0]
"""


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "isthmus_cli_model.py").write_text(MODEL)
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(sys.modules, "isthmus_cli_model", raising=False)
    return tmp_path


@pytest.mark.parametrize("attr", ["Model", "made"])
def test_export_and_run(attr: str, model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["export", f"isthmus_cli_model:{attr}", "--args", "i64[batch=2,length=3..8]", "scale=f32[1]"]
    assert main([*command, "-o", "out", "--platforms", "cpu,tpu"]) == 0
    assert "wrote out for cpu, tpu: ids int64[batch, length], scale float32[1]" in capsys.readouterr().out
    np.save(model / "ids.npy", np.array([[1, 8]]))
    np.save(model / "scale.npy", np.array([2.0], np.float32))
    inputs = ["--input", "ids.npy", "--input", "scale=scale.npy"]
    assert main(["run", "out", *inputs, "-o", "found.npz"]) == 0
    assert "rows: float32[1, 2, 4]" in capsys.readouterr().out
    found = np.load(model / "found.npz")
    weight = isthmus.load("out").embed.weight.cpu().numpy()
    np.testing.assert_allclose(found["rows"], 2 * weight[[[1, 8]]])
    assert found["count"] == 9
    assert main(["run", "out", *inputs]) == 0
    assert "count: int64[]\n9" in capsys.readouterr().out


def test_export_takes_an_example_from_a_file(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    np.save(model / "ids.npy", np.array([1, 8]))
    command = ["export", "isthmus_cli_model:made", "--args", "ids.npy", "scale=f32[]", "-o", "one.isthmus"]
    assert main([*command, "--precompile"]) == 0
    assert "ids int64[2], scale float32[]" in capsys.readouterr().out
    assert (model / "one.isthmus").is_file()


EXPORT = ["export", "isthmus_cli_model:made", "--args"]
FITTING = [*EXPORT, "i64[2]", "f32[1]", "-o", "out"]


@pytest.mark.parametrize(
    ("command", "words"),
    [
        (["export", "isthmus_cli_model", "-o", "out"], "is no MODULE:ATTR"),
        (["export", "isthmus_cli_model:none", "-o", "out"], "isthmus_cli_model:none was not found"),
        (["export", "no_such_module:x", "-o", "out"], "no_such_module:x was not found"),
        (["export", "isthmus_cli_model:number", "-o", "out"], "gives int, which is no torch.nn.Module"),
        (["export", "isthmus_cli_model:torch", "-o", "out"], "is module, which is no torch.nn.Module"),
        (
            ["export", "isthmus_cli_model:Picky", "-o", "out"],
            "Picky() raised TypeError: Picky.__init__() missing",
        ),
        (
            ["export", "isthmus_cli_broken:x", "-o", "out"],
            "importing isthmus_cli_broken raised ZeroDivisionError",
        ),
        ([*EXPORT, "f33[2]", "-o", "out"], "'f33[2]' is no input"),
        ([*EXPORT, "f32[a]", "-o", "out"], "'a' in 'f32[a]' is no size"),
        ([*EXPORT, "i64[n=8..4]", "-o", "out"], "n=8..4 ends below where it begins"),
        ([*EXPORT, "i64[n=2]", "f32[n=3]", "-o", "out"], "gives n two values, 2 and 3"),
        ([*EXPORT, "no.npy", "-o", "out"], "no.npy cannot be read as an array"),
        ([*EXPORT, "words.npy", "-o", "out"], "words.npy holds <U1, which no tensor has"),
        ([*EXPORT, "-o", "out"], "expected at least one argument"),
        ([*EXPORT, "i64[2]", "f32[1]", "f32[1]", "-o", "out"], "too many positional arguments"),
        ([*EXPORT, "i64[2]", "size=f32[1]", "-o", "out"], "got an unexpected keyword argument 'size'"),
        ([*EXPORT, "i64[2]", "scale=f32[1]", "scale=f32[1]", "-o", "out"], "two inputs called scale"),
        (["export", "isthmus_cli_model:made", "-o", "out"], "missing a required argument: 'ids'"),
        (["export", "isthmus_cli_model:Many", "--args", "f32[n=2]", "-o", "out"], "takes *args"),
        ([*FITTING, "--platforms", "cpu,gpu"], "'gpu' is no platform; choose from cpu, cuda, rocm, tpu"),
        ([*FITTING, "--platforms", ","], "'', '' is no platform"),
        ([*FITTING[:-1], "words.npy"], "words.npy: is a file; name a folder"),
        ([*FITTING[:-1], "folder.isthmus"], "folder.isthmus: is a folder"),
        ([*FITTING[:-1], "words.npy/x"], "there is no folder"),
        (["run", "nothing"], "there is no nothing"),
        (["run", "."], "is no program that isthmus.export wrote"),
        (["run", ".", "-o", "no/such/place.npz"], "there is no folder"),
        (["run", ".", "-o", "folder"], "folder.npz: is a folder"),
    ],
)
def test_misuse_of_export_and_run_is_a_line_and_exit_code_two(
    command: list[str], words: str, model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (model / "isthmus_cli_broken.py").write_text("x = 1 / 0")
    np.save(model / "words.npy", np.array(["a"]))
    for name in ("folder.isthmus", "folder.npz"):
        (model / name).mkdir()
    before = sorted(model.iterdir())
    try:
        code = main(command)
    except SystemExit as stopped:
        code = stopped.code
    said = capsys.readouterr()
    assert code == 2, said.err
    assert words in said.err
    assert "Traceback" not in said.err
    assert not said.out
    left = [path for path in sorted(model.iterdir()) if path.name != "__pycache__"]
    assert left == before, "something was written"


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="a folder nobody can write to, not even root")
@pytest.mark.parametrize("path", ["/proc/out", "/proc/out.isthmus"])
def test_export_looks_whether_it_can_write(
    path: str, model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*FITTING[:-1], path]) == 2
    assert "nothing can be written to /proc" in capsys.readouterr().err


def test_a_model_that_torch_refuses_is_no_misuse(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*EXPORT, "i64[2]", "-o", "out"]) == 1
    assert "torch.export refused the model" in capsys.readouterr().err


def test_run_says_what_is_wrong_with_the_inputs(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(FITTING) == 0
    np.save(model / "ids.npy", np.array([1.0, 8.0]))
    capsys.readouterr()
    assert main(["run", "out", "--input", "ids.npy"]) == 2
    assert "the program takes ['ids', 'scale']; it got 1 unnamed" in capsys.readouterr().err
    assert main(["run", "out", "--input", "ids.npy", "--input", "scale=ids.npy"]) == 2
    assert "input ['ids'] must be int64[2]" in capsys.readouterr().err
    np.save(model / "ids.npy", np.array([1, 99]))
    np.save(model / "scale.npy", np.array([2.0], np.float32))
    assert main(["run", "out", "--input", "ids.npy", "--input", "scale=scale.npy"]) == 1
    assert "out of range" in capsys.readouterr().err
