"""What was compiled, as data and as text: graphs, their programs, the nodes outside, graph breaks, times and costs.

``isthmus.explain(f)(x)`` compiles ``f`` anew, runs it once while ``compile_log.recording`` listens, and returns an
``Explanation``: frozen records that refer to each other from the outside in::

    Explanation -> Graph (one of Dynamo's) -> Cluster (a program) -> Compiled (an executable for some sizes)
                                           -> Outside (a node that runs by itself, and why)

``print`` shows tables (``text_tables.py``), ``save_html`` writes a page (``html.py``); both use the row functions at
the end of this file, so that they say the same. Costs are XLA's own estimates, None where a plugin gives none.
"""

from __future__ import annotations

import heapq
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch.fx import GraphModule, Node

from isthmus._device.torch_glue.pytree import tree_leaves
from isthmus._dynamo import compile_log, private
from isthmus._dynamo.clusters import _ID, Clusters
from isthmus._dynamo.random import Draw, Keyed
from isthmus._dynamo.text_tables import amount, counted, duration, table
from isthmus._graph.private import OpOverload
from isthmus._runtime import counters, files, placement
from isthmus._runtime.collectives import Collective, collectives
from isthmus._runtime.compiler import Executable
from isthmus._runtime.user_frames import Place, place_in, user_place
from isthmus.errors import first_line

if TYPE_CHECKING:
    import isthmus._graph.graph
    from isthmus._dynamo.program import Program
    from isthmus._program.program import CompiledProgram

STAGES = {"trace": "trace", "lower": "lower", "xla": "XLA"}
"""The stages of a compilation, and their titles."""


@dataclass(frozen=True)
class Break:
    """Where Dynamo stopped tracing and why; ``skipped`` is the function it gave up, where it could not go on after."""

    place: Place
    reason: str
    skipped: str | None = None


@dataclass(frozen=True)
class Compiled:
    """One executable: the seconds its stages took, and what XLA says that one run costs (None where it does not)."""

    name: str
    seconds: Mapping[str, float]
    flops: float | None
    bytes: float | None
    executable: Executable = field(repr=False, compare=False)
    graph: isthmus._graph.graph.Graph = field(repr=False, compare=False)
    """What was compiled, in ATen ops, after every pass; ``print`` shows it."""

    def stablehlo(self) -> str:
        """Return what XLA was given."""
        return self.executable.lowered.as_text()

    def hlo(self) -> str:
        """Return what XLA made of it."""
        return self.executable.compiled.as_text() or ""


@dataclass(frozen=True)
class Cluster:
    """Nodes that run as one program: how often each op occurs, and an executable for each set of sizes that came."""

    name: str
    ops: Mapping[str, int]
    compiled: tuple[Compiled, ...]

    @property
    def nodes(self) -> int:
        """How many calls the program makes."""
        return sum(self.ops.values())


@dataclass(frozen=True)
class Outside:
    """A node that runs by itself between the programs, as eager does; it fell back where it has a reason."""

    op: str
    reason: str | None
    place: Place | None


@dataclass(frozen=True)
class Graph:
    """A graph of torch's: programs and the nodes outside them, in an order in which they can run."""

    name: str
    steps: tuple[Cluster | Outside, ...]
    module: GraphModule = field(repr=False, compare=False)

    @property
    def clusters(self) -> tuple[Cluster, ...]:
        """The programs."""
        return tuple(step for step in self.steps if isinstance(step, Cluster))

    @property
    def fallbacks(self) -> tuple[Outside, ...]:
        """The nodes that no program could take."""
        return tuple(step for step in self.steps if isinstance(step, Outside) and step.reason is not None)

    def text(self) -> str:
        """Return the graph as Python, with the user's lines."""
        return self.module.print_readable(print_output=False)


