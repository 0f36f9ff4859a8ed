"""FX graphs become ``Graph``s here, at the door: everything behind it is what lazy mode compiles too.

AOTAutograd and ``torch.export`` hand over functional FX graphs whose nodes carry fake tensors. ``Conversion`` walks one
for the sizes of one call, or for symbolic ones, and makes ``_graph`` nodes of it, without running anything::

    conversion = Conversion(module, symbols, arguments, storages)
    conversion.values[node]     # the Graph node of an FX node; or a size, a number, None; or a list of these
    conversion.results          # the same for what the graph returns
    conversion.written          # the new value of each placeholder that a trailing ``copy_`` writes to
    conversion.effects          # nodes that only check values: outputs of the graph that are not returned

``specialization.py`` and ``_export/trace.py`` convert whole graphs; sub-graphs are converted by the ``Conversion`` of
the graph around. What differs between the two forms is settled here and in ``converters.py``, so that no pass and no
evaluator has to know FX:

- **Sizes.** The symbols in a graph's sizes are known once the arguments are, so arithmetic on sizes is done now; with
  the dimensions of an export it is JAX's arithmetic on dimensions.
- **Views and storages.** ``as_strided`` reads the storage behind its argument, which FX leaves implicit: it becomes
  the calls of ``_graph/view_calls.py`` on the node of that storage.
- **Writes.** ``copy_`` to a placeholder is recorded in ``written``.
- **Draws.** ``random.Keyed`` nodes become random calls with their place after the words of the call.
- **Asserts** become calls that require a condition and return it.
- **Higher-order ops** (``cond``, ``scan``) become calls of functions that have ``Graph``s among their arguments
  (``higher_order.py``); a nested region joins the graph around it.

A node that cannot be converted raises ``NodeFailure``, and ``clusters.py`` leaves it out of the program.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import numpy as np
import torch
from torch import Tensor
from torch.fx import GraphModule
from torch.fx import Node as FxNode

from isthmus._device.core.host_tensors import array_from_cpu
from isthmus._device.core.transfers import array_of
from isthmus._dynamo import converters, flex_attention, higher_order, layout, refusals
from isthmus._dynamo.layout import Symbols
from isthmus._dynamo.random import Draw, Keyed, is_random
from isthmus._dynamo.targets import COPIES, ON_DEVICE, NodeFailure, is_composite
from isthmus._graph.arguments import flatten
from isthmus._graph.graph import Graph
from isthmus._graph.layout import Spec
from isthmus._graph.nodes import Call, Input, Item, Node, Type, call_of, leaf, node, numbered
from isthmus._graph.passes import optimise
from isthmus._graph.private import HigherOrderOperator, OpOverload
from isthmus._graph.schema import PLACEMENT, schema_of
from isthmus._ops.registry import lowering_of
from isthmus._ops.tensors.views import VIEWS
from isthmus._program.evaluate import RULES, run_call
from isthmus._program.flex_attention import Scatter
from isthmus._runtime.compiler import scoped_x64
from isthmus._runtime.dtypes import to_jax_dtype, to_torch_dtype
from isthmus._runtime.host_arrays import to_numpy
from isthmus._runtime.private import is_traced
from isthmus.errors import ExportError, LoweringError, Unsupported

_aten = torch.ops.aten
# ``tobytes`` of a large constant would cost more than it saves.
# Elements of a constant that is compared by its contents.
_SMALL = 1024
_NUMBERS = (torch.SymInt, torch.SymFloat, torch.SymBool)


@dataclass(frozen=True)
class Storage:
    """The storage of an argument: its node, the argument's view of it, and the node of where that starts."""

    node: Node
    spec: Spec
    offset: Node | None


class Constant:
    """A tensor of the module as the op of a call.

    Small ones are equal if their contents are, so that the graphs of two sizes, each with constants of its own, are
    alike (``_program/ranges.py``); a large one is equal to itself alone.
    """

    def __init__(self, name: str, array: jax.Array) -> None:
        self.__name__, self.array = name, array
        small = array.size <= _SMALL and not is_traced([array])
        contents = to_numpy(array).tobytes() if small else id(array)
        self._key = (tuple(array.shape), array.dtype, contents)

    def __eq__(self, other: object) -> bool:
        """Return whether another constant has the same contents."""
        return isinstance(other, Constant) and self._key == other._key

    def __hash__(self) -> int:
        return hash(self._key)

    def __call__(self) -> jax.Array:
        """Return the array."""
        return self.array


