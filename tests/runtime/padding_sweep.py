"""Every ATen call in the samples of torch's op_db, by this project's lowerings, with one dimension padded.

``python -m tests.runtime.padding_sweep`` runs every entry and rewrites ``padding_refused.txt``: the calls that padding
refuses, each with the primitive that does. A wrong result is never written there; it fails.
"""

from __future__ import annotations

import warnings
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np
import torch
from torch.testing._internal.common_methods_invocations import op_db
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_unflatten

from isthmus._ops import families  # noqa: F401  # importing it files every lowering
from isthmus._ops.registry import lowering_of
from isthmus._ops.tensors.views import VIEWS
from isthmus._ops.value_checks import collecting
from isthmus._program.evaluate import lower
from isthmus._runtime import compiler
from isthmus._runtime.dtypes import to_jax_dtype
from isthmus._runtime.padding.program import PaddedProgram, pad_to
from isthmus._runtime.padding.sizes import Refused, Sizes, is_symbolic, symbols

GOLDEN = Path(__file__).with_name("padding_refused.txt")
SAMPLES = 3
# Entries run in so many parts, by their names, and one in so many runs every time; the first divides the second.
PARTS, QUICK_ONE_IN = 12, 48
# numpy has no such arrays, or the device has none.
UNKNOWN = {torch.complex32, torch.float8_e4m3fn, torch.float8_e5m2}


@dataclass(frozen=True)
class RecordedCall:
    """An op with its arguments as leaves of a tree, the tensors among them as host arrays."""

    op: Any
    leaves: tuple[Any, ...]
    tree: Any

    @property
    def tensors(self) -> list[int]:
        """Return which leaves are tensors."""
        return [i for i, leaf in enumerate(self.leaves) if isinstance(leaf, torch.Tensor)]

    @property
    def dtypes(self) -> set[torch.dtype]:
        """Return the dtypes of the tensors and those among the arguments."""
        found = [leaf.dtype if isinstance(leaf, torch.Tensor) else leaf for leaf in self.leaves]
        return {dtype for dtype in found if isinstance(dtype, torch.dtype)}

    @property
    def kind(self) -> tuple[Any, ...]:
        """Return what makes two calls alike for this sweep."""
        tensors = [self.leaves[i] for i in self.tensors]
        return (self.op, tuple(t.dim() for t in tensors), tuple(t.dtype for t in tensors))