@dataclass(frozen=True)
class Explanation:
    """What one call of a function compiled; ``print`` it, or read its fields."""

    function: str
    graphs: tuple[Graph, ...]
    breaks: tuple[Break, ...]
    seconds: float
    """How long the call took, compilation and all."""
    replaced: tuple[Compiled, ...] = ()
    """Executables no longer used: their graph was cut again, without a node that failed later."""
    on_cpu: Mapping[str, int] = field(default_factory=dict)
    """How often each op ran on the CPU during the call."""
    refused: tuple[tuple[str, str], ...] = ()
    """Programs that are compiled for each of their sizes, as no padding is possible, and the primitive that refused."""

    @property
    def clusters(self) -> tuple[Cluster, ...]:
        """Every program of every graph."""
        return tuple(cluster for graph in self.graphs for cluster in graph.clusters)

    @property
    def compiled(self) -> tuple[Compiled, ...]:
        """Every executable in use."""
        return tuple(made for cluster in self.clusters for made in cluster.compiled)

    @property
    def stages(self) -> dict[str, float]:
        """The seconds of the whole call: in each stage of compilation, and in torch: Dynamo, autograd and the run."""
        executables = [*self.compiled, *self.replaced]
        seconds = {stage: sum(one.seconds[stage] for one in executables) for stage in STAGES}
        return {**seconds, "torch": max(0.0, self.seconds - sum(seconds.values()))}

    def stablehlo(self) -> str:
        """Return the StableHLO of every executable."""
        return _joined("//", [(made.name, made.stablehlo()) for made in self.compiled])

    def hlo(self) -> str:
        """Return the optimized HLO of every executable."""
        return _joined("//", [(made.name, made.hlo()) for made in self.compiled])

    def collectives(self) -> list[Collective]:
        """Return where devices of a mesh exchange data, by kind and line, those that move most bytes first."""
        return collectives(self.hlo())

    def graph(self) -> str:
        """Return every graph as Python."""
        return _joined("#", [(graph.name, graph.text()) for graph in self.graphs])

    def save_html(self, path: str | Path) -> None:
        """Write one page that needs nothing else, with a picture of each graph's clusters."""
        from isthmus._dynamo.html import page

        files.write(path, page(self).encode())

    def summary(self) -> str:
        """Return the counts as one line."""
        fallen = sum(len(graph.fallbacks) for graph in self.graphs)
        counts = [
            counted(len(self.graphs), "graph"),
            counted(len(self.clusters), "program"),
            f"{counted(fallen, 'node')} fell back",
            counted(len(self.breaks), "graph break"),
        ]
        return ", ".join(counts)

    def times(self) -> str:
        """Return how the time of the call was spent as one line."""
        stages = self.stages
        parts = [f"{title} {duration(stages[name])}" for name, title in STAGES.items()]
        rest = f"torch and the run itself {duration(stages['torch'])}"
        return f"the call took {duration(self.seconds)}: {', '.join(parts)}, {rest}"

    def __str__(self) -> str:
        sections = [
            ("programs", table(PROGRAM_TITLES, program_rows(self), right=range(1, 7))),
            ("collectives, bytes of results on one device", table([], collective_rows(self), right=(1, 2))),
            ("nodes outside, because nothing compiles them", table([], fallback_rows(self))),
            ("graph breaks", table([], break_rows(self))),
            ("compiled for each size, because they cannot be padded", table([], refusal_rows(self))),
            ("ran on the CPU", table([], [[op, f"{times:,}"] for op, times in self.on_cpu.items()])),
        ]
        lines = [f"{self.function}: {self.summary()}", self.times()]
        for title, body in sections:
            if body:
                lines += ["", title, *(f"  {line}" for line in body)]
        return "\n".join(lines)


def collective_rows(explanation: Explanation) -> list[list[str]]:
    """Return the collectives for a table."""
    if placement.home is None:
        return []
    rows = explanation.collectives()
    return [[row.kind, f"{row.count:,}", amount(row.bytes, "B"), row.line] for row in rows]


