"""From a torch model to a program: torch.export, torch's decompositions, the graph and its passes, jax.export.

The functional FX graph that torch.export gives becomes a ``Graph`` as those of ``torch.compile`` do
(``_dynamo/convert.py``), with JAX's dimensions for sizes that are dynamic (``dims.py``), goes through the passes of
mode ``export`` and is run on tracers by the one evaluator (``_program/evaluate.py``). The function that JAX exports
takes the weights and the inputs by name, and returns the outputs, the state that changes and the code of the value
checks: 0, or the number of the first that failed; None where the program has no checks::

    trace(program_of(model, (ids,), None, {"ids": {1: Dim("length")}}), ...)
    Traced(inputs=["ids"], weights={"embed.weight": ...}, dims={"length": ...}, conditions=[("IndexError", "...")], ...)

``api.py`` calls ``program_of`` and ``trace``; ``artifact.py`` writes what they return.

What can go wrong: torch's decompositions may take apart an op that is lowered whole, so the table leaves such ops out
(``_table``); a size that JAX cannot compare is an ``ExportError`` that names the op and the dims.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import torch
from jax import export
from jax.sharding import NamedSharding
from torch import Tensor, nn
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind, OutputKind
from torch.fx import Node as FxNode

from isthmus._device.torch_glue.pytree import tree_map
from isthmus._dynamo import decompositions
from isthmus._dynamo.convert import Conversion, has_rule, is_lowered
from isthmus._dynamo.random import is_random
from isthmus._dynamo.targets import NodeFailure
from isthmus._export import dims, signature_trees
from isthmus._graph.graph import Graph
from isthmus._graph.nodes import Leaf, Node, Type, leaf, temporary
from isthmus._graph.passes import optimise
from isthmus._graph.private import storage_id
from isthmus._interop.arrays import to_jax
from isthmus._ops.registry import lowering_of
from isthmus._ops.tensors.views import VIEWS
from isthmus._program import evaluate
from isthmus._runtime import placement
from isthmus._runtime.compiler import portable, scoped_x64
from isthmus._runtime.dtypes import to_jax_dtype
from isthmus._runtime.traced_results import separated
from isthmus.errors import ExportError, first_line

_WEIGHTS = (InputKind.PARAMETER, InputKind.BUFFER, InputKind.CONSTANT_TENSOR)
_WRITES = ("BUFFER_MUTATION", "PARAMETER_MUTATION")


@dataclass(frozen=True)
class Traced:
    """A program for jax.export, its graph, the tensors it is given first, and what a signature tells of it."""

    exported: export.Exported
    graph: Graph
    inputs: list[str]
    fixed: dict[str, str]
    results: Any
    weights: dict[str, Tensor]
    tied: dict[str, str]
    kinds: dict[str, str]
    conditions: list[tuple[str, str]]
    constraints: list[str]
    function: Callable[..., Any]
    dims: dict[str, Any]


class _Function(nn.Module):
    """A function as a module, since torch.export takes nothing else."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.forward = function  # type: ignore[method-assign]


def program_of(
    model: Any, args: Sequence[Any], kwargs: Mapping[str, Any] | None, dynamic_shapes: Any
) -> ExportedProgram:
    """Return torch's own export of a model or a function."""
    module = model if isinstance(model, nn.Module) else _Function(model)
    examples = _apart((tuple(args), dict(kwargs or {})))
    try:
        return torch.export.export(module, *examples, dynamic_shapes=dynamic_shapes)
    except Exception as error:
        raise ExportError(f"isthmus.export: torch.export refused the model: {error}") from error


def _apart(examples: Any) -> Any:
    """Return example inputs, of which none is the same tensor as another: torch.export would take both for one."""
    seen: set[int] = set()

    def each(value: Any) -> Any:
        if not isinstance(value, Tensor) or id(value) not in seen:
            seen.add(id(value))
            return value
        return value.detach().clone().requires_grad_(value.requires_grad)

    return tree_map(each, examples)


@functools.cache
def _table() -> dict[Any, Callable[..., Any]]:
    """Return the decompositions of ops that nothing here lowers whole, composite ones included."""
    composites = {
        op: function
        for op, function in torch.export.default_decompositions().items()
        # What is lowered whole stays whole: torch's decomposition of it is slower and rounds otherwise.
        if lowering_of(op) is None and op not in VIEWS and not has_rule(op)
    }
    return {**composites, **decompositions.table()}


