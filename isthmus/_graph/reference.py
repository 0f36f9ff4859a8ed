"""The reference backend: a graph's calls one by one with ATen on the CPU, slow and exact.

It shares no lowering with XLA, so where the two differ, one of them is wrong; where they agree and the answer is
still wrong, the graph is. Random numbers are torch's own for a seed made of the draw: they are not XLA's.

Besides tests and ``isthmus.config.backend = "reference"`` three parts of the package use it, since it needs no
compiler: small recorded graphs (``_lazy/small_graphs.py``), values of buffers after XLA has failed
(``_lazy/programs.restore``) and constants that a pass looks at (``passes/attention_masks.py``).

An op without a CPU kernel has an equivalent in ``cpu_equivalents.py``, or is decomposed by torch. Results are compared
with the recorded types, so that a graph with a wrong type is found here first.
"""

from __future__ import annotations

import contextlib
import functools
import zlib
from collections.abc import Iterator

import torch
from torch import Tensor

from isthmus._graph.arguments import AnyFunction, Arguments, Value, flatten, number_as_tensor
from isthmus._graph.cpu_equivalents import EQUIVALENTS, WIDENED
from isthmus._graph.graph import Graph, check, evaluate, fill
from isthmus._graph.nodes import Call, Node, Type
from isthmus._graph.private import Op, OpOverload, decompositions
from isthmus._graph.schema import schema_of
from isthmus.errors import IsthmusError

_aten = torch.ops.aten
# torch takes a Python number for a tensor in these alone.
TAKES_NUMBERS = frozenset(
    {
        _aten.add.Tensor,
        _aten.sub.Tensor,
        _aten.mul.Tensor,
        _aten.div.Tensor,
        _aten.div.Tensor_mode,
        _aten.floor_divide.default,
    }
)


class Reference:
    """Runs graphs with ATen on the CPU."""

    def compile(self, graph: Graph) -> AnyFunction:
        """Return the function that runs the graph."""
        # A backend may rely on what ``check`` promises; so does this one.
        check(graph)

        def run(*values: Value) -> list[Tensor]:
            # Whatever mode the caller is in, a recorded call has the dtypes that were recorded.
            with torch.inference_mode(False), torch.no_grad(), torch.autocast("cpu", enabled=False):
                results = evaluate(graph, values, run_node)
                # A clone: an output may be a view of an input, or of another output, which callers may write to.
                return [value.clone(memory_format=torch.contiguous_format) for value in results]

        return run


def run_node(node: Node, inputs: list[Value]) -> Tensor | list[Tensor | None] | None:
    """Compute a node's call on CPU tensors; a list where it has several results."""
    call = node.call
    assert isinstance(call, Call)
    assert isinstance(call.op, OpOverload)
    arguments = {name: fill(value, inputs) for name, value in call.arguments}
    draw = inputs[-1] if call.random else None
    results = flatten(perform(call.op, arguments, draw, call.context[0]))
    if len(results) != len(call.types):
        raise IsthmusError(f"{call.op} gave {len(results)} results where {len(call.types)} were recorded")
    checked = [_checked(call, result, type) for result, type in zip(results, call.types, strict=True)]
    return checked if len(checked) != 1 else checked[0]


def perform(
    op: Op, arguments: Arguments, draw: Tensor | None = None, dtype: torch.dtype | None = None
) -> Value:
    """Return the results of a functional op on the CPU for a draw, with this default dtype."""
    # Recorded ops have the default dtype that was in force then.
    with _default(dtype or torch.get_default_dtype()), torch.no_grad():
        tensors = with_tensors(op, arguments)
        results = flatten(_function(op)(**tensors) if draw is None else _random(op, tensors, seed_of(draw)))
    return results if len(results) != 1 else results[0]


def _random(op: Op, arguments: Arguments, seed: int) -> Value:
    # Ops with a generator take their own; the others draw from torch's global one, which is put back.
    if any(a.name == "generator" for a in schema_of(op).arguments):
        return _function(op)(**arguments, generator=torch.Generator().manual_seed(seed))
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)  # torch.manual_seed would seed every device there is
        return _function(op)(**arguments)


def seed_of(draw: Tensor) -> int:
    """Return a seed made of all four words of a draw: the CPU's generator uses 32 bits of it."""
    words = [int(word) for word in draw.tolist()]
    return zlib.crc32(b"".join(word.to_bytes(4, "little") for word in words))


@functools.cache
def _function(op: Op) -> AnyFunction:
    """Return the function that computes an op: its equivalent, its kernel, or torch's decomposition."""
    function = EQUIVALENTS.get(op) or WIDENED.get(op)
    if function is not None:
        return function

    def run(**arguments: Value) -> Value:
        try:
            # The CPU has no kernel: torch's decomposition, if it has one.
            return op(**arguments)
        except NotImplementedError:
            if op not in decompositions():
                raise
        args, kwargs = schema_of(op).split(schema_of(op).ordered((), arguments))
        return decompositions()[op](*args, **kwargs)

    return run


def with_tensors(op: Op, arguments: Arguments) -> Arguments:
    """Return the arguments with a tensor for each number that stands where the schema has one."""
    numbers = numbers_for_tensors(op, arguments)
    if not numbers:
        return arguments
    # A condition takes no part in promotion.
    others = [v for name, v in arguments.items() if isinstance(v, Tensor) and name != "condition"]
    return arguments | {name: number_as_tensor(arguments[name], others) for name in numbers}


def numbers_for_tensors(op: Op, arguments: Arguments) -> list[str]:
    """Return the names of arguments that are numbers where torch takes only tensors."""
    if op in TAKES_NUMBERS:
        return []
    kinds = {a.name: a.kind for a in schema_of(op).arguments}
    return [n for n, v in arguments.items() if kinds[n] == "tensor" and isinstance(v, (int, float, complex))]


def _checked(call: Call, result: Value, type: Type | None) -> Tensor | None:
    """Return a result that is what was recorded, or raise."""
    # torch returns none for a result that was not asked for.
    if type is None:
        return None
    # Lengths are integers in torch and values in a graph.
    if isinstance(result, int):
        result = torch.tensor(result, dtype=type.dtype, device="cpu")
    actual = Type(tuple(result.shape), result.dtype) if isinstance(result, Tensor) else None
    if actual != type:
        raise IsthmusError(f"{call.op} gave {actual or 'nothing'} on the CPU where {type} was recorded")
    # A lazy conjugate or negative is a bit on the tensor, which a raw read of its memory would miss.
    return result.resolve_conj().resolve_neg()


@contextlib.contextmanager
def _default(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    if before == dtype:
        yield
        return
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)
