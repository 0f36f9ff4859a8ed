"""FX graphs become ``Graph``s here, at the door: everything behind it is what lazy mode compiles too.

AOTAutograd hands over functional FX graphs whose nodes carry fake tensors. ``Conversion(...)`` walks one for the sizes
of one call and makes ``_graph`` nodes of it, without running anything::

    conversion = Conversion(module, symbols, arguments, storages)
    conversion.values[node]     # the Graph node of an FX node; or a size, a number, None; or a list of these
    conversion.written          # the new value of each placeholder that a trailing ``copy_`` writes to
    conversion.effects          # nodes that only check values: outputs of the graph that nobody returns

What differs between the two forms is settled here, so that no pass and no evaluator has to know FX:

- **Sizes.** The symbols in a graph's sizes are known once the arguments are, so arithmetic on sizes is done now.
- **Views and storages.** ``as_strided`` reads the storage behind its argument, which FX leaves implicit: it becomes
  the calls of ``_graph/view_calls.py`` on the node of that storage.
- **Writes.** ``copy_`` to a placeholder is recorded in ``written``.
- **Draws.** ``random.Keyed`` nodes become random calls with their place after the words of the call.
- **Asserts** become calls that require a condition and return it.
- **Higher-order ops** (``cond``, ``scan``) become calls of a Python function that runs their sub-graphs.

A node that cannot be converted raises ``NodeFailure``, and ``clusters.py`` leaves it out of the program.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.fx import GraphModule
from torch.fx import Node as FxNode

from isthmus._dynamo import layout, refusals
from isthmus._dynamo.evaluate import HIGHER_ORDER, OWN, Evaluation, NodeFailure, constant, on_device
from isthmus._dynamo.layout import Symbols
from isthmus._dynamo.private import without_modes
from isthmus._dynamo.random import Draw, Keyed
from isthmus._dynamo.saved_tensors import KEEP, KEPT, lost
from isthmus._graph import view_calls
from isthmus._graph.layout import Spec, span
from isthmus._graph.nodes import Call, Input, Item, Node, Type, call_of, node
from isthmus._graph.schema import PLACEMENT, schema_of
from isthmus._ops.registry import lowering_of
from isthmus._ops.tensors.views import VIEWS
from isthmus._ops.value_checks import require
from isthmus._program.evaluate import RULES, run_call
from isthmus._runtime.compiler import scoped_x64
from isthmus._runtime.dtypes import to_jax_dtype, to_torch_dtype
from isthmus.errors import LoweringError, Unsupported

_aten = torch.ops.aten
_NUMBER = Type((), torch.int64)


@dataclass(frozen=True)
class Storage:
    """The storage of an argument: its node, the argument's view of it, and the node of where that starts."""

    node: Node
    spec: Spec
    offset: Node | None


class Function:
    """A Python function as the op of a call: named, and equal to itself alone."""

    def __init__(self, name: str, function: Callable[..., Any]) -> None:
        self.__name__, self.function = name, function

    def __call__(self, *values: Any) -> Any:
        """Compute on arrays."""
        return self.function(*values)

    def __repr__(self) -> str:
        return self.__name__


