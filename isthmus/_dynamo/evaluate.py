"""FX graphs run on arrays, node by node: the branches and bodies of higher-order ops, and graphs to be exported.

The graphs of ``torch.compile`` themselves become ``Graph``s (``convert.py``) and are run by ``_program/evaluate.py``.
``subgraphs.py`` and ``_export/evaluate.py`` run FX graphs by the ``Evaluation`` here. Its ``OWN`` rules are for ops
that need FX metadata: the layout of a value, sizes that are symbols. ``clusters.py`` asks ``is_lowered``.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
from torch._ops import HigherOrderOperator, OpOverload
from torch.fx import GraphModule, Node

from isthmus._device.core import strided
from isthmus._device.core.buffer import wrap_strided
from isthmus._device.core.decompose import to_arrays
from isthmus._device.core.host_tensors import array_from_cpu
from isthmus._device.core.slots import store
from isthmus._device.torch_glue.private import has_kernel
from isthmus._dynamo import layout, refusals
from isthmus._dynamo.random import Draw, Keyed
from isthmus._graph.schema import mutating_of, schema_of
from isthmus._ops import families  # noqa: F401  # importing it files every lowering
from isthmus._ops.common import cast
from isthmus._ops.registry import lowering_of
from isthmus._ops.tensors.views import VIEWS
from isthmus._ops.value_checks import require
from isthmus._program import evaluate as program_evaluate
from isthmus._program.evaluate import repeat_interleave
from isthmus._runtime.dtypes import to_jax_dtype, to_torch_dtype
from isthmus.errors import IsthmusError, LoweringError, Unsupported

Array = Any
Rule = Callable[["Evaluation", Node, list[Any]], Any]
_aten = torch.ops.aten
_COMPOSITE = ("CompositeExplicitAutograd", "CompositeExplicitAutogradNonFunctional")
# Their sizes, numbers or draws are not those of the program.
_NOT_COMPOSED = {
    torch.Tag.dynamic_output_shape,
    torch.Tag.data_dependent_output,
    torch.Tag.nondeterministic_seeded,
}

HIGHER_ORDER: dict[Any, Rule] = {}
"""What to do with higher-order ops; ``higher_order.py`` fills it."""


class NodeFailure(IsthmusError):
    """A node could not be lowered; the cluster without it may still be."""

    def __init__(self, node: Node, cause: Exception) -> None:
        super().__init__(f"{node.target} could not be lowered: {type(cause).__name__}: {cause}")
        self.node, self.cause = node, cause


@dataclass
class Evaluation:
    """One run: the value of each node so far, and the sizes that symbols stand for."""

    module: GraphModule
    symbols: layout.Symbols
    values: dict[Node, Any] = field(default_factory=dict)

    def run(self, arguments: Sequence[Any]) -> Any:
        """Return what the graph returns for these arguments."""
        given = iter(arguments)
        for node in self.module.graph.nodes:
            if node.op == "placeholder":
                self.values[node] = next(given)
            elif node.op == "get_attr":
                self.values[node] = constant(self.module, node)
            elif node.op == "output":
                return self.look_up(node.args[0])
            else:
                self.values[node] = self._call(node)
        raise LoweringError("the graph returns nothing")

    def look_up(self, argument: Any) -> Any:
        """Return an argument of a node with the nodes in it replaced by their values."""
        if isinstance(argument, Node):
            return self.values[argument]
        if isinstance(argument, (list, tuple)):
            return [self.look_up(item) for item in argument]
        if isinstance(argument, dict):
            return {name: self.look_up(item) for name, item in argument.items()}
        if isinstance(argument, slice):
            return slice(*self.look_up([argument.start, argument.stop, argument.step]))
        return argument

    def _call(self, node: Node) -> Any:
        try:
            result = self._apply(node)
            _check(node, result)
        except NodeFailure:
            raise
        except Exception as error:
            raise NodeFailure(node, error) from error
        return result

    def _apply(self, node: Node) -> Any:
        target: Any = node.target
        args, kwargs = self.look_up(node.args), self.look_up(node.kwargs)
        if (
            isinstance(target, OpOverload)
            and target not in VIEWS
            and (target not in OWN or lowering_of(target) is not None)
        ):
            refusals.check(target, args, kwargs)
        if target in OWN:
            return OWN[target](self, node, *args, **kwargs)
        if target in VIEWS:
            return VIEWS[target](*args, **kwargs)
        if target in HIGHER_ORDER:
            return HIGHER_ORDER[target](self, node, args)
        if isinstance(target, OpOverload):
            whole = lowering_of(target) is not None
            return lower(target, args, kwargs) if whole else on_device(self, node, *args, **kwargs)
        return target(*args, **kwargs)  # arithmetic on sizes, operator.getitem


def lower(op: OpOverload, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Return what the lowering of ``op`` computes for these arguments."""
    lowering = lowering_of(op)
    if lowering is None:
        raise Unsupported(f"{op} has no lowering")
    return program_evaluate.lower(lowering, schema_of(op).bind(args, kwargs))


