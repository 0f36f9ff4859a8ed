"""Counts the distinct (op, dtype, mode) cases that a selection of the suite checks: ``python -m tests.count_cases``.

Arguments are those of pytest; without any it counts what `make test` runs. An op is an overload of tests/cases/ or an
entry of torch's databases, a mode is eager, lazy or compiled, or what is done with the entry (gradient, out, ...).
Run it before and after a change to which tests are slow: no number may fall.
"""

from __future__ import annotations

import sys
from collections import Counter
from typing import Any

import pytest


class Counting:
    """A plugin that notes the cases of the tests that were collected."""

    def __init__(self) -> None:
        self.tests: Counter[str] = Counter()
        self.cases: dict[str, set[tuple[str, str, str]]] = {}

    def pytest_collection_finish(self, session: Any) -> None:
        """Note every test that is left once the others were deselected."""
        for item in session.items:
            file = item.nodeid.split("::")[0]
            self.tests[file] += 1
            found = case_of(getattr(item, "callspec", None))
            if found is not None:
                self.cases.setdefault(file, set()).add(found)


def case_of(callspec: Any) -> tuple[str, str, str] | None:
    """Return (op, dtype, mode) of a test's parameters, or None where it has no such."""
    parameters = callspec.params if callspec is not None else {}
    if "entry" in parameters:  # of tests/conformance/verdict.py
        entry = parameters["entry"]
        return f"{entry.suite} {entry.name}", entry.dtype, entry.kind
    if "case" in parameters and "mode" in parameters and hasattr(parameters["case"], "op"):
        case = parameters["case"]
        return str(case.op), next(dtypes([case.args, [*case.kwargs.values()]]), "none"), parameters["mode"]
    return None


def dtypes(value: Any) -> Any:
    """Yield the dtypes of the tensors in arguments."""
    if isinstance(value, (list, tuple)):
        for each in value:
            yield from dtypes(each)
    elif hasattr(value, "dtype"):
        yield str(value.dtype)


def main() -> None:
    """Collect, and print tests and distinct cases by file."""
    counting = Counting()
    arguments = sys.argv[1:] or ["-m", "not slow"]
    pytest.main(["--collect-only", "-qqq", "-p", "no:cacheprovider", *arguments], plugins=[counting])
    print()
    for file, cases in sorted(counting.cases.items()):
        modes = Counter(mode for _, _, mode in cases)
        per_mode = ", ".join(f"{mode} {count}" for mode, count in sorted(modes.items()))
        ops = len({op for op, _, _ in cases})
        print(f"{file}: {counting.tests[file]} tests, {ops} ops, {len(cases)} cases ({per_mode})")
    print(f"{sum(counting.tests.values())} tests, {sum(map(len, counting.cases.values()))} distinct cases")


if __name__ == "__main__":
    main()
