"""The evaluator: runs a graph on JAX arrays or tracers, one call after another.

Every mode that compiles a graph traces this evaluator: lazy mode and ``isthmus.jit`` (``_lazy/programs.py``),
``torch.compile`` (``_dynamo/specialization.py``), ``isthmus.export`` (``_export/trace.py``, where sizes may be JAX's
dimensions); and ``control_flow.py`` for the branches and bodies inside a graph. ``run(graph, values)`` takes an array
for each input of the graph and returns an array for each output, with the value checks that lowerings required::

    evaluated = run(graph, [jnp.ones(3)])
    evaluated.outputs   # [Array([1., 1., 1.])]
    evaluated.checks    # flags, and for each the error to raise if it is false
    evaluated.nodes     # the node whose lowering required the i-th check

A call is computed by the first of these that applies:

1. ``RULES``: ops that need the call itself, such as batch norm, whose statistics are as large as torch announced;
2. a view, by its function in ``_ops/tensors/views.py``;
3. the device's own kernel, for calls that carry the layouts of their arguments;
4. the op's lowering;
5. torch's decomposition of the op.

A result of another shape or dtype than the call's type raises ``LoweringError``: a lowering that disagrees with torch
must not go unnoticed. An exception inside a call is raised as ``CallFailure``, which names the node.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
import torch

from isthmus._device.core import decompose, strided
from isthmus._device.core.buffer import wrap_strided
from isthmus._device.core.decompose import to_arrays
from isthmus._device.core.generator import random_key
from isthmus._device.core.host_tensors import array_from_cpu
from isthmus._device.core.slots import store
from isthmus._graph.arguments import AnyFunction, Arguments, Value, flatten
from isthmus._graph.graph import Graph, arguments_of, evaluate, fill
from isthmus._graph.nodes import Call, Callee, Item, Node, Type
from isthmus._graph.private import OpOverload
from isthmus._graph.schema import PLACEMENT, schema_of
from isthmus._ops import families  # noqa: F401  # importing it files every lowering
from isthmus._ops.common import Ints, Number, cast, is_dimension
from isthmus._ops.linalg.transposed_products import written_out
from isthmus._ops.registry import Lowering, lowering_of
from isthmus._ops.tensors.views import VIEWS
from isthmus._ops.value_checks import Checks, collecting, require
from isthmus._runtime.dtypes import to_jax_dtype, to_torch_dtype
from isthmus._runtime.host_arrays import NUMBER_DTYPES
from isthmus.errors import IsthmusError, LoweringError, Unsupported

Array = jax.Array
_aten = torch.ops.aten


class CallFailure(IsthmusError):
    """A call could not be computed; ``node`` is its node, ``cause`` the exception."""

    def __init__(self, node: Node, cause: Exception) -> None:
        super().__init__(f"{node.call} could not be computed: {type(cause).__name__}: {cause}")
        self.node, self.cause = node, cause


@dataclass(frozen=True)
class Evaluated:
    """The outputs of a graph, its value checks, and for each check the node whose lowering required it."""

    outputs: list[Array]
    checks: Checks
    nodes: list[Node]


def run(
    graph: Graph,
    values: Sequence[Value],
    differentiable: bool = False,
    lines: Mapping[Node, str] | None = None,
) -> Evaluated:
    """Compute a graph; ``differentiable`` says that JAX may differentiate the result.

    ``lines`` are names for nodes in what XLA says of the program, the lines of user code that they come from.

    A write to part of a storage keeps the bits of NaNs it does not replace, which has no derivative; where JAX may
    differentiate, plain writes are used instead.
    """
    nodes: list[Node] = []
    # Which of several results are read: a lowering may leave the others out, or return them in another size.
    used = {n.inputs[0]: set[int]() for n in graph.nodes if isinstance(n.call, Item)}
    for n in graph.nodes:
        if isinstance(n.call, Item):
            used[n.inputs[0]].add(n.call.index)

    def call(node: Node, inputs: list[Value]) -> Value:
        assert isinstance(node.call, Call)
        try:
            line = lines.get(graph.origins.get(node, node)) if lines else None
            with jax.named_scope(line) if line else contextlib.nullcontext():
                # XLA is slow at such products on the CPU: see ``transposed_products.py``.
                if _is_transposed_product(node):
                    inputs = [written_out(*inputs), inputs[1]]
                result = run_call(node.call, inputs, differentiable)
            _check(node.call, result, used.get(node))
        except CallFailure:
            raise
        except Exception as error:
            raise CallFailure(node, error) from error
        # One entry for each check that this call has added, so that the i-th node is that of the i-th check.
        nodes.extend([node] * (len(checks.flags) - len(nodes)))
        return result

    with collecting() as checks:
        outputs = evaluate(graph, values, call)
    return Evaluated(outputs, checks, nodes)


def _is_transposed_product(node: Node) -> bool:
    """Return whether a node is a product of two matrices whose left one is transposed."""
    assert isinstance(node.call, Call)
    if node.call.op is not _aten.mm.default or len(node.inputs) != 2:
        return False
    left = node.inputs[0].call
    return isinstance(left, Call) and left.op is _aten.permute.default


def run_call(call: Call, inputs: Sequence[Value], differentiable: bool = False) -> Value:
    """Compute one call on arrays; a list where it has several results."""
    op = call.op
    arguments = arguments_of(call, inputs)
    if not isinstance(op, OpOverload):
        return _flat(call, op(*arguments.values()))
    # Before ``VIEWS``: it alone needs to know whether JAX may differentiate.
    # Not in ``RULES`` either, which get no such flag.
    if op is _aten.as_strided_scatter.default:
        return _scatter(differentiable, **arguments)
    if op in RULES:
        return _flat(call, RULES[op](call, **_without_placement(arguments)))
    if op in VIEWS:
        return _flat(call, VIEWS[op](*arguments.values()))
    # A decision that depends on strides was made when the call was recorded, and must be made alike.
    if call.layouts is not None:
        return _flat(call, _on_device(call, inputs))
    lowering = lowering_of(op)
    if lowering is not None:
        # A recorded call knows its place in the draw of the whole graph.
        key = random_key(inputs[-1], call.draw) if call.random else None
        with _context(call):
            return _flat(call, lower(lowering, arguments, key))
    decomposition = decompose.function_for(op)
    if decomposition is None:
        raise Unsupported(f"nothing lowers {op}")
    with _context(call):
        return _flat(call, decomposition({name: _as_jax(value) for name, value in arguments.items()}))


def _flat(call: Call, result: Value) -> Value:
    results = flatten(result)
    return results[0] if len(call.types) == 1 and len(results) == 1 else results


def _without_placement(arguments: Arguments) -> Arguments:
    return {name: value for name, value in arguments.items() if name not in PLACEMENT}


def lower(lowering: Lowering, arguments: Arguments, key: Array | None = None) -> Value:
    """Return the results of a lowering; ``key`` is the JAX key of a random op."""
    if lowering.size is not None:
        raise Unsupported(f"{lowering.op} has no lowering with sizes known beforehand")
    named = {
        name: _as_jax(value, name in lowering.dynamic)
        for name, value in arguments.items()
        # A generator was replaced by words when the call was recorded.
        if name != "generator"
    }
    if lowering.random:
        named["rng"] = key
    return lowering(named)


def _as_jax(value: Value, dynamic: bool = False) -> Value:
    """Return an argument as a lowering takes it: JAX's dtypes, and a ``Number`` for a number it treats as a value."""
    if isinstance(value, (list, tuple)):
        return [_as_jax(item, dynamic) for item in value]
    if isinstance(value, torch.dtype):
        return to_jax_dtype(value)
    if isinstance(value, torch.Tensor):
        return array_from_cpu(value)
    if dynamic and type(value) in NUMBER_DTYPES:
        return Number(jnp.asarray(np.asarray(value, NUMBER_DTYPES[type(value)])), type(value))
    # In the place of a number, a dimension is one that the exported program finds out.
    if dynamic and is_dimension(value):
        return Number(jnp.asarray(value, jnp.int64), int)
    return value