def constant(module: GraphModule, node: Node) -> Any:
    """Return what a ``get_attr`` node names: a subgraph, or a tensor as an array."""
    found = operator.attrgetter(str(node.target))(module)
    if isinstance(found, torch.Tensor):
        if found.device.type == "jax":
            from isthmus._device.core.transfers import array_of

            return array_of(found)
        return array_from_cpu(found.cpu())
    return found


def _check(node: Node, result: Any) -> None:
    """Refuse a result of another dtype or shape than torch's."""
    for found, wanted in _pairs(*_used(node, result, node.meta.get("val"))):
        if not isinstance(wanted, torch.Tensor) or not isinstance(found, (jax.Array, np.ndarray)):
            continue
        shape = [n for n in wanted.shape if isinstance(n, int)]
        same = to_torch_dtype(found.dtype) == wanted.dtype and found.ndim == wanted.dim()
        if not same or (len(shape) == found.ndim and tuple(shape) != found.shape):
            raise LoweringError(
                f"the lowering of {node.target} gave {found.dtype}{list(found.shape)} where torch gives "
                f"{wanted.dtype}{list(wanted.shape)}"
            )


def _used(node: Node, result: Any, wanted: Any) -> tuple[Any, Any]:
    """Return a result and what torch says it is without the parts no node asks for."""
    if not isinstance(result, (list, tuple)) or not isinstance(wanted, (list, tuple)):
        return result, wanted
    if not all(user.target is operator.getitem for user in node.users):
        return result, wanted
    indices = {user.args[1] for user in node.users}
    return [r for n, r in enumerate(result) if n in indices], [
        w for n, w in enumerate(wanted) if n in indices
    ]


def _pairs(result: Any, wanted: Any) -> Iterator[tuple[Any, Any]]:
    if isinstance(result, (list, tuple)) and isinstance(wanted, (list, tuple)):
        for found, part in zip(result, wanted, strict=False):
            yield from _pairs(found, part)
    else:
        yield result, wanted


def is_lowered(node: Node) -> bool:
    """Return whether a node's target is one that evaluation knows; its arguments may still be refused."""
    target: Any = node.target
    if node.op != "call_function":
        return node.op == "get_attr"
    if isinstance(target, (Draw, Keyed)) or target in VIEWS or target in HIGHER_ORDER or target in OWN:
        return True
    if isinstance(target, OpOverload):
        if target in program_evaluate.RULES:
            return True
        lowering = lowering_of(target)
        return is_composite(target) if lowering is None else lowering.size is None
    return not isinstance(target, HigherOrderOperator)


@functools.cache
def is_composite(op: OpOverload) -> bool:
    """Return whether torch composes an op of others when it runs, which a graph still names whole."""
    # What other libraries define may have a state, or look at values: a program would keep what it saw first.
    if op.namespace not in ("aten", "prims"):
        return False
    schema = schema_of(op)
    # Some functional forms merely allocate and call their out= form: that is the op itself.
    wraps_out = any(has_kernel(other, "CPU") for other in mutating_of(op))
    other = wraps_out or schema.mutated or not op._schema.returns or _NOT_COMPOSED & {*op.tags}
    return any(has_kernel(op, key) for key in _COMPOSITE) and not other


def _as_strided(
    run: Evaluation, node: Node, x: Array, size: Any, stride: Any, storage_offset: int | None = None
) -> Array:
    """Return the elements that strides find in the storage of the node ``x`` is a view of."""
    base = node.args[0]
    assert isinstance(base, Node)
    root = layout.root_of(base)
    offset = run.symbols(base.meta["val"].storage_offset() if storage_offset is None else storage_offset)
    whole = run.values[root]
    storage = store(whole, run.symbols.root_spec(root, whole.shape), node.target)
    return strided.read(storage, tuple(size), tuple(stride), offset)


def _as_strided_scatter(
    run: Evaluation,
    node: Node,
    x: Array,
    src: Array,
    size: Any,
    stride: Any,
    storage_offset: int | None = None,
) -> Array:
    """Return ``x`` with the elements that strides find in a storage of its layout replaced."""
    base = node.args[0]
    assert isinstance(base, Node)
    spec = run.symbols.root_spec(base, x.shape)
    storage = store(x, spec, node.target)
    written = strided.write(storage, src, tuple(size), tuple(stride), storage_offset or 0)
    return strided.read(written, spec.size, spec.stride)