def trace(program: ExportedProgram, dynamic_shapes: Any, platforms: Sequence[str] | None) -> Traced:
    """Return an exported program of torch's as one of JAX's."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # torch's own, of its own trees
        functional = program.run_decompositions(_table())
    return _Trace(functional, dynamic_shapes).export(platforms)


class _Trace:
    """One export: which placeholder is what, and the function that JAX traces."""

    def __init__(self, program: ExportedProgram, dynamic_shapes: Any) -> None:
        self.program = program
        self.module = program.graph_module
        self.signature = program.graph_signature
        placeholders = [node for node in program.graph.nodes if node.op == "placeholder"]
        self.specs = list(zip(placeholders, self.signature.input_specs, strict=True))
        self.weights, self.tied, self.kinds = self._weights()
        self.inputs = self._inputs()
        self.fixed = self._fixed()
        self.dims = dims.find(self.inputs, dynamic_shapes, program.range_constraints)
        self._refuse_writes()
        self._refuse_random()

    def export(self, platforms: Sequence[str] | None) -> Traced:
        """Convert the graph and run it on tracers."""
        try:
            with scoped_x64(), portable(), temporary():
                conversion, graph = self._converted()
                arrays_of, extras = separated(functools.partial(self._compute, conversion, graph))
                # A weight that the program does not read is still an argument: callers pass the whole state dict.
                jitted = jax.jit(arrays_of, keep_unused=True)
                shardings = self._shardings()
                weights = {
                    name: self._abstract(tensor, shardings.get(name)) for name, tensor in self.weights.items()
                }
                inputs = jax.tree.map(lambda fx: self._abstract(fx.meta["val"]), self.inputs)
                exported = export.export(jitted, platforms=platforms)(weights, inputs)
        except NodeFailure as failure:
            raise ExportError(self._explain(failure)) from failure.cause
        except (NotImplementedError, ValueError) as error:
            where = ", ".join(platforms or [])
            raise ExportError(
                f"isthmus.export: JAX has no program for {where or 'this platform'}: {error}"
            ) from error
        results, conditions = extras[-1]
        return Traced(
            exported,
            graph,
            list(self.inputs),
            self.fixed,
            results,
            self.weights,
            self.tied,
            self.kinds,
            conditions,
            self.dims.constraints,
            arrays_of,
            {str(dim): dim for dim in self.dims.values.values()},
        )

    def _converted(self) -> tuple[Conversion, Graph]:
        """Return the graph; its array leaves are the weights, then the inputs. Outputs are the results, then checks."""
        tensors = [*self.weights.values(), *[fx.meta["val"] for fx in jax.tree.leaves(self.inputs)]]
        leaves = [leaf("array", at, self._type(tensor)) for at, tensor in enumerate(tensors)]
        named = dict(zip([*self.weights, *jax.tree.leaves(self.inputs)], leaves, strict=True))
        arguments = [self._argument(fx, spec, named) for fx, spec in self.specs]
        conversion = Conversion(self.module, self.dims, arguments, {}, mode="export")
        nodes = [result for result in conversion.results if isinstance(result, Node)]
        return conversion, optimise(Graph.of([*nodes, *conversion.effects]), "export")

    def _compute(
        self, conversion: Conversion, graph: Graph, weights: dict[str, Any], inputs: dict[str, Any]
    ) -> tuple[Any, tuple[Any, list[tuple[str, str]]]]:
        """Return the outputs, the weights that change and the code of the checks; then their signature, and errors."""
        # By name: JAX sorts the keys of a dict, and leaves are numbered in the order of the model.
        arrays = [*[weights[name] for name in self.weights], *jax.tree.leaves(inputs)]
        try:
            values = [arrays[n.call.index] for n in graph.inputs if isinstance(n.call, Leaf)]
            run = evaluate.run(graph, values, differentiable=True)
        except evaluate.CallFailure as failure:
            origin = graph.origins.get(failure.node, failure.node)
            if origin not in conversion.origins:
                raise
            raise NodeFailure(conversion.origins[origin], failure.cause) from failure.cause
        computed = iter(run.outputs)
        outputs, state = [], {}
        for spec, result in zip(self.signature.output_specs, conversion.results, strict=True):
            # An output that is no node was known before anything ran: a number, a size or None.
            value = next(computed) if isinstance(result, Node) else result
            if spec.kind is OutputKind.USER_OUTPUT:
                outputs.append(_output(value))
            elif spec.kind.name in _WRITES:
                state[self.tied.get(spec.target or "", spec.target)] = value
        tree = signature_trees.build(self.program.call_spec.out_spec, iter(outputs))
        errors = [(error.__name__, message) for error, message in run.checks.errors]
        code = run.checks.first_failed() if errors else None
        # Described here, since JAX forgets the order of a dict.
        described = signature_trees.describe((tree, state, code), signature_trees.array)
        return (tree, state, code), (described, errors)

    def _argument(self, fx: FxNode, spec: Any, named: dict[Any, Node]) -> Any:
        if spec.kind in _WEIGHTS:
            return named[self.tied.get(spec.target, spec.target)]
        return named[fx] if fx in named else getattr(spec.arg, "value", None)

    def _type(self, value: Tensor) -> Type:
        return Type(tuple(self.dims(size) for size in value.shape), value.dtype)

    def _abstract(self, value: Tensor, sharding: NamedSharding | None = None) -> jax.ShapeDtypeStruct:
        type = self._type(value)
        return jax.ShapeDtypeStruct(type.size, to_jax_dtype(type.dtype), sharding=sharding)

    def _shardings(self) -> dict[str, NamedSharding]:
        """Return how each weight lies on the mesh; nothing where none is split: such a program may run anywhere."""
        if placement.home is None:
            return {}
        shardings = {name: placement.sharding_of(to_jax(tensor)) for name, tensor in self.weights.items()}
        split = any(sharding is not None for sharding in shardings.values())
        return {name: sharding or placement.home for name, sharding in shardings.items()} if split else {}

    def _weights(self) -> tuple[dict[str, Tensor], dict[str, str], dict[str, str]]:
        """Return the tensors a program is given, which of them are others by another name, and what each is."""
        weights: dict[str, Tensor] = {}
        tied: dict[str, str] = {}
        seen: dict[Any, str] = {}
        kinds = {}
        wanted = {spec.target: spec for _, spec in self.specs if spec.kind in _WEIGHTS}
        named = {**self.program.state_dict, **self.program.constants}
        # Names that no placeholder has come last, so that a tied weight is owned by the name that the program reads.
        for name in [*wanted, *(n for n in self.program.state_dict if n not in wanted)]:
            tensor = named[name].detach()
            # Tied only where two names show the same elements: a view of another part is a weight of its own.
            key = (storage_id(tensor), tensor.storage_offset(), tensor.shape, tensor.stride())
            owner = seen.setdefault(key, name)
            if owner in weights and tensor.numel():
                tied[name] = owner
            elif name in wanted:
                weights[name] = tensor
            kinds[name] = _kind(name, wanted.get(name), named[name])
        return weights, tied, {name: kind for name, kind in kinds.items() if name in weights or name in tied}

    def _inputs(self) -> dict[str, Any]:
        """Return the placeholders of tensors in the containers of each input; None stands for what is compiled in."""
        return self._named([self._input(node, spec) for node, spec in self._given()])

    def _fixed(self) -> dict[str, str]:
        """Return the inputs that are no tensors, and what each was."""
        numbers = self._named([getattr(spec.arg, "value", None) for _, spec in self._given()])
        fixed = {name: value for name, value in numbers.items() if self.inputs[name] is None}
        return {name: repr(value) for name, value in fixed.items() if value is not None}

    def _given(self) -> list[tuple[FxNode, Any]]:
        return [(node, spec) for node, spec in self.specs if spec.kind is InputKind.USER_INPUT]

    def _named(self, leaves: list[Any]) -> dict[str, Any]:
        """Return leaves in the containers of each input, by the names of the model's arguments."""
        spec = self.program.call_spec.in_spec
        assert spec is not None
        args, kwargs = signature_trees.build(spec, iter(leaves))
        signature = self.program.module_call_graph[0].signature
        names = getattr(signature, "forward_arg_names", None) or [f"arg{n}" for n in range(len(args))]
        return {**dict(zip(names, args, strict=False)), **kwargs}

    def _input(self, node: FxNode, spec: Any) -> FxNode | None:
        value = node.meta.get("val")
        if isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool)):
            raise ExportError(f"isthmus.export: the input {node.name} is a number that varies: pass a tensor")
        return node if isinstance(value, Tensor) else None

    def _refuse_writes(self) -> None:
        for spec in self.signature.output_specs:
            if spec.kind.name not in (*_WRITES, "USER_OUTPUT", "TOKEN"):
                raise ExportError(
                    f"isthmus.export: the model has an output of kind {spec.kind.name} ({spec.target}); a program "
                    f"only computes: return what is written to an input instead"
                )

    def _refuse_random(self) -> None:
        for node in self.program.graph.nodes:
            if is_random(node):
                raise ExportError(
                    f"isthmus.export: {node.target} draws random numbers, and an exported program has none\n"
                    f"  to go on     model.eval() turns dropout off; or make the numbers an input"
                )

    def _explain(self, failure: NodeFailure) -> str:
        """Return the message for a call that could not be exported, with the op and the dims by name."""
        node, names = failure.node, self.dims.names_in(failure.node)
        text = f"isthmus.export: {node.target} cannot be exported"
        if not is_lowered(node):
            text += ", since nothing lowers it"
        elif names:
            text += f" with dynamic dimension {' and '.join(repr(name) for name in names)}"
        text += f"\n  because      {type(failure.cause).__name__}: {first_line(str(failure.cause))}"
        where = (node.meta.get("stack_trace") or "").strip().splitlines()
        if where:
            text += f"\n  called at    {' '.join(line.strip() for line in where[-2:])}"
        if names:
            text += "\n  to go on     leave those dims out of dynamic_shapes, so that their sizes are fixed"
        return text


def _kind(name: str, spec: Any, value: Any) -> str:
    if spec is not None and spec.kind is InputKind.CONSTANT_TENSOR:
        return "constant"
    if isinstance(value, nn.Parameter):
        return "parameter"
    return "buffer" if spec is None or spec.persistent else "constant"


def _output(value: Any) -> Any:
    """Return an output as an array; a number or a size becomes one, and None stays."""
    if isinstance(value, str):
        raise ExportError(f"isthmus.export: the model returns {value!r}: a program returns arrays")
    return value if value is None else jnp.asarray(value)