@contextlib.contextmanager
def _context(call: Call) -> Iterator[None]:
    """Restore the settings of torch under which the call was recorded."""
    dtype, precision = call.context
    now = torch.get_default_dtype(), torch.get_float32_matmul_precision()
    if now == (dtype, precision or now[1]):
        yield
        return
    # Lowerings and decompositions ask torch for both, and run long after the user's line may have changed them.
    # Both are process-wide in torch, so they are put back whatever the lowering raises.
    torch.set_default_dtype(dtype)
    torch.set_float32_matmul_precision(precision or now[1])
    try:
        yield
    finally:
        torch.set_default_dtype(now[0])
        torch.set_float32_matmul_precision(now[1])


def _check(call: Call, result: Value, used: set[int] | None) -> None:
    """Refuse a result of another shape or dtype than torch's; of several, those that nothing reads may be anything."""
    if len(call.types) == 1 and not isinstance(result, list):
        _check_one(call, call.types[0], result)
        return
    # Results that are not read have no ``Item`` node.
    for index in used or ():
        if index >= len(result):
            raise LoweringError(f"the lowering of {call.op} gave {len(result)} results of {len(call.types)}")
        _check_one(call, call.types[index], result[index])


def _check_one(call: Call, wanted: Type | None, result: Value) -> None:
    if wanted is None or not isinstance(result, (jax.Array, np.ndarray)):
        return
    if to_torch_dtype(result.dtype) != wanted.dtype or not _same_size(result.shape, wanted.size):
        raise LoweringError(
            f"the lowering of {call.op} gave {result.dtype}{list(result.shape)} where torch gives "
            f"{wanted.dtype}{list(wanted.size)}"
        )