def _copy(run: Evaluation, node: Node, *args: Any, **kwargs: Any) -> None:
    """Refuse a write: ``convert.py`` takes those to arguments of a whole graph, a sub-graph has no others."""
    raise Unsupported("a write to an argument of a graph inside a graph")


def on_device(run: Evaluation, node: Node, *args: Any, **kwargs: Any) -> Any:
    """Return what the device's own kernel makes of tensors that hold these arrays: it looks at their strides."""
    layouts = iter(layout.tensor_nodes(node))

    def tensor(value: Any) -> Any:
        if isinstance(value, (list, tuple)):
            return [tensor(item) for item in value]
        if not isinstance(value, jax.Array):
            return value
        spec = run.symbols.root_spec(next(layouts), value.shape)
        return wrap_strided(store(value, spec, node.target), spec.size, spec.stride, spec.dtype)

    given = [tensor(value) for value in args]
    named = {name: "jax" if name == "device" else tensor(value) for name, value in kwargs.items()}
    with torch.no_grad():
        return to_arrays(node.target(*given, **named))  # type: ignore[operator]


def _batch_norm(run: Evaluation, node: Node, *args: Any, **kwargs: Any) -> list[Array]:
    """Return a normalized batch and its statistics; outside training the CPU saves none, the device all."""
    found = lower(node.target, args, kwargs)  # type: ignore[arg-type]
    wanted = node.meta["val"]
    saves = [not (isinstance(part.shape[0], int) and part.shape[0] == 0) for part in wanted[1:]]
    parts = [found[0], *(part if saved else part[:0] for part, saved in zip(found[1:], saves, strict=True))]
    # torch infers statistics of half types wide or not, by version and by what takes the op apart.
    return [cast(part, to_jax_dtype(like.dtype)) for part, like in zip(parts, wanted, strict=True)]


def _empty(
    run: Evaluation, node: Node, size: Any, *ignored: Any, dtype: torch.dtype | None = None, **others: Any
) -> Array:
    return jnp.zeros(tuple(size), to_jax_dtype(dtype or torch.get_default_dtype()))


def _check_errors(run: Evaluation, node: Node, info: Array, api_name: str, *, is_matrix: bool) -> None:
    """Raise if LAPACK's word on any matrix is not success."""
    reason = "the input matrix is singular, not positive-definite, or the algorithm failed to converge"
    require(info == 0, torch.linalg.LinAlgError, f"{api_name}: {reason}.")  # type: ignore[attr-defined]


def _assert_async(
    run: Evaluation, node: Node, value: Array, message: str = "Expected Tensor to be true"
) -> None:
    """Raise if a value turns out to be false."""
    require(value != 0, RuntimeError, message)


def _assert_scalar(run: Evaluation, node: Node, value: Any, message: str) -> None:
    """Raise if a condition on sizes, which are known, is false."""
    if not value:
        raise RuntimeError(message)


def _nothing(run: Evaluation, node: Node, *args: Any, **kwargs: Any) -> None:
    """Do nothing: what torch asserted of sizes and layouts while it traced holds for this graph."""


OWN: dict[Any, Callable[..., Any]] = {
    _aten._assert_async.default: _assert_async,
    _aten._assert_async.msg: _assert_async,
    _aten._assert_scalar.default: _assert_scalar,
    _aten._assert_tensor_metadata.default: _nothing,
    _aten._linalg_check_errors.default: _check_errors,
    _aten.sym_constrain_range.default: _nothing,
    _aten.sym_constrain_range_for_size.default: _nothing,
    _aten.as_strided.default: _as_strided,
    _aten.as_strided_scatter.default: _as_strided_scatter,
    _aten.copy_.default: _copy,
    _aten._efficientzerotensor.default: _empty,
    _aten.empty.memory_format: _empty,
    _aten.empty_permuted.default: _empty,
    _aten.empty_strided.default: _empty,
    _aten.repeat_interleave.Tensor: lambda run, node, *args, **kwargs: repeat_interleave(
        None, *args, **kwargs
    ),
    _aten.sym_size.int: lambda run, node, x, dim: x.shape[dim],
    _aten.sym_numel.default: lambda run, node, x: x.size,
    _aten._native_batch_norm_legit_functional.default: _batch_norm,
    _aten._native_batch_norm_legit_no_training.default: _batch_norm,
    _aten._ctc_loss.default: on_device,
    _aten._ctc_loss_backward.default: on_device,
    _aten._linalg_det.default: on_device,
    _aten._linalg_slogdet.default: on_device,
    _aten._thnn_fused_gru_cell.default: on_device,
    _aten._thnn_fused_gru_cell_backward.default: on_device,
    _aten._thnn_fused_lstm_cell.default: on_device,
}
"""Ops without a lowering: they need the run itself, or the device answers them before any lowering is asked."""