class Recorder(TorchDispatchMode):
    """Records every call that reaches the dispatcher."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[RecordedCall] = []

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        names = [argument.name for argument in op._schema.arguments]
        arguments = {**dict(zip(names, args, strict=False)), **(kwargs or {})}
        for argument in op._schema.arguments:
            if argument.name not in arguments:
                arguments[argument.name] = argument.default_value
        leaves, tree = tree_flatten(arguments)
        copies = [leaf.detach().clone() if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
        self.calls.append(RecordedCall(op, tuple(copies), tree))
        return op(*args, **(kwargs or {}))


def calls_of(entry: Any) -> Iterator[RecordedCall]:
    """Yield the calls of the first samples of an entry of op_db that a lowering or a view computes."""
    try:
        samples = list(zip(range(SAMPLES), entry.sample_inputs("cpu", torch.float32), strict=False))
    except Exception:
        return
    for _, sample in samples:
        recorder = Recorder()
        try:
            with recorder, torch.no_grad(), warnings.catch_warnings():
                warnings.simplefilter("ignore")
                entry(sample.input, *sample.args, **sample.kwargs)
        except Exception:
            continue
        for call in recorder.calls:
            known = lowering_of(call.op)
            if not UNKNOWN.isdisjoint(call.dtypes):
                continue
            if call.op in VIEWS or (known is not None and not known.random and known.size is None):
                yield call


def function_of(call: RecordedCall, replacement: dict[int, Any]) -> Callable[..., Any]:
    """Return a call as a function of its tensors; ``replacement`` has other values for leaves that are numbers."""

    def function(*arrays: Any) -> Any:
        leaves = [replacement.get(i, leaf) for i, leaf in enumerate(call.leaves)]
        for i, array in zip(call.tensors, arrays, strict=True):
            leaves[i] = array
        arguments = tree_unflatten(leaves, call.tree)
        with collecting():
            if call.op in VIEWS:
                result = VIEWS[call.op](*arguments.values())
            else:
                lowering = lowering_of(call.op)
                names = {a.name for a in call.op._schema.arguments} - {"device", "layout", "pin_memory"}
                result = lower(lowering, {n: v for n, v in arguments.items() if n in names})
        return tuple(leaf for leaf in tree_flatten(result)[0] if leaf is not None)

    return function


def attempts(
    call: RecordedCall, number: int, dim: int, s: Any
) -> Iterator[tuple[list[tuple[Any, ...]], Any]]:
    """Yield shapes and replaced numbers that make one dimension symbolic: alone, then with all that equal it."""
    tensors = [call.leaves[i] for i in call.tensors]
    n = tensors[number].shape[dim]
    alone = [tuple(t.shape) for t in tensors]
    alone[number] = tuple(s if i == dim else m for i, m in enumerate(alone[number]))
    yield alone, {}
    alike = [tuple(s if m == n else m for m in t.shape) for t in tensors]
    yield alike, {}
    numbers = {i: s for i, leaf in enumerate(call.leaves) if type(leaf) is int and leaf == n}
    yield alike, numbers


def outcome(call: RecordedCall, number: int, dim: int) -> str:
    """Return "right", or the primitive that refuses; raise AssertionError for a wrong result.

    As programs are made: for sizes from 1 on, and where that is refused from 2 on.
    """
    tensors = [call.leaves[i] for i in call.tensors]
    n = tensors[number].shape[dim]
    arrays = [_host(t) for t in tensors]
    exact = _exactly(function_of(call, {}), arrays)
    refused = "trace"
    for least in (1, 2):
        dims = symbols({"s": least})
        for shapes, numbers in attempts(call, number, dim, dims["s"]):
            inputs = [jax.ShapeDtypeStruct(k, a.dtype) for k, a in zip(shapes, arrays, strict=True)]
            try:
                program = PaddedProgram(function_of(call, numbers), inputs, dims, {"s": least})
                executable = program.executable(Sizes(program.symbols, {"s": n + 3}, 1))
            except Refused as error:
                refused = error.primitive
                continue
            if program.output_shapes({"s": n}) != [y.shape for y in exact]:
                continue  # a number that was taken for the size is another one
            compare(call, program, executable, arrays, exact, n)
            if least == 1:
                _compare_at_one(call, program, executable, arrays, numbers)
            return "right"
    return refused


def _exactly(function: Callable[..., Any], arrays: Any) -> list[Any]:
    with compiler.scoped_x64(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return [np.asarray(y) for y in jax.jit(function)(*arrays)]


def _compare_at_one(
    call: RecordedCall, program: Any, executable: Any, arrays: Any, numbers: dict[int, Any]
) -> None:
    """Compare the program with the exact one where the size is 1, if there is such a call."""
    cut = [
        a[tuple(slice(0, 1 if is_symbolic(k) else None) for k in shape)]
        for a, shape in zip(arrays, program.inputs, strict=True)
    ]
    ones = dict.fromkeys(numbers, 1)
    leaves = [ones.get(i, leaf) for i, leaf in enumerate(call.leaves)]
    for i, array in zip(call.tensors, cut, strict=True):
        leaves[i] = torch.as_tensor(np.array(array)).to(call.leaves[i].dtype)
    try:
        call.op(**tree_unflatten(leaves, call.tree))
    except Exception:
        return  # torch refuses it, as the second smallest of one
    exact = _exactly(function_of(call, ones), cut)
    # A broadcast size of 1 has results of other shapes: a graph of its own.
    if program.output_shapes({"s": 1}) == [y.shape for y in exact]:
        compare(call, program, executable, cut, exact, 1)


def compare(call: RecordedCall, program: Any, executable: Any, arrays: Any, exact: Any, n: int) -> None:
    """Assert that no poison shows."""
    for poison in (np.nan, np.inf):
        padded = [
            pad_to(a, k, _poison(a.dtype, poison)) for a, k in zip(arrays, executable.inputs, strict=True)
        ]
        with compiler.scoped_x64():
            results = executable.call(program.true_sizes({"s": n}), *padded)
        for result, expected in zip(results, exact, strict=True):
            part = np.asarray(result)[tuple(slice(0, m) for m in expected.shape)]
            if not np.issubdtype(expected.dtype, np.inexact):
                assert np.array_equal(part, expected), (call.op, call.leaves, part, expected)
            else:
                np.testing.assert_allclose(part, expected, rtol=1e-4, atol=1e-5, err_msg=str(call.op))


def _host(tensor: torch.Tensor) -> Any:
    return np.asarray(tensor.resolve_conj().resolve_neg().contiguous().numpy(), to_jax_dtype(tensor.dtype))


def _poison(dtype: Any, value: float) -> Any:
    if dtype == np.bool_:
        return value == np.inf
    if np.issubdtype(dtype, np.integer):
        return np.iinfo(dtype).max if value == np.inf else np.iinfo(dtype).min
    return value


def sweep(one_in: int, part: int = 0) -> tuple[set[str], int]:
    """Run one entry of op_db in so many, by their names; return what is refused, and how many cases were right."""
    seen: set[Any] = set()
    refused: set[str] = set()
    right = 0
    for entry in sorted(op_db, key=lambda each: (each.name, each.variant_test_name)):
        if zlib.crc32(entry.name.encode()) % one_in != part:
            continue
        for call in calls_of(entry):
            if call.kind in seen:
                continue
            seen.add(call.kind)
            for number, i in enumerate(call.tensors):
                for dim, n in enumerate(call.leaves[i].shape):
                    if n < 2:
                        continue
                    result = outcome(call, number, dim)
                    right += result == "right"
                    if result != "right":
                        refused.add(
                            f"{call.op} argument {number} dim {dim} of {call.leaves[i].dim()}: {result}"
                        )
    return refused, right


def whole() -> tuple[set[str], int]:
    """Run every entry of op_db."""
    parts = [sweep(PARTS, part) for part in range(PARTS)]
    return set[str]().union(*[refused for refused, _ in parts]), sum(right for _, right in parts)


if __name__ == "__main__":
    lines, count = whole()
    GOLDEN.write_text("".join(f"{line}\n" for line in sorted(lines)))
    print(f"{count} right, {len(lines)} refused")