def _same_size(size: Sequence[Value], wanted: Sequence[Value]) -> bool:
    """Return whether sizes agree; of dimensions of an exported program JAX cannot always tell."""
    known = [(a, b) for a, b in zip(size, wanted, strict=False) if isinstance(a, int) and isinstance(b, int)]
    return len(size) == len(wanted) and all(a == b for a, b in known)


def _on_device(call: Call, inputs: Sequence[Value]) -> Value:
    """Return the results of the device's own kernel on tensors of the call's layouts that hold these arrays."""
    layouts = iter(call.layouts or ())

    def tensor(value: Value) -> Value:
        if isinstance(value, (list, tuple)):
            return [tensor(item) for item in value]
        if not isinstance(value, jax.Array):
            return value
        spec = next(layouts)
        return wrap_strided(store(value, spec, call.op), spec.size, spec.stride, spec.dtype)

    # In the order of the layouts: that of the call's arguments.
    arguments = {name: tensor(fill(value, inputs)) for name, value in call.arguments}
    if any(argument.name == "device" for argument in schema_of(call.op).arguments):
        # The recorded call may name no device; a factory would make its result on the CPU.
        arguments["device"] = "jax"
    with torch.no_grad():
        return to_arrays(call.op(**arguments))


def _scatter(
    differentiable: bool,
    self: Array,
    src: Array,
    size: Ints,
    stride: Ints,
    storage_offset: Array | int | None = None,
) -> Array:
    write = strided.write if differentiable else strided.write_bits
    return write(self, src, tuple(size), tuple(stride), 0 if storage_offset is None else storage_offset)


def _as_strided(
    call: Call, self: Array, size: Ints, stride: Ints, storage_offset: Array | int | None = None
) -> Array:
    return strided.read(self, tuple(size), tuple(stride), 0 if storage_offset is None else storage_offset)


def _batch_norm(call: Call, **arguments: Value) -> list[Array]:
    """Return a normalized batch and its statistics, each as torch announced it.

    Outside training the CPU saves no statistics where the device saves them; and torch infers the statistics of half
    types as float32 or not, by version and by what decomposes the op.
    """
    assert isinstance(call.op, OpOverload)
    lowering = lowering_of(call.op)
    assert lowering is not None
    results = lower(lowering, arguments)
    sized = []
    for result, wanted in zip(results, call.types, strict=True):
        assert wanted is not None
        empty = math.prod(wanted.size) == 0 and result.size
        sized.append(cast(result[:0] if empty else result, to_jax_dtype(wanted.dtype)))
    return sized


def _zeros(call: Call, **arguments: Value) -> Array:
    (wanted,) = call.types
    assert wanted is not None
    return jnp.zeros(wanted.size, to_jax_dtype(wanted.dtype))


def _repeat_interleave(call: Call, repeats: Array, output_size: int | None = None) -> Array:
    """Return every index as often as a tensor says, where the program knows how many that makes."""
    if output_size is None:
        raise Unsupported("how often indices are repeated depends on values")
    require(repeats >= 0, RuntimeError, "repeats can not be negative")
    require(repeats.sum() == output_size, RuntimeError, "allocated size does not match required size")
    return jnp.repeat(jnp.arange(repeats.size, dtype=repeats.dtype), repeats, total_repeat_length=output_size)


RULES: dict[Callee, AnyFunction] = {
    _aten.as_strided.default: _as_strided,
    _aten._native_batch_norm_legit_functional.default: _batch_norm,
    _aten._native_batch_norm_legit_no_training.default: _batch_norm,
    _aten._efficientzerotensor.default: _zeros,
    _aten.empty.memory_format: _zeros,
    _aten.empty_permuted.default: _zeros,
    _aten.empty_strided.default: _zeros,
    _aten.repeat_interleave.Tensor: _repeat_interleave,
}
"""Ops that need the call itself: its types, or that a program has no uninitialised memory."""
