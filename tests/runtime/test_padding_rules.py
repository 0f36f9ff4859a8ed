"""Rules for padded arrays: results equal the exact program's whatever the padding holds.

Every case runs for two sizes in one executable, with padding that is NaN, infinite, the largest integer, a legal index
or True. As a negative control it runs with padded sizes in place of true ones, which must be wrong where a case reads
across padding: otherwise the poison would prove nothing.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from isthmus._runtime import compiler
from isthmus._runtime.padding.interpreter import RULES, is_symbolic_equation
from isthmus._runtime.padding.program import PaddedProgram, pad_to
from isthmus._runtime.padding.sizes import Refused, Sizes, symbols
from tests.runtime.padding_cases import CASES, Case

LEAST = {"b": 2, "s": 6}


def poisons(dtype: np.dtype[Any]) -> list[Any]:
    """Return values that would show in a result that reads them."""
    if dtype == np.bool_:
        return [True, False, True]
    if np.issubdtype(dtype, np.integer):
        return [np.iinfo(dtype).max, np.iinfo(dtype).min, 1]
    return [np.nan, np.inf, -1e4]


def traced(case: Case) -> PaddedProgram:
    """Trace a case for symbolic b and s."""
    dims = symbols(LEAST)
    inputs = [
        jax.ShapeDtypeStruct(shape, dtype)
        for shape, (_, dtype) in zip(case.shapes(dims), case.arguments, strict=True)
    ]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        return PaddedProgram(case.function, inputs, dims, LEAST)


def wrong_results(case: Case, program: PaddedProgram, values: dict[str, int], sizes: Sizes) -> list[str]:
    """Run a case for true sizes and each poison; say which results differ from the exact program's."""
    executable = program.executable(sizes)
    arguments = case.values(case.shapes(dict(values)), np.random.default_rng(7))
    with compiler.scoped_x64(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        exact = [np.asarray(y) for y in jax.jit(case.function)(*arguments)]
    assert program.output_shapes(values) == [y.shape for y in exact]
    wrong = []
    for n in range(3):
        padded = [
            pad_to(x, shape, poisons(x.dtype)[n])
            for x, shape in zip(arguments, executable.inputs, strict=True)
        ]
        with compiler.scoped_x64():
            results = executable.call(program.true_sizes(values), *padded)
        for k, (expected, result) in enumerate(zip(exact, results, strict=True)):
            assert result.shape == executable.outputs[k]
            assert result.dtype == expected.dtype
            part = np.asarray(result)[tuple(slice(0, m) for m in expected.shape)]
            if not _equal(part, expected):
                wrong.append(f"result {k} for {values} with {[poisons(x.dtype)[n] for x in arguments]}")
    return wrong


def _equal(part: np.ndarray[Any, Any], expected: np.ndarray[Any, Any]) -> bool:
    if not np.issubdtype(expected.dtype, np.inexact):
        return bool(np.array_equal(part, expected))
    tolerance = 2e-3 if expected.dtype == np.float16 else 2e-5
    return bool(np.allclose(part, expected, rtol=tolerance, atol=tolerance, equal_nan=True))


def check(case: Case, first: dict[str, int], second: dict[str, int]) -> None:
    program = traced(case)
    sizes = program.sizes_for({name: max(first[name], second[name]) for name in first}, per_octave=1)
    for values in (first, second):
        assert wrong_results(case, program, values, sizes) == []
    assert len(program) == 1


@pytest.mark.parametrize("case", CASES, ids=str)
def test_padding_does_not_show(case: Case) -> None:
    check(case, {"b": 5, "s": 9}, {"b": 3, "s": 13})


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES, ids=str)
@settings(max_examples=10, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
@given(sizes=st.lists(st.tuples(st.integers(2, 17), st.integers(6, 33)), min_size=2, max_size=2))
def test_padding_does_not_show_for_any_sizes(case: Case, sizes: list[tuple[int, int]]) -> None:
    (b, s), (c, t) = sizes
    check(case, {"b": b, "s": s}, {"b": c, "s": t})


@pytest.fixture
def padded_for_true(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Take padded sizes for true ones: no mask, clamp or offset does anything then."""
    real = Sizes.true

    def padded(self: Sizes, size: Any, dtype: Any = np.int32) -> Any:
        return real(self, self.padded(size), dtype)

    with monkeypatch.context() as patched:
        patched.setattr(Sizes, "true", padded)
        yield


@pytest.mark.parametrize("case", [case for case in CASES if case.guarded], ids=str)
def test_without_true_sizes_it_would_show(case: Case, padded_for_true: None) -> None:
    program = traced(case)
    values = {"b": 5, "s": 9}
    assert wrong_results(case, program, values, program.sizes_for(values, per_octave=1))


def equations(jaxpr: Any) -> Iterator[Any]:
    """Yield every equation of a jaxpr and of those inside of it."""
    from jax.extend.core import jaxprs_in_params

    for eqn in jaxpr.eqns:
        yield eqn
        for inner in jaxprs_in_params(eqn.params):
            yield from equations(inner)


# Rules that only move padding, or refuse a padded axis that they would read across: no result could be wrong.
HARMLESS = {
    "choosing_windows", "custom_linear_solve", "factorization", "fft", "general_reduction", "general_windows",
    "optimization_barrier", "permutation", "slice_", "split", "squeeze", "stack",
}  # fmt: skip


def test_every_rule_has_a_case_and_without_its_rule_a_case_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    used: dict[str, Case] = {}
    guarded: set[str] = set()
    programs = {case.name: traced(case) for case in CASES}
    for case in CASES:
        for eqn in equations(programs[case.name].closed.jaxpr):
            if is_symbolic_equation(eqn):
                used.setdefault(eqn.primitive.name, case)
                guarded |= {eqn.primitive.name} if case.guarded else set()
    tested = {RULES[name] for name in used if name in RULES}
    assert sorted(r.__name__ for r in set(RULES.values()) - tested) == []
    controlled = {RULES[name] for name in guarded if name in RULES}
    assert {r.__name__ for r in tested - controlled} == HARMLESS, "a rule without a negative control"
    for name, case in used.items():
        if name not in RULES:
            continue
        program = programs[case.name]
        with monkeypatch.context() as patched:
            patched.delitem(RULES, name)
            refused = _refusal(program)
        assert refused is not None, name
        assert refused.primitive == name


def _refusal(program: PaddedProgram) -> Refused | None:
    try:
        program.executable(program.sizes_for({"b": 5, "s": 9}, 1))
    except Refused as error:
        return error
    return None


REFUSED = [
    (
        "sort of random numbers by rbg",
        lambda x: jax.random.bits(jax.random.key(0, impl="rbg"), x.shape),
        "random_bits",
    ),
    ("cholesky of a padded matrix", lambda x: jax.numpy.linalg.cholesky(x[0, : x.shape[1]]), "trace"),
    ("fft of a padded axis", lambda x: jax.numpy.fft.fft(x, axis=1), "fft"),
    ("branch on a size", lambda x: x if x.shape[1] > 10 else x + 1, "trace"),
    ("number of a size", lambda x: x * int(x.shape[1]), "trace"),
]


@pytest.mark.parametrize(("name", "function", "primitive"), REFUSED, ids=[name for name, *_ in REFUSED])
def test_refusals_name_the_primitive(name: str, function: Any, primitive: str) -> None:
    case = Case(name, lambda x: (function(x),), ((("b", "s", 8), "float32"),))

    def compile_padded() -> None:
        program = traced(case)
        program.executable(program.sizes_for({"b": 5, "s": 9}, 1))

    with pytest.raises(Refused) as raised:
        compile_padded()
    assert raised.value.primitive == primitive


def test_zero_padding_saves_masks_and_stays_right() -> None:
    case = next(case for case in CASES if case.name == "dot")
    program = traced(case)
    sizes = program.sizes_for({"b": 5, "s": 9}, 1)
    plain = program.executable(sizes)
    flagged = program.executable(sizes, (frozenset({1}), frozenset({0})))
    assert (plain.masks, flagged.masks) == (4, 0)
    x, y = case.values(case.shapes({"b": 5, "s": 9}), np.random.default_rng(0))
    (product, _) = flagged.call(
        program.true_sizes({"b": 5, "s": 9}), pad_to(x, flagged.inputs[0]), pad_to(y, flagged.inputs[1])
    )
    np.testing.assert_allclose(np.asarray(product)[:5], x @ y, rtol=1e-5, atol=1e-5)


def test_a_gather_that_changes_a_layout_is_counted() -> None:
    case = next(case for case in CASES if case.name == "split of one part")
    program = traced(case)
    assert program.executable(program.sizes_for({"b": 5, "s": 9}, 1)).relayouts == 1