class Conversion:
    """One FX graph as nodes of ``_graph``, for arguments of given sizes."""

    def __init__(
        self,
        module: GraphModule,
        symbols: Symbols,
        arguments: Sequence[Any],
        storages: Mapping[FxNode, Storage],
        words: Node | None = None,
    ) -> None:
        self.module, self.symbols, self.storages, self.words = module, symbols, storages, words
        self.values: dict[FxNode, Any] = {}
        self.written: dict[FxNode, Node] = {}
        self.effects: list[Node] = []
        # The FX node that each node was made for, to say which one failed.
        self.origins: dict[Node, FxNode] = {}
        remaining = iter(arguments)
        for fx in module.graph.nodes:
            if fx.op == "placeholder":
                self.values[fx] = next(remaining)
            elif fx.op == "get_attr":
                self.values[fx] = self._constant(fx)
            elif fx.op != "output":
                self.values[fx] = self._convert(fx)

    def look_up(self, argument: Any) -> Any:
        """Return an argument of an FX node with the nodes in it replaced by their values."""
        if isinstance(argument, FxNode):
            return self.values[argument]
        if isinstance(argument, (list, tuple)):
            return [self.look_up(item) for item in argument]
        if isinstance(argument, dict):
            return {name: self.look_up(item) for name, item in argument.items()}
        if isinstance(argument, slice):
            return slice(*self.look_up([argument.start, argument.stop, argument.step]))
        if isinstance(argument, torch.SymInt):
            return self.symbols(argument)
        return argument

    def _constant(self, fx: FxNode) -> Any:
        """Return a tensor of the module as a node, or a sub-graph as it is."""
        value = constant(self.module, fx)
        if not hasattr(value, "dtype"):
            return value
        type = Type(tuple(value.shape), to_torch_dtype(value.dtype))
        return node(call_of(Function(str(fx.target), lambda: value), {}, [type]))

    def _convert(self, fx: FxNode) -> Any:
        try:
            value = self._value(fx)
        except NodeFailure:
            raise
        except Exception as error:
            raise NodeFailure(fx, error) from error
        for each in _nodes_in(value):
            self.origins.setdefault(each.inputs[0] if isinstance(each.call, Item) else each, fx)
        return value

    def _value(self, fx: FxNode) -> Any:
        target: Any = fx.target
        args, kwargs = self.look_up(fx.args), self.look_up(fx.kwargs)
        if isinstance(target, Draw):
            return self.words
        if isinstance(target, Keyed):
            return self._random(fx, target, args, kwargs)
        if target in _CONVERTERS:
            return _CONVERTERS[target](self, fx, *args, **kwargs)
        if target in HIGHER_ORDER:
            return self._higher_order(fx)
        if isinstance(target, OpOverload):
            return self._overload(fx, target, args, kwargs)
        if any(True for _ in _nodes_in([args, kwargs])) and target is not operator.getitem:
            return self._function(fx, target, args, kwargs)
        return target(*args, **kwargs)  # arithmetic on sizes, operator.getitem

    def _overload(self, fx: FxNode, op: OpOverload, args: list[Any], kwargs: dict[str, Any]) -> Any:
        if op not in VIEWS:
            _refuse(op, args, kwargs)
        schema = schema_of(op)
        arguments = dict(zip([a.name for a in schema.arguments], args, strict=False)) | kwargs
        lowering = lowering_of(op)
        own = op in OWN and OWN[op] is on_device
        if own or (lowering is None and op not in VIEWS and op not in RULES):
            return self._on_device(fx, op, arguments)
        if lowering is not None and lowering.size is not None and op not in RULES:
            raise Unsupported(f"{op} has no lowering with sizes known beforehand")
        return self._call(fx, op, arguments)

    def _on_device(self, fx: FxNode, op: OpOverload, arguments: dict[str, Any]) -> Any:
        """Return a call of the device's own kernel, which looks at the strides of its arguments."""
        layouts = []
        for each in layout.tensor_nodes(fx):
            value = self.values[each]
            assert isinstance(value, Node)
            layouts.append(self.symbols.root_spec(each, value.type.size))
        return self._call(fx, op, arguments, layouts=tuple(layouts))

    def _random(self, fx: FxNode, target: Keyed, args: list[Any], kwargs: dict[str, Any]) -> Any:
        schema = schema_of(target.op)
        arguments = dict(zip([a.name for a in schema.arguments], args[1:], strict=False)) | kwargs
        return self._call(fx, target.op, arguments, draw=(args[0], target.index))

    def _function(
        self, fx: FxNode, function: Any, args: Sequence[Any], kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Return a call of a Python function of arrays."""
        if kwargs:
            raise Unsupported(f"{function} with arguments by name")
        return self._call(fx, function, {str(n): value for n, value in enumerate(args)})

    def _higher_order(self, fx: FxNode) -> Any:
        """Return a call that runs an op of sub-graphs; they are evaluated when the program is traced."""
        args = self.look_up(fx.args)
        inputs = list(_nodes_in(args))
        outer = Evaluation(self.module, self.symbols)
        rule = HIGHER_ORDER[fx.target]

        def run(*arrays: Any) -> Any:
            return rule(outer, fx, _filled(args, iter(arrays)))

        return self._function(fx, Function(str(fx.target), run), inputs)

    def _call(
        self,
        fx: FxNode,
        op: Any,
        arguments: Mapping[str, Any],
        draw: tuple[Node, int] | None = None,
        layouts: tuple[Spec, ...] | None = None,
    ) -> Any:
        """Return the results of a call, in the structure torch gives them."""
        inputs: list[Node] = []
        named = {
            name: _with_inputs(value, inputs) for name, value in arguments.items() if name not in PLACEMENT
        }
        if draw is not None:
            inputs.append(draw[0])
        parts: dict[str, Any] = {
            "context": (torch.get_default_dtype(), None),
            "random": draw is not None,
            "draw": 0 if draw is None else draw[1],
            "layouts": layouts,
        }
        announced = fx.meta.get("val")
        types = self._types(announced)
        if types is None:
            types = _inferred(call_of(op, named, [None], **parts), inputs)
        made = node(call_of(op, named, types, **parts), *inputs)
        if announced is None:
            return made if len(types) == 1 else list(made.results)
        results = iter(made.results or (made,))
        return self._structured(announced, results)

    def _types(self, value: Any) -> list[Type | None] | None:
        """Return the types that torch announces, None for one that is no tensor; None if a size is not known."""
        if value is None:
            return None
        try:
            return [self._type(leaf) for leaf in _leaves(value)]
        except TypeError:  # a symbol that no argument tells: the size came from data
            return None

    def _type(self, value: Any) -> Type | None:
        if not isinstance(value, Tensor):
            return None
        return Type(tuple(self.symbols(n) for n in value.shape), value.dtype)

    def _structured(self, announced: Any, results: Iterator[Any]) -> Any:
        """Return results in the structure torch announced; a size or a number is known already."""
        if isinstance(announced, (list, tuple)):
            return [self._structured(item, results) for item in announced]
        result = next(results)
        if isinstance(announced, Tensor):
            return result
        return self.symbols(announced) if isinstance(announced, torch.SymInt) else announced

    # ---- ops that FX and Graph say differently

    def _as_strided(
        self, fx: FxNode, x: Any, size: Any, stride: Any, storage_offset: int | None = None
    ) -> Any:
        """Return the elements that strides find in the storage of the node that ``x`` is a view of."""
        base = fx.args[0]
        assert isinstance(base, FxNode)
        root = layout.root_of(base)
        start = self.symbols(base.meta["val"].storage_offset() if storage_offset is None else storage_offset)
        spec = Spec(tuple(size), tuple(stride), fx.meta["val"].dtype)
        if root in self.storages:
            return self._of_argument(root, spec, start)
        whole = self.values[root]
        storage = view_calls.chained(view_calls.store(self.symbols.root_spec(root, whole.type.size)), whole)
        _check_bounds(storage, spec, start)
        return view_calls.read_node(storage, spec, start=start)

    def _of_argument(self, root: FxNode, spec: Spec, start: int) -> Node:
        storage = self.storages[root]
        # torch's fake tensor may start elsewhere in its storage than the argument does.
        start -= self.symbols(root.meta["val"].storage_offset())
        if storage.offset is None:
            _check_bounds(storage.node, spec, start)
            return view_calls.read_node(storage.node, spec, start=start)
        offset = storage.offset
        if start:
            offset = node(call_of(operator.add, {"0": Input(0), "1": start}, [_NUMBER]), offset)
        return view_calls.read_node(storage.node, spec, offset)

    def _as_strided_scatter(
        self, fx: FxNode, x: Node, src: Node, size: Any, stride: Any, storage_offset: int | None = None
    ) -> Any:
        """Return ``x`` with the elements that strides find in a storage of its layout replaced."""
        base = fx.args[0]
        assert isinstance(base, FxNode)
        spec = self.symbols.root_spec(base, x.type.size)
        storage = view_calls.chained(view_calls.store(spec), x)
        view = Spec(tuple(size), tuple(stride), x.type.dtype)
        _check_bounds(storage, view, storage_offset or 0)
        written = view_calls.write_node(storage, view, src, start=storage_offset or 0)
        return view_calls.read_node(written, spec)

    def _copy(self, fx: FxNode, target: Node, source: Node, non_blocking: bool = False) -> Any:
        """Record the new value of an argument of the graph, which the program will write there."""
        place = fx.args[0]
        if not isinstance(place, FxNode) or place.op != "placeholder":
            raise Unsupported("a write to anything but an argument of the graph")
        new = self._call(fx, _aten.copy.default, {"self": target, "src": source})
        self.written[place] = new
        return new

    def _keep(self, fx: FxNode, values: list[Any]) -> Any:
        return list(values)  # ``returns.py`` makes one result of them

    def _kept(self, fx: FxNode, values: Any, index: int, *layout: Any) -> Any:
        if not isinstance(values, list):
            raise lost()
        return values[index]

    def _assert_async(self, fx: FxNode, value: Node, message: str = "Expected Tensor to be true") -> None:
        self._effect(_asserting, value, RuntimeError, message)

    def _assert_scalar(self, fx: FxNode, value: Any, message: str) -> None:
        if not value:  # a condition on sizes, which are known
            raise RuntimeError(message)

    def _check_errors(self, fx: FxNode, info: Node, api_name: str, *, is_matrix: bool) -> None:
        reason = "the input matrix is singular, not positive-definite, or the algorithm failed to converge"
        self._effect(_succeeded, info, torch.linalg.LinAlgError, f"{api_name}: {reason}.")  # type: ignore[attr-defined]

    def _effect(self, function: Any, value: Node, error: type[Exception], message: str) -> None:
        """Add a call that requires something of a value, which must run though nothing reads its result."""
        named = {"0": Input(0), "1": error, "2": message}
        self.effects.append(node(call_of(function, named, [value.type]), value))

    def _with_effects(self, fx: FxNode, token: Any, op: Any, *rest: Any, **kwargs: Any) -> Any:
        """Convert an op torch keeps in its place by a token, which a program has no use for."""
        if op not in _CONVERTERS:
            raise Unsupported(f"the effect of {op}")
        return [token, _CONVERTERS[op](self, fx, *rest, **kwargs)]

    def _nothing(self, fx: FxNode, *args: Any, **kwargs: Any) -> None:
        """Do nothing: what torch asserted of sizes and layouts while it traced holds for this graph."""

    def _sym_size(self, fx: FxNode, x: Node, dim: int) -> Any:
        return x.type.size[dim]

    def _sym_numel(self, fx: FxNode, x: Node) -> Any:
        count = 1
        for n in x.type.size:
            count *= n
        return count


_CONVERTERS: dict[Any, Callable[..., Any]] = {
    _aten.as_strided.default: Conversion._as_strided,
    _aten.as_strided_scatter.default: Conversion._as_strided_scatter,
    _aten.copy_.default: Conversion._copy,
    _aten._assert_async.default: Conversion._assert_async,
    _aten._assert_async.msg: Conversion._assert_async,
    _aten._assert_scalar.default: Conversion._assert_scalar,
    _aten._assert_tensor_metadata.default: Conversion._nothing,
    _aten._linalg_check_errors.default: Conversion._check_errors,
    _aten.sym_constrain_range.default: Conversion._nothing,
    _aten.sym_constrain_range_for_size.default: Conversion._nothing,
    _aten.sym_size.int: Conversion._sym_size,
    _aten.sym_numel.default: Conversion._sym_numel,
    torch.ops.higher_order.with_effects: Conversion._with_effects,
    KEEP: Conversion._keep,
    KEPT: Conversion._kept,
}


def _check_bounds(storage: Node, spec: Spec, start: int) -> None:
    """Raise where a view reaches outside of its storage: here, since a view that is returned is never computed."""
    elements = storage.type.nbytes // spec.dtype.itemsize
    if not 0 <= start <= elements - span(spec.size, spec.stride):
        raise Unsupported("elements before or after those of a storage")


def _asserting(value: Any, error: type[Exception], message: str) -> Any:
    require(value != 0, error, message)
    return value


def _succeeded(info: Any, error: type[Exception], message: str) -> Any:
    require(info == 0, error, message)
    return info


def _nodes_in(value: Any) -> Iterator[Node]:
    if isinstance(value, Node):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _nodes_in(item)
    elif isinstance(value, dict):
        yield from _nodes_in(list(value.values()))


def _leaves(value: Any) -> Iterator[Any]:
    if isinstance(value, (list, tuple)):
        for item in value:
            yield from _leaves(item)
    else:
        yield value


def _with_inputs(value: Any, inputs: list[Node]) -> Any:
    """Return an argument with an ``Input`` for each node in it, which joins ``inputs``."""
    if isinstance(value, Node):
        inputs.append(value)
        return Input(len(inputs) - 1)
    return [_with_inputs(item, inputs) for item in value] if isinstance(value, (list, tuple)) else value


def _filled(value: Any, arrays: Iterator[Any]) -> Any:
    """Return arguments with an array for each node in them, in the order of ``_nodes_in``."""
    if isinstance(value, Node):
        return next(arrays)
    if isinstance(value, (list, tuple)):
        return [_filled(item, arrays) for item in value]
    return value


def _inferred(call: Call, inputs: Sequence[Node]) -> list[Type | None]:
    """Return the types of a call whose sizes torch left open, by tracing it."""
    examples = [jax.ShapeDtypeStruct(n.type.size, to_jax_dtype(n.type.dtype)) for n in inputs]
    with scoped_x64():
        results = jax.eval_shape(lambda *arrays: run_call(call, arrays), *examples)
    if not isinstance(results, list):
        results = [results]
    types = [None if r is None else Type(tuple(r.shape), to_torch_dtype(r.dtype)) for r in results]
    if not types:
        raise LoweringError(f"{call.op} gave nothing")
    return types


def _refuse(op: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """Raise if the CPU refuses a call of an op on tensors of these types."""
    with without_modes():
        refusals.check(op, _blank(list(args)), _blank(dict(kwargs)))


def _blank(value: Any) -> Any:
    if isinstance(value, Node):
        return torch.empty(value.type.size, dtype=value.type.dtype, device="meta")
    if isinstance(value, (list, tuple)):
        return [_blank(item) for item in value]
    return {name: _blank(item) for name, item in value.items()} if isinstance(value, dict) else value
