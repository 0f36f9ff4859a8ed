"""The harness that runs torch's databases can fail: it tells wrong from right, and its list of gaps is true."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch.testing._internal.common_methods_invocations import op_db
from torch.testing._internal.common_modules import module_db
from torch.testing._internal.common_optimizers import optim_db
from torch.testing._internal.opinfo.core import OpInfo

from tests.conformance import compiled, table, verdict
from tests.conformance.trial import Trial
from tests.conformance.values import Mismatch, compare_forms, compare_values, copied, to_jax
from tests.conformance.verdict import Entry, Uncompilable, Verdict, chosen, judge
from tests.device import test_modules, test_optimizers
from tests.ops import test_opinfo, test_opinfo_compiled

ENTRY = Entry("op_db", "no such op", "forward", "float32")


def seen(at: dict[str, object]) -> Verdict:
    """Return the verdict on a trial that gives these results, or raises these errors, in each place."""

    def run(place: str) -> list[object]:
        result = at[place]
        if isinstance(result, Exception):
            raise result
        return [result.to("jax") if place == "jax" and isinstance(result, torch.Tensor) else result]

    found = Verdict(ENTRY)
    Trial(run).run(found, 0)
    return found


def test_a_wrong_value_is_wrong() -> None:
    one, other = torch.tensor([1.0, 2.0]), torch.tensor([1.0, 2.001])
    assert seen({"cpu": one, "jax": one, "wide": one.double()}).status == "pass"
    assert seen({"cpu": one, "jax": other, "wide": one.double()}).status == "wrong"
    assert seen({"cpu": one, "jax": one.double(), "wide": one.double()}).status == "wrong"
    assert seen({"cpu": one, "jax": one[:1], "wide": one.double()}).status == "wrong"
    assert seen({"cpu": 3, "jax": 4, "wide": 3}).status == "wrong"


def test_nearer_to_the_truth_than_the_cpu_is_right() -> None:
    true = torch.tensor([1.0, 1000.0], dtype=torch.float64)
    cpu, here = torch.tensor([1.0, 992.0]).bfloat16(), torch.tensor([1.0, 1000.0]).bfloat16()
    assert seen({"cpu": cpu, "jax": here, "wide": true}).status == "pass"
    assert seen({"cpu": here, "jax": here * 1.5, "wide": true}).status == "wrong"
    nan = torch.tensor([1.0, float("nan")])
    assert seen({"cpu": nan, "jax": torch.tensor([1.0, 2.0]), "wide": nan.double()}).status == "wrong"


def test_an_error_must_be_the_cpus() -> None:
    value = torch.ones(1)
    assert seen({"cpu": ValueError("a"), "jax": ValueError("b")}).status == "pass"
    assert seen({"cpu": ValueError("a"), "jax": RuntimeError("b")}).status == "wrong"
    assert seen({"cpu": ValueError("a"), "jax": value}).status == "wrong"
    assert seen({"cpu": value, "jax": ValueError("b")}).status == "raises"


def test_results_must_be_on_the_device() -> None:
    with pytest.raises(Mismatch, match="result on cpu"):
        compare_forms([torch.ones(1)], [torch.ones(1)], "jax")
    with pytest.raises(Mismatch, match="2 results"):
        compare_forms([1, 2], [1], "jax")


def test_values_are_compared_without_a_truth() -> None:
    with pytest.raises(Mismatch):
        compare_values([torch.ones(2)], [torch.zeros(2)], lambda: [])


def test_copies_keep_strides_and_what_lies_between() -> None:
    base = torch.arange(12.0)
    view = base.as_strided((2, 2), (6, 2), 1)
    for copy in (copied(view), to_jax(view)):
        assert copy.stride() == (6, 2)
        assert copy.as_strided((3,), (1,), 1).tolist() == [1.0, 2.0, 3.0]
    copied(view).zero_()
    assert base[1] == 1


def test_a_fall_to_the_cpu_fails_unless_expected(monkeypatch: pytest.MonkeyPatch) -> None:
    found = Verdict(ENTRY, samples=1, cpu={"aten.some_op.default"})
    kept: list[tuple[str, object]] = []
    with pytest.raises(pytest.fail.Exception, match=r"on the CPU: aten\.some_op"):
        judge(found, lambda *row: kept.append(row))
    assert kept[0][1]["cpu"] == ["aten.some_op.default"]
    row = {"suite": "op_db", "names": [ENTRY.name], "reason": "a test"}
    monkeypatch.setattr(verdict.expectations, "cpu", [row])
    judge(found, lambda *row: None)
    with pytest.raises(pytest.fail.Exception, match="nothing on the CPU now"):
        judge(Verdict(ENTRY, samples=1), lambda *row: None)
    monkeypatch.setattr(verdict.expectations, "gaps", [row])
    with pytest.raises(pytest.fail.Exception, match="passes now"):
        judge(found, lambda *row: None)


def test_a_node_outside_the_programs_fails_unless_expected(monkeypatch: pytest.MonkeyPatch) -> None:
    found = Verdict(ENTRY, samples=1, outside={"aten.some_op.default"})
    kept: list[tuple[str, object]] = []
    with pytest.raises(pytest.fail.Exception, match=r"outside the compiled programs: aten\.some_op"):
        judge(found, lambda *row: kept.append(row))
    assert kept[0][1]["outside"] == ["aten.some_op.default"]
    row = {"suite": "op_db", "names": [ENTRY.name], "reason": "a test"}
    monkeypatch.setattr(verdict.expectations, "outside", [row])
    judge(found, lambda *row: None)
    with pytest.raises(pytest.fail.Exception, match="nothing outside the compiled programs now"):
        judge(Verdict(ENTRY, samples=1), lambda *row: None)


def test_what_torch_cannot_compile_is_counted_apart() -> None:
    found = Verdict(ENTRY)
    with found.sample(0):
        raise Uncompilable("data-dependent")
    assert (found.status, found.samples) == ("torch", 0)
    kept: list[dict[str, object]] = []
    with pytest.raises(pytest.skip.Exception, match="torch cannot compile it"):
        judge(found, lambda name, row: kept.append(row))
    kept.append({**kept[0], "status": "pass", "samples": 1, "outside": ["aten.some_op.default"]})
    (line,) = table.summary(kept)
    wanted = {"entries": 2, "pass": 1, "torch": 1, "outside": 1, "percent": 100.0}
    assert {name: line[name] for name in wanted} == wanted
    with found.sample(1):
        raise ValueError("ours")
    assert (found.status, found.samples) == ("raises", 1)


@pytest.mark.parametrize(
    ("ours", "theirs", "status"), [(False, False, "pass"), (True, False, "raises"), (True, True, "torch")]
)
def test_only_what_torchs_backend_refuses_too_is_torchs(
    monkeypatch: pytest.MonkeyPatch, ours: bool, theirs: bool, status: str
) -> None:
    (op,) = [op for op in op_db if test_opinfo.name_of(op) == "sin"]
    refusing = {"isthmus": ours, "aot_eager": theirs}

    def compiled_by(op: OpInfo, backend: str) -> Callable[..., object]:
        def refuse(*args: object) -> object:
            raise RuntimeError("no")

        return refuse if refusing[backend] else op.get_op()

    monkeypatch.setattr(compiled, "compiled", compiled_by)
    found = Verdict(ENTRY)
    compiled.run(op, compiled.forward, test_opinfo_compiled.samples(op, "compiled", torch.float32)[:1], found)
    assert found.status == status


def test_nothing_compared_is_no_pass() -> None:
    with pytest.raises(pytest.skip.Exception, match="nothing was compared"):
        judge(Verdict(ENTRY), lambda *row: None)


def test_samples_are_spread_over_all() -> None:
    assert chosen(range(100), ENTRY, None) == list(range(100))
    assert chosen(range(100), ENTRY, 4) == [12, 37, 62, 87]
    assert chosen(range(3), ENTRY, 4) == [0, 1, 2]


def test_expectations_speak_of_entries_and_give_reasons() -> None:
    names = {
        "op_db": {test_opinfo.name_of(op) for op in op_db},
        "module_db": {info.name for info in module_db},
        "optim_db": {info.name for info in optim_db},
    }
    kinds = {*test_opinfo.CALLS, *test_opinfo_compiled.CALLS, *test_modules.KINDS, *test_optimizers.FLAGS}
    for row in verdict.expectations.rows:
        assert set(row["names"]) <= names[row["suite"]], row
        assert set(row.get("kinds", [])) <= kinds, row
        assert len(row["reason"]) > 10, row