class Conversion:
    """One FX graph as nodes of ``_graph``, for arguments of given sizes.

    Arguments:
        module: the FX graph.
        symbols: the sizes that its symbols stand for.
        arguments: a node for each tensor among the placeholders; anything else is compiled in as it is.
        storages: of placeholders that are views, the storage; reads through strides go there.
        words: the node of the call's draw.
        mode: whose passes sub-graphs go through.
        inside: whether this is a sub-graph: it may not write to its arguments or look at their strides, and a number
            that it computes stays an array.
        infers: whether types are found by tracing each call, since torch traced the graph with other dtypes.
    """

    def __init__(
        self,
        module: GraphModule,
        symbols: Symbols,
        arguments: Sequence[Any],
        storages: Mapping[FxNode, Storage],
        words: Node | None = None,
        *,
        mode: str = "compile",
        inside: bool = False,
        infers: bool = False,
    ) -> None:
        self.module, self.symbols, self.storages, self.words = module, symbols, storages, words
        self.mode, self.inside, self.infers = mode, inside, infers
        self.values: dict[FxNode, Any] = {}
        self.written: dict[FxNode, Node] = {}
        self.effects: list[Node] = []
        # The FX node that each node was made for, to say which one failed.
        # The first FX node counts: equal calls are one node.
        self.origins: dict[Node, FxNode] = {}
        remaining = iter(arguments)
        for fx in module.graph.nodes:
            # In the order of the graph, so every argument of a node has a value by then.
            if fx.op == "placeholder":
                self.values[fx] = next(remaining)
            elif fx.op == "get_attr":
                self.values[fx] = self._constant(fx)
            elif fx.op == "output":
                self.results = self.look_up(fx.args[0])
            else:
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
        value = operator.attrgetter(str(fx.target))(self.module)
        if not isinstance(value, Tensor):
            return value
        # Constants live on the device, wherever the module has them.
        array = array_of(value) if value.device.type == "jax" else array_from_cpu(value.cpu())
        type = Type(tuple(value.shape), value.dtype)
        return node(call_of(Constant(str(fx.target), array), {}, [type]))

    def _convert(self, fx: FxNode) -> Any:
        try:
            value = self._value(fx)
        except NodeFailure:
            raise
        except Exception as error:
            raise NodeFailure(fx, error) from error
        # Items are found by the call in front of them.
        for each in _nodes_in(value):
            self.origins.setdefault(each.inputs[0] if isinstance(each.call, Item) else each, fx)
        return value

    def _value(self, fx: FxNode) -> Any:
        target: Any = fx.target
        args, kwargs = self.look_up(fx.args), self.look_up(fx.kwargs)
        if self.infers:
            # Scatters of flex_attention's gradients are no arrays until they are summed.
            scatter = flex_attention.scatter(self, fx, args)
            if scatter is not None:
                return scatter
            args, kwargs = self.look_up(fx.args), self.look_up(fx.kwargs)
        # The draw is an input of the program: its words are the last source.
        if isinstance(target, Draw):
            return self.words
        if isinstance(target, Keyed):
            return self._random(fx, target, args, kwargs)
        # In a loop a number stays an array, since its value is not known while the body is traced.
        if self.inside and target is _aten._local_scalar_dense.default:
            return args[0]
        if target in _CONVERTERS:
            return _CONVERTERS[target](self, fx, *args, **kwargs)
        if isinstance(target, OpOverload):
            return self._overload(fx, COPIES.get(target, target), args, kwargs)
        # A Python function of tensors: it has no schema, so its arguments have numbers for names.
        if any(True for _ in _nodes_in([args, kwargs])) and target is not operator.getitem:
            if kwargs:
                raise Unsupported(f"{target} with arguments by name")
            return self.call(fx, target, numbered(args))
        return _ON_SIZES.get(target, target)(*args, **kwargs)  # arithmetic on sizes, operator.getitem

    def _overload(self, fx: FxNode, op: OpOverload, args: list[Any], kwargs: dict[str, Any]) -> Any:
        # An exported graph may have sizes that are symbols, of which the CPU cannot be asked.
        # Views are never refused; asking would cost more than converting them.
        if op not in VIEWS and self.mode != "export":
            refusals.check(op, args, kwargs)
        schema = schema_of(op)
        arguments = dict(zip([a.name for a in schema.arguments], args, strict=False)) | kwargs
        # AOTAutograd leaves attention whole in sub-graphs and exports.
        if op is _aten.scaled_dot_product_attention.default:
            return converters.attention(self, fx, op, **arguments)
        lowering = lowering_of(op)
        # The device's kernels look at strides, so the call carries the layouts of its arguments.
        if op in ON_DEVICE or (lowering is None and op not in VIEWS and op not in RULES):
            return self.on_device(fx, op, arguments)
        if lowering is not None and lowering.size is not None and op not in RULES:
            raise Unsupported(f"{op} has no lowering with sizes known beforehand")
        return self.call(fx, op, arguments)

    def on_device(self, fx: FxNode, op: OpOverload, arguments: dict[str, Any]) -> Any:
        """Return a call of the device's own kernel, which looks at the strides of its arguments."""
        layouts = []
        for each in layout.tensor_nodes(fx):
            value = self.values[each]
            assert isinstance(value, Node)
            layouts.append(self.symbols.root_spec(each, value.type.size))
        return self.call(fx, op, arguments, layouts=tuple(layouts))

    def _random(self, fx: FxNode, target: Keyed, args: list[Any], kwargs: dict[str, Any]) -> Any:
        schema = schema_of(target.op)
        arguments = dict(zip([a.name for a in schema.arguments], args[1:], strict=False)) | kwargs
        return self.call(fx, target.op, arguments, draw=(args[0], target.index))

    # ---- graphs inside this one

    def subgraph(
        self, module: GraphModule, operands: Sequence[Any], infers: bool = False
    ) -> tuple[Graph, list[Any]]:
        """Convert a graph of a higher-order op to a ``Graph`` whose i-th array leaf is the i-th operand.

        A node, or a type, among the operands is a leaf; anything else is compiled in. Returned beside the graph is, for
        each result of the module, the number of the graph's output, or None where there is none.
        """
        # Arrays become leaves of the sub-graph; sizes and numbers are known and compiled in.
        leaves = [
            leaf("array", at, each.type if isinstance(each, Node) else each)
            if isinstance(each, (Node, Type))
            else each
            for at, each in enumerate(operands)
        ]
        inner = self._inner(module, leaves, infers)
        outputs: list[Node] = []

        def number(result: Any) -> Any:
            if isinstance(result, Scatter):
                return result.map(number)
            if not isinstance(result, Node):
                raise Unsupported(f"{result!r} as a result of a graph inside a graph")
            outputs.append(result)
            return len(outputs) - 1

        results = [None if result is None else number(result) for result in flatten(inner.results)]
        # ``effects`` are no results, and are cut off again after the passes have seen them.
        # Nodes that only check values are computed though no result needs them.
        graph = optimise(Graph.of([*outputs, *inner.effects]), self.mode)
        return replace(graph, outputs=graph.outputs[: len(outputs)]), results

    def inlined(self, fx: FxNode, module: GraphModule, operands: Sequence[Any]) -> Any:
        """Convert a graph inside this one as a part of it, and return its results."""
        inner = self._inner(module, operands)
        self.effects += inner.effects
        self.origins |= dict.fromkeys(inner.origins, fx)
        return inner.results

    def _inner(self, module: GraphModule, arguments: Sequence[Any], infers: bool = False) -> Conversion:
        for each in module.graph.nodes:
            if is_random(each):
                # Its place among the draws of the call is not known here, and a loop would draw the same each time.
                raise Unsupported(f"{each.target} inside a graph inside a graph")
        symbols = self.symbols.inside(module.graph.find_nodes(op="placeholder"), arguments)
        try:
            # Without storages: a sub-graph may not look at the strides of its arguments.
            return Conversion(module, symbols, arguments, {}, mode=self.mode, inside=True, infers=infers)
        except NodeFailure as failure:
            # The node that cannot be converted is, in this graph, the one that calls the other.
            raise Unsupported(str(failure)) from failure.cause

    # ---- calls

    def function(
        self, function: Any, args: Sequence[Any], types: Sequence[Type | None] | None = None
    ) -> list[Any]:
        """Return the results of a call of a function of arrays; where no types are given, they are found by tracing."""
        call = self.node_of(function, numbered(args), types)
        return list(call.results) if len(call.types) != 1 else [call]

    def call(
        self,
        fx: FxNode,
        op: Any,
        arguments: Mapping[str, Any],
        draw: tuple[Node, int] | None = None,
        layouts: tuple[Spec, ...] | None = None,
    ) -> Any:
        """Return the results of a call, in the structure torch gives them."""
        announced = fx.meta.get("val")
        types = self._types(op, announced)
        result = self.node_of(op, arguments, types, draw, layouts)
        # Types that torch did not announce were found by tracing; compare what torch did say.
        if types is None and not self.infers:
            _compare(fx, result.types, announced)
        # A number that a call computes stays an array (inside of a loop that counts).
        if announced is None or isinstance(announced, _NUMBERS):
            return result if len(result.types) == 1 else list(result.results)
        return self._structured(announced, iter(result.results or (result,)))

    def node_of(
        self,
        op: Any,
        arguments: Mapping[str, Any],
        types: Sequence[Type | None] | None,
        draw: tuple[Node, int] | None = None,
        layouts: tuple[Spec, ...] | None = None,
    ) -> Node:
        """Return the node of a call; where no types are given, they are found by tracing."""
        inputs: list[Node] = []
        named = {
            name: _with_inputs(value, inputs) for name, value in arguments.items() if name not in PLACEMENT
        }
        if draw is not None:
            inputs.append(draw[0])
        parts: dict[str, Any] = {
            # torch's default dtype now is that of the trace.
            "context": (torch.get_default_dtype(), None),
            "random": draw is not None,
            "draw": 0 if draw is None else draw[1],
            "layouts": layouts,
        }
        if types is None:
            types = _inferred(call_of(op, named, [None], **parts), inputs)
        return node(call_of(op, named, types, **parts), *inputs)

    def _types(self, op: Any, value: Any) -> list[Type | None] | None:
        """Return the types that torch announces, None for one that is no tensor; None if they are to be inferred."""
        if value is None or self.infers or isinstance(value, _NUMBERS):
            return None
        # A call whose sizes no argument tells is traced by JAX instead, which finds its types.
        try:
            types = [self._type(each) for each in flatten(value)]
        except (TypeError, ExportError):  # a symbol that no argument tells: the size came from data
            return None
        # Of one size torch and JAX may write different expressions; JAX's are those that it can compare later.
        exact = op in RULES or all(type(n) is int for t in types if t is not None for n in t.size)
        return types if exact else None

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