def explained(
    fn: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    backward: bool,
    options: Mapping[str, Any],
) -> Explanation:
    """Compile ``fn`` anew, run it once, with its backward if asked, and return what happened."""
    # Everything is compiled anew, or what was compiled before would not be seen.
    torch.compiler.reset()
    fallen = counters.fallbacks.copy()
    with compile_log.recording() as record, private.graph_breaks() as breaks:
        started = time.perf_counter()
        result = torch.compile(fn, backend="isthmus", **options)(*args, **kwargs)
        if backward:
            _backward(result)
        seconds = time.perf_counter() - started
    # A graph that was cut again leaves executables behind that nothing calls.
    used = {id(program.module) for clusters in record.graphs for program in clusters.programs}
    replaced = [made for made in record.compilations if id(made.module) not in used]
    return Explanation(
        getattr(fn, "__name__", type(fn).__name__),
        tuple(_graph(clusters, record.compilations) for clusters in record.graphs),
        _breaks(breaks),
        seconds,
        tuple(_compiled(made.name, made.made) for made in replaced),
        # The difference: counters are the process's.
        dict((counters.fallbacks - fallen).most_common()),
        tuple(dict.fromkeys(record.refusals)),
    )


def _breaks(noted: Sequence[private.GraphBreak]) -> tuple[Break, ...]:
    """Return the breaks in the user's code, once each: Dynamo meets one again where it inlines its function."""
    places = [(user_place(stack), reason, skipped) for stack, reason, skipped in noted]
    return tuple(dict.fromkeys(Break(place, why, skipped) for place, why, skipped in places if place))


def _backward(result: Any) -> None:
    """Compute the gradients of the sum of the floating results."""
    leaves = [leaf for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor)]
    leaves = [leaf for leaf in leaves if leaf.requires_grad and leaf.is_floating_point()]
    if not leaves:
        raise ValueError("backward=True, but no floating result of the function requires grad")
    torch.autograd.backward(leaves, [torch.ones_like(leaf) for leaf in leaves])


def _graph(clusters: Clusters, compilations: Sequence[compile_log.Compilation]) -> Graph:
    """Return what became of one graph."""
    nodes = _calls(clusters.module)
    steps: list[Cluster | Outside] = []
    owner: dict[int, int] = {}
    for program in clusters.programs:
        owner.update({node.meta[_ID]: len(steps) for node in _calls(program.module)})
        steps.append(_cluster(program, [one for one in compilations if one.module is program.module]))
    # Nodes outside, each with its reason; those too few for a program have none.
    reasons = dict(clusters.outside)
    for node in nodes:
        if node.meta[_ID] not in owner:
            owner[node.meta[_ID]] = len(steps)
            steps.append(
                Outside(operation(node), reasons.get(node), place_in(node.meta.get("stack_trace") or ""))
            )
    order = _ordered({node: owner[node.meta[_ID]] for node in nodes})
    return Graph(clusters.name, tuple(steps[at] for at in order), clusters.module)


def _cluster(program: Program, made: Sequence[compile_log.Compilation]) -> Cluster:
    ops = Counter(operation(node) for node in _calls(program.module) if not isinstance(node.target, Draw))
    names = [f"{program.name} [{number}]" for number in range(1, len(made) + 1)]
    if len(made) == 1:
        names = [program.name]
    compiled = [_compiled(name, one.made) for name, one in zip(names, made, strict=True)]
    return Cluster(program.name, dict(ops.most_common()), tuple(compiled))


def _calls(module: GraphModule) -> list[Node]:
    return [node for node in module.graph.nodes if node.op.startswith("call_")]


def _ordered(owner: Mapping[Node, int]) -> Iterator[int]:
    """Yield the steps that own the nodes of a graph so that each comes after those it needs, else as written."""
    needs: dict[int, set[int]] = {step: set() for step in owner.values()}
    users: dict[int, set[int]] = {step: set() for step in needs}
    first: dict[int, int] = {}
    for position, (node, step) in enumerate(owner.items()):
        first.setdefault(step, position)
        # A step needs the steps that own the inputs of its nodes, itself left out.
        for other in {owner[source] for source in node.all_input_nodes if source in owner} - {step}:
            needs[step].add(other)
            users[other].add(step)
    ready = [(first[step], step) for step, others in needs.items() if not others]
    heapq.heapify(ready)
    while ready:
        _, done = heapq.heappop(ready)
        # Among those that are ready the one that comes first in the graph.
        yield done
        for step in users[done]:
            needs[step].remove(done)
            if not needs[step]:
                heapq.heappush(ready, (first[step], step))


