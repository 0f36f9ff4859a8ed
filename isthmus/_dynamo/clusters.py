"""A graph with nodes nothing lowers: what is lowered is gathered into programs, the rest runs node by node between.

Usually nothing is left out, and ``Clusters.run`` is one ``Program``. Otherwise torch's ``CapabilityBasedPartitioner``
groups the other nodes into clusters, each a program, and FX runs the graph of programs and nodes::

    cluster_0(x) -> my_lib.op(%cluster_0) -> cluster_1(...)

Whether a node is lowered may only show when it is traced, so a graph is cut again, without the node, when one fails
(``NodeFailure``). Each such node is warned about, or refused, as ``options["fallback"]`` says.
"""

from __future__ import annotations

import operator
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch.fx import GraphModule, Node

from isthmus._device.core.fallback import FallbackWarning
from isthmus._dynamo import compile_log
from isthmus._dynamo.convert import is_lowered
from isthmus._dynamo.options import Options
from isthmus._dynamo.program import Program
from isthmus._dynamo.random import Draw
from isthmus._dynamo.saved_tensors import KEEP, KEPT
from isthmus._dynamo.targets import NodeFailure
from isthmus._ops.tensors.views import VIEWS
from isthmus.errors import MissingLowering, first_line

_aten = torch.ops.aten
_ID = "isthmus_id"
# A program of nothing but these would compute nothing.
_FREE = {*VIEWS, operator.getitem, _aten.as_strided.default}


class Clusters:
    """A functional graph as a callable of torch's list of arguments: one program, or several with nodes between."""

    def __init__(
        self, module: GraphModule, options: Options, name: str, parameters: set[int] | None = None
    ) -> None:
        self.module, self.options, self.name = module, options, name
        self.parameters = parameters or set()
        for number, node in enumerate(module.graph.nodes):
            # FX copies and cuts rename nodes; the number stays with the node's metadata.
            node.meta[_ID] = number
        self.reasons: dict[int, str] = {}
        self.programs: list[Program] = []
        for node in module.graph.nodes:
            if node.op in ("call_function", "call_method", "call_module") and not is_lowered(node):
                self._exclude(node, "nothing lowers it")
        # Last, since it needs to know all nodes that are outside.
        self.run = self._build()
        compile_log.graph(self)

    def __call__(self, args: list[Any]) -> Any:
        """Run one call; ``args`` is emptied once it has succeeded."""
        while True:
            try:
                return self.run(args)
            except NodeFailure as failure:
                # One node more is outside, and the graph is cut again; the call starts over with all its
                # arguments.
                self._exclude(failure.node, f"{type(failure.cause).__name__}: {failure.cause}")
                self.run = self._build()

    @property
    def outside(self) -> list[tuple[Node, str]]:
        """The nodes that no program computes, with the reason."""
        nodes = {node.meta[_ID]: node for node in self.module.graph.nodes}
        return [(nodes[number], reason) for number, reason in sorted(self.reasons.items())]

    def _exclude(self, node: Node, reason: str) -> None:
        if self.options.fallback == "error":
            raise MissingLowering(
                f"no lowering for {node.target} ({reason})\n"
                f"  in           {self.name}: {node.format_node()}\n"
                f'  to go on     torch.compile(..., options={{"fallback": "cpu"}}) runs it outside the program\n'
                f"  to fix it    docs/add-a-lowering.md"
            )
        if self.options.fallback == "warn":
            warnings.warn(
                f"{node.target} runs outside the compiled programs ({first_line(reason)})",
                FallbackWarning,
                stacklevel=2,
            )
        self.reasons[node.meta[_ID]] = reason

    def _build(self) -> Callable[[list[Any]], Any]:
        if self.reasons:
            cut, self.programs = _cut(self.module, self._inside(), self.options, self.name)
            return _calling(cut)
        self.programs = [Program(self.module, self.options, self.name, self.parameters)]
        return self.programs[0]

    def _inside(self) -> set[int]:
        """Return the nodes that may be part of a program."""
        inside: set[int] = set()
        for node in self.module.graph.nodes:
            if node.op != "call_function" or node.meta[_ID] in self.reasons:
                continue
            if node.target in (_aten.copy_.default, KEEP, KEPT) or isinstance(node.target, Draw):
                continue  # writes, draws and what passes to backward happen once, between the programs
            source = node.args[0] if node.target is operator.getitem else None
            if isinstance(source, Node) and source.op == "call_function" and source.meta[_ID] not in inside:
                continue  # a result of a node outside is taken apart outside
            inside.add(node.meta[_ID])
        return inside


def _cut(
    module: GraphModule, inside: set[int], options: Options, name: str
) -> tuple[GraphModule, list[Program]]:
    """Return a copy of a graph in which clusters of the nodes inside are programs, and these."""
    from torch.fx.passes.infra.partitioner import CapabilityBasedPartitioner
    from torch.fx.passes.operator_support import OperatorSupportBase

    class Support(OperatorSupportBase):
        def is_node_supported(self, submodules: Any, node: Node) -> bool:
            return node.meta.get(_ID) in inside

    # A copy: the partitioner moves nodes into modules, and the graph may have to be cut once more.
    copy = GraphModule(module, _copied(module))
    partitioner = CapabilityBasedPartitioner(copy, Support(), allows_single_node_partition=True)
    # Fewer nodes than ``min_cluster`` are not worth a program.
    proposed = partitioner.propose_partitions()
    partitions = [p for p in proposed if _work(p.nodes) >= options.min_cluster and _has_results(p.nodes)]
    fused = partitioner.fuse_partitions(partitions, prefix="cluster_")
    programs = []
    for node in fused.graph.nodes:
        if node.op == "call_module":
            program = Program(getattr(fused, node.target), options, f"{name}, {node.target}")
            programs.append(program)
            # ``Program`` is no module, so the node becomes a call of a function.
            node.op, node.target = "call_function", _caller(program, str(node.target))
    fused.recompile()
    return fused, programs


def _copied(module: GraphModule) -> torch.fx.Graph:
    graph = torch.fx.Graph()
    values: dict[Node, Node] = {}
    result = graph.graph_copy(module.graph, values)
    graph.output(result)
    return graph


def _has_results(nodes: Any) -> bool:
    """Return whether anything outside asks for what these nodes compute; assertions alone run one by one."""
    return any(user not in nodes for node in nodes for user in node.users)


def _work(nodes: Any) -> int:
    return sum(node.target not in _FREE for node in nodes)


def _caller(program: Program, name: str) -> Callable[..., Any]:
    """Return a program as a function of tensors, for a graph to call."""

    def call(*args: Any) -> Any:
        return program(list(args))

    call.__name__ = name
    return call


def _calling(cut: GraphModule) -> Callable[[list[Any]], Any]:
    """Return a graph of programs as a callable of torch's list of arguments."""

    def run(args: list[Any]) -> Any:
        result = cut.forward(*args)
        args.clear()
        return result

    return run