_CONVERTERS: dict[Any, Callable[..., Any]] = {**converters.CONVERTERS, **higher_order.CONVERTERS}
_ON_SIZES: dict[Any, Callable[..., Any]] = {
    torch.sym_max: jax.core.max_dim,
    torch.sym_min: jax.core.min_dim,
    torch.sym_sum: sum,
}
"""Functions of sizes that are torch's, for sizes that may be JAX's dimensions."""


def has_rule(op: Any) -> bool:
    """Return whether an op that need not have a lowering is known to conversion or to the evaluator."""
    return op in _CONVERTERS or op in RULES or op in ON_DEVICE


def is_lowered(fx: FxNode) -> bool:
    """Return whether a node's target is one that conversion knows; its arguments may still be refused."""
    target: Any = fx.target
    if fx.op != "call_function":
        return fx.op == "get_attr"
    if isinstance(target, (Draw, Keyed)) or target in VIEWS or has_rule(target):
        return True
    if isinstance(target, OpOverload):
        lowering = lowering_of(target)
        return is_composite(target) if lowering is None else lowering.size is None
    return not isinstance(target, HigherOrderOperator)


def _nodes_in(value: Any) -> Iterator[Node]:
    if isinstance(value, Node):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _nodes_in(item)
    elif isinstance(value, dict):
        yield from _nodes_in(list(value.values()))