def operation(node: Node) -> str:
    """Return the name of what a node calls."""
    target: Any = node.target.op if isinstance(node.target, Keyed) else node.target
    return str(target) if isinstance(target, OpOverload) else getattr(target, "__name__", str(target))


def _compiled(name: str, program: CompiledProgram) -> Compiled:
    executable = program.executable
    try:
        costs = executable.compiled.cost_analysis() or {}
    except Exception:  # not every plugin of XLA answers, nor has one error for it
        costs = {}
    # XLA leaves out what is nothing, and says -1 where it does not know.
    known = {key: value for key, value in costs.items() if value >= 0}
    flops = known.get("flops", None if "flops" in costs else 0.0)
    bytes = known.get("bytes accessed")
    return Compiled(name, executable.seconds, flops if costs else None, bytes, executable, program.graph)


PROGRAM_TITLES = ["", "nodes", "trace", "lower", "XLA", "FLOPs", "bytes"]


def program_rows(explanation: Explanation) -> list[list[str]]:
    """Return a row for each executable, under ``PROGRAM_TITLES``."""
    rows = []
    for cluster in explanation.clusters:
        for made in cluster.compiled:
            rows.append([made.name, f"{cluster.nodes:,}", *_numbers(made)])
        if not cluster.compiled:
            rows.append([cluster.name, f"{cluster.nodes:,}", "not run", "", "", "", ""])
    rows += [[f"{made.name} (replaced)", "", *_numbers(made)] for made in explanation.replaced]
    if len(explanation.compiled) > 1:
        stages = [duration(explanation.stages[stage]) for stage in STAGES]
        costs = [_total(made.flops for made in explanation.compiled)]
        costs.append(_total(made.bytes for made in explanation.compiled))
        nodes = f"{sum(cluster.nodes for cluster in explanation.clusters):,}"
        rows.append(["all", nodes, *stages, amount(costs[0], "FLOP"), amount(costs[1], "B")])
    return rows


def fallback_rows(explanation: Explanation) -> list[list[str]]:
    """Return a row for each kind of node that fell back: graph, op, how often, why, from which line."""
    kinds = Counter((graph.name, node) for graph in explanation.graphs for node in graph.fallbacks)
    return [
        [name, node.op, f"x{times}", first_line(node.reason or ""), *_where(node.place)]
        for (name, node), times in kinds.items()
    ]


def break_rows(explanation: Explanation) -> list[list[str]]:
    """Return a row for each graph break: line, source, why."""
    return [[*_where(one.place), break_reason(one)] for one in explanation.breaks]


def refusal_rows(explanation: Explanation) -> list[list[str]]:
    """Return a row for each program that cannot be padded: its name, and what refused."""
    return [[name, why] for name, why in explanation.refused]


def break_reason(one: Break) -> str:
    """Return why there is a break in one line."""
    reason = first_line(one.reason)
    if reason.startswith("generic_jump"):
        reason = f"Python branches on a tensor ({reason})"
    return reason + (f" (all of {one.skipped} runs as eager does)" if one.skipped else "")


def _where(place: Place | None) -> list[str]:
    return [str(place), place.source] if place is not None else ["", ""]


def _numbers(made: Compiled) -> list[str]:
    stages = [duration(made.seconds[stage]) for stage in STAGES]
    return [*stages, amount(made.flops, "FLOP"), amount(made.bytes, "B")]


def _total(values: Iterable[float | None]) -> float | None:
    """Return the sum of what is known, or None where nothing is."""
    known = [value for value in values if value is not None]
    return sum(known) if known else None


def _joined(comment: str, parts: Iterable[tuple[str, str]]) -> str:
    return "\n".join(f"{comment} {name}\n{text.rstrip()}\n" for name, text in parts)