def _with_inputs(value: Any, inputs: list[Node]) -> Any:
    """Return an argument with an ``Input`` for each node in it, which joins ``inputs``."""
    if isinstance(value, Node):
        inputs.append(value)
        return Input(len(inputs) - 1)
    return [_with_inputs(item, inputs) for item in value] if isinstance(value, (list, tuple)) else value


def _inferred(call: Call, inputs: Sequence[Node]) -> list[Type | None]:
    """Return the types of a call whose sizes torch left open, by tracing it."""
    examples = [jax.ShapeDtypeStruct(n.type.size, to_jax_dtype(n.type.dtype)) for n in inputs]
    # With 64-bit types on, as all programs are traced.
    with scoped_x64():
        results = jax.eval_shape(lambda *arrays: _arrays(run_call(call, arrays)), *examples)
    types = [None if r is None else Type(tuple(r.shape), to_torch_dtype(r.dtype)) for r in results]
    if not types:
        raise LoweringError(f"{call.op} gave nothing")
    return types


def _arrays(results: Any) -> list[Any]:
    """Return the results of a call that are arrays, None for those that are sizes."""
    return [each if isinstance(each, (jax.Array, np.ndarray)) else None for each in flatten(results)]


def _compare(fx: FxNode, types: Sequence[Type | None], announced: Any) -> None:
    """Raise if types that were found by tracing are not torch's in dtype and rank; unused results may be anything."""
    # A result that nothing reads may have another shape in a lowering.
    used = {user.args[1] for user in fx.users if user.target is operator.getitem}
    for at, (type, expected) in enumerate(zip(types, flatten(announced), strict=False)):
        if type is None or not isinstance(expected, Tensor) or (len(types) > 1 and at not in used):
            continue
        if (type.dtype, len(type.size)) != (expected.dtype, expected.dim()):
            shown = f"{expected.dtype}{list(expected.shape)}"
            raise LoweringError(f"the lowering of {fx.target} gave {type} where torch gives {shown}")
