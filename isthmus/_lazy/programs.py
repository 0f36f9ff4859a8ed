"""Running what was recorded: one program for everything that can still be read, found again by its outputs.

``materialise`` is called when a value is needed. The nodes that live buffers hold are the outputs; since nodes are
interned, the tuple of them names the graph, and ``_families`` has its programs without any graph being compared::

    wanted = (node of the loss, nodes of the new parameters, ...)
    family_of(wanted)      -> Family: one program per set of compiled-in offsets and of dying inputs
    family.find(dying)     -> CompiledProgram

A graph that was never there is looked at in this order: a few small integer ops run on the host (``small_graphs.py``);
a program for a range of sizes may serve it (``ranges.py``); a line that compiles every time is cut into stages
(``_graph/passes/split.py``); else it is compiled whole, after the passes.

Arrays that only the trace holds are donated. ``isthmus.jit`` (``capture.py``, ``value_guards.py``) gets its programs
here too.

What can go wrong: a program that fails takes nothing with it (``restore`` gives buffers what they held, or an error
that names the failure); an interrupt before the run leaves the trace as it is, and the next read runs it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence, Set
from functools import partial
from itertools import repeat
from sys import getrefcount
from threading import get_ident
from typing import Any, cast

from isthmus import config
from isthmus._caches import LruCache
from isthmus._device.core import donation
from isthmus._device.core.buffer import Buffer, Lost
from isthmus._device.core.slack import Slack
from isthmus._graph.backends import backend_named
from isthmus._graph.graph import Graph
from isthmus._graph.nodes import TABLE, Call, Leaf, Node, Type, forget_all_but, leaf, reachable
from isthmus._graph.passes import cut, optimise
from isthmus._graph.passes.rewrite import fill_offsets, remade, share_offsets
from isthmus._graph.passes.slice_gradients import BACKWARDS
from isthmus._graph.passes.split import split
from isthmus._graph.passes.stages import Stage
from isthmus._lazy import ranges, recompile_warnings, small_graphs, sync_reasons
from isthmus._lazy.custom_backend import HostedProgram
from isthmus._lazy.trace import trace
from isthmus._program import runner
from isthmus._program.evaluate import CallFailure
from isthmus._program.program import STATELESS, CompiledProgram, StateLayout
from isthmus._program.ranges import NO_LIMITS, OPTIONS, Limits, Match
from isthmus._runtime import counters, forks, placement, tracebacks, watching
from isthmus._runtime.placement import Sharding
from isthmus.errors import IsthmusError

# No buffer holds an array that dies, only the trace does.
_OWNED = donation.OWNED - 1
# Nodes of all recordings together; beyond that the tables keep those of graphs with programs.
_NODES = 200_000
# Programs of one graph: sets of offsets and of dying inputs; shapes that wander would pile up.
_VARIANTS = 32
Shardings = tuple[Any, ...] | None


class Family:
    """The programs of one graph: for each set of offsets compiled in, and of inputs that die."""

    def __init__(self, outputs: tuple[Node, ...], shardings: Shardings = None) -> None:
        self.places = {pair: n for n, pair in enumerate(dict.fromkeys(_pairs(outputs, shardings)))}
        self.unique = tuple([node for node, _ in self.places])
        # With a mesh a node may be wanted twice, split one way and another.
        self.constraints = {
            n: sharding
            for n, (_, sharding) in enumerate(self.places)
            if shardings is not None and sharding is not placement.OPEN
        }
        self.graph = Graph.of(self.unique)
        leaves = [n.call for n in self.graph.inputs if isinstance(n.call, Leaf)]
        self.fixed = [leaf.index for leaf in leaves if leaf.kind == "offset"]
        self.moving: list[int] = []
        self.seen: list[int] = []
        # Arrays whose memory an output could take; whether others die makes no other program.
        outputs_like = {output.type for output in self.unique}
        arrays = [leaf for leaf in leaves if leaf.kind == "array"]
        self.donatable = [leaf.index for leaf in arrays if leaf.type in outputs_like]
        # Read when the family is made: another backend has families of its own (``family_of``).
        self.backend = config.backend
        self.programs: dict[Any, CompiledProgram | HostedProgram] = {}
        self.known = False  # whether the program last asked for was there

    def find(
        self, dying: frozenset[int], state: StateLayout = STATELESS, results: tuple[int, ...] | None = None
    ) -> CompiledProgram | HostedProgram:
        """Return the program for the trace's offsets; an offset that has changed since is an input from then on.

        ``dying`` are array leaves that only the trace holds, ``results`` the outputs to return, by default all.
        """
        # A backend of the user's takes offsets as inputs, so it needs one program only.
        if self.backend != "xla":
            return self._hosted()
        offsets = [trace.offsets[at] for at in self.fixed]
        key = (tuple(offsets), dying, state, results)
        program = self.programs.get(key)
        self.known = program is not None
        if program is not None:
            return program
        # All at once: those that are in use come back within a step.
        if len(self.programs) >= _VARIANTS:
            self.programs.clear()
        # An offset that has moved once will move again: from now on it is an input of the program.
        if self.seen and offsets != self.seen:
            pairs = zip(self.fixed, offsets, self.seen, strict=True)
            self.moving += [at for at, new, old in pairs if new != old]
            self.fixed = [at for at in self.fixed if at not in self.moving]
            self.programs.clear()
        self.seen = [trace.offsets[at] for at in self.fixed]
        constants = dict(zip(self.fixed, self.seen, strict=True))
        # Under the new key: offsets that became inputs are no part of it.
        key = (tuple(self.seen), dying, state, results)
        program = self.programs[key] = self._compile(constants, dying, state, results)
        return program

    def _compile(
        self,
        constants: dict[int, int],
        dying: frozenset[int],
        state: StateLayout,
        results: tuple[int, ...] | None,
    ) -> CompiledProgram:
        # Offsets that are compiled in become numbers in the graph, where passes can look at them.
        graph = fill_offsets(share_offsets(self.graph, constants), constants, BACKWARDS)
        graph = optimise(graph, "lazy")
        results = tuple(range(len(graph.outputs))) if results is None else results
        leaves = [n.call for n in graph.inputs if isinstance(n.call, Leaf) and n.call.kind == "array"]
        kept = {index for index, _ in state.pairs}
        slots = [leaf for leaf in leaves if leaf.index not in kept]
        try:
            return CompiledProgram(
                graph,
                {leaf.index: leaf.type for leaf in leaves},
                [leaf.index for leaf in slots],
                results,
                state=state,
                donate=_donated(slots, dying, [graph.outputs[at].type for at in dict.fromkeys(results)]),
                # Arrays at home are left out: XLA needs no word about them.
                shardings={
                    leaf.index: cast(Sharding, leaf.sharding) for leaf in leaves if leaf.sharding is not None
                },
                constraints=self.constraints,
                constants=constants,
                moving=self.moving,
                options=OPTIONS,
                title="a step",
            )
        except CallFailure as failure:
            call = failure.node.call
            assert isinstance(call, Call)
            # The line of the op, if lines are recorded: the program is far away from it.
            where = trace.lines.get(failure.node) or 'set isthmus.config.lines = "on" to see where'
            raise IsthmusError(
                f"{call.op} could not be compiled ({where}): {failure.cause}"
            ) from failure.cause

    def _hosted(self) -> HostedProgram:
        program = self.programs.get(None)
        self.known = program is not None
        if not isinstance(program, HostedProgram):
            program = self.programs[None] = HostedProgram(self.graph, backend_named(self.backend))
        return program

    def order(self, wanted: tuple[Node, ...], shardings: Shardings = None) -> list[int]:
        """Return which output each node wanted is; some may be wanted twice."""
        return [self.places[pair] for pair in _pairs(wanted, shardings)]


def _pairs(nodes: Sequence[Node], shardings: Shardings) -> list[tuple[Node, Any]]:
    return list(zip(nodes, shardings or repeat(None), strict=False))


def shardings_of(buffers: Sequence[Buffer]) -> Shardings:
    """Return how these buffers want to be split; None on one device."""
    return None if placement.home is None else tuple([b.signature.sharding for b in buffers])


def _donated(slots: Sequence[Leaf], dying: frozenset[int], results: Sequence[Type]) -> tuple[int, ...]:
    """Return the slots whose memory results can take: their arrays die, and a result is of the same type."""
    room = Counter(results)
    donated = []
    for at, slot in enumerate(slots):
        if slot.index in dying and room[slot.type]:
            room[slot.type] -= 1
            donated.append(at)
    return tuple(donated)


_families: LruCache[tuple[Any, ...], Family] = LruCache(
    "programs of recorded graphs", lambda: config.programs
)


def materialise(buffer: Buffer | None = None, because: str = "") -> Any:
    """Run everything this thread has recorded, or the thread that recorded a buffer, whose result can still be read.

    Returns what the buffer holds then: its thread may have recorded another node before the caller looks.
    ``because`` is reported as the cause where no ``mode.reason`` block may say otherwise.
    """
    forks.check()
    with trace.lock:
        mine = get_ident()
        trace.enter(mine if buffer is None else buffer.recorder)
        try:
            settle = _materialise(because)
            held = None if buffer is None else buffer.held
        except Exception as error:
            tracebacks.shorten(error)
            raise
        finally:
            trace.enter(mine)
    settle()
    recompile_warnings.warn()
    return held


def _materialise(because: str) -> Callable[[], None]:
    """Run the present trace, and return how to check the conditions of its programs."""
    # A recording of isthmus.jit reads no values: the refusal is its error, with the line.
    if trace.refusal is not None:
        raise trace.refusal()
    if trace.size:
        counters.count("ops recorded", trace.size)
    live = trace.live()
    # Nothing is alive: whatever was recorded, nobody can read it.
    if not live:
        trace.reset()
        return lambda: None
    try:
        settle = _run(live, because)
    # The buffers go back to what they held, and say what went wrong where they cannot.
    except Exception as error:
        restore(error)
        trace.reset()
        raise
    # An interrupt before the program ran leaves the trace as it is, and the next read runs it.
    if len(TABLE) > _NODES:
        trace.known.clear()
        forget_all_but(n for family in _families.values() for n in family.unique)
    return settle


def _run(live: list[Buffer], because: str) -> Callable[[], None]:
    """Compute what these buffers hold, give them the arrays and empty the trace; return how to check the conditions."""
    wanted = tuple([buffer.held for buffer in live])
    cause, line = sync_reasons.cause_and_line(because)
    run = _Run()
    # To tell afterwards whether a program for a range was there or had to be compiled.
    compiled = counters.counts["compilations"]
    # In this order: a handful of integer ops on the host, then a range of sizes, then stages, then whole.
    small = small_graphs.find(wanted)
    match = ranged(wanted) if small is None else None
    staged = _stages(line, wanted) if small is None and match is None else None
    # Asked for now: offsets of views, by which it is found, go with the trace.
    is_new = small is None and match is None and (config.backend, *wanted) not in _families
    refusal = ranges.refusal(tuple(dict.fromkeys(wanted))) if is_new else ""

    def commit(arrays: Sequence[Any]) -> None:
        # Bound one by one: each is an assignment, and ``donation.run`` repeats the whole if it is interrupted.
        for buffer, array in zip(live, arrays, strict=True):
            buffer.compute(array)
        trace.reset()

    if small is not None:
        graph = small.graph
        call = partial(run.hosted, small.program, [small.places[n] for n in wanted], commit)
    elif match is not None:
        graph = match.graph
        run.known = compiled == counters.counts["compilations"]
        call = partial(run.ranged, match, wanted, commit)
    elif staged is None:
        shardings = shardings_of(live)
        family = family_of(wanted, shardings)
        graph = family.graph
        call = partial(run.whole, family, family.order(wanted, shardings), commit)
    else:
        graph, stages = staged
        call = partial(run.stages, stages, lambda values: commit([values[n] for n in wanted]))
    if watching.watchers:
        watching.run("lazy", f"{len(graph.nodes):,} ops", call)
    else:
        call()
    sync_reasons.note(cause, line, graph, run.known, refusal)
    return run.settle


def ranged(
    wanted: tuple[Node, ...],
    state: StateLayout = STATELESS,
    results: tuple[int, ...] | None = None,
    donate: bool = True,
    limits: Limits = NO_LIMITS,
) -> Match | None:
    """Return the program for a range of sizes that serves these nodes, unless they have an exact one already."""
    if config.shapes == "exact" or config.backend != "xla" or placement.home is not None:
        return None
    # An exact program is there already, and is faster than a padded one.
    if (config.backend, *wanted) in _families:
        return None
    return ranges.find(tuple(dict.fromkeys(wanted)), state, results, donate, limits)


def _stages(line: str, wanted: tuple[Node, ...]) -> tuple[Graph, list[Stage]] | None:
    """Return the graph of nodes never wanted before and its stages, where a line needs a new program every time."""
    # Only a line that was warned about is worth cutting.
    before = recompile_warnings.last(line)
    # Between stages it is not known how XLA splits what one gives to the next.
    if before is None or placement.home is not None or (config.backend, *wanted) in _families:
        return None
    graph = Graph.of(tuple(dict.fromkeys(wanted)))
    stages = cut("split", "lazy", graph, partial(split, before))
    return (graph, stages) if stages else None


class _Run:
    """A run of what was recorded: by one program, or by one for each stage of its graph."""

    def __init__(self) -> None:
        self.known = True  # whether every program was there
        self._settle: list[Callable[[], None]] = []

    def whole(self, family: Family, order: list[int], commit: Callable[[Sequence[Any]], None]) -> None:
        """Compute outputs of a graph, in this order, by one program."""
        self._call(self._find(family), order, commit)

    def hosted(self, small: HostedProgram, order: list[int], commit: Callable[[Sequence[Any]], None]) -> None:
        """Compute outputs of a small graph, in this order, on the host."""
        self._call(small, order, commit)

    def ranged(self, match: Match, wanted: tuple[Node, ...], commit: Callable[[Sequence[Any]], None]) -> None:
        """Compute these nodes by a program for a range of sizes."""
        unique = tuple(dict.fromkeys(wanted))

        def spread(results: Sequence[Any]) -> None:
            values = dict(zip(unique, results, strict=True))
            commit([values[n] for n in wanted])

        self._settle.append(ranges.run(match, dict(trace.lines), spread))

    def stages(self, stages: list[Stage], commit: Callable[[dict[Node, Any]], None]) -> None:
        """Compute what the stages give, one program after another.

        Results of a stage join the arrays of the trace for the next ones. From the first stage on memory has been
        donated, so what interrupts is kept until all stages have run; a stage that fails twice has failed.
        """
        leaves: dict[Node, Node] = {}
        calls = []
        count = len(trace.arrays)
        # All are compiled before one runs: what fails to compile has given no memory away.
        for at, stage in enumerate(stages):
            new = remade(stage.nodes, leaves)
            trace.lines |= {new[old]: line for old, line in trace.lines.items() if old in new}
            wanted = tuple([new[output] for output in stage.outputs])
            family = family_of(wanted)
            # What a later stage reads must not be given away by an earlier one.
            held = set(range(count, count + len(leaves))).union(*[s.arrays for s in stages[at + 1 :]])
            calls.append((self._find(family, held), family.order(wanted)))
            for output in stage.outputs:
                # Results of a stage are numbered after the arrays of the trace.
                leaves[output] = leaf("array", count + len(leaves), output.type)
        interrupt: BaseException | None = None
        try:
            for call in calls:
                interrupt = self._stage(*call, interrupt)
            commit(dict(zip(leaves, trace.arrays[count:], strict=True)))
        finally:
            # The trace is as it was: its own arrays, nothing of the stages.
            del trace.arrays[count:]
        if interrupt is not None:
            raise interrupt

    def _stage(
        self,
        program: CompiledProgram | HostedProgram,
        order: list[int],
        interrupt: BaseException | None,
    ) -> BaseException | None:
        """Run a stage, again if it is interrupted; return what has interrupted it or one before."""
        start = len(trace.arrays)

        def join(arrays: Sequence[Any]) -> None:
            trace.arrays[start:] = arrays

        # Once more after an interrupt, which may come before or after the program ran.
        for last in (False, True):
            try:
                self._call(program, order, join)
                return interrupt
            except BaseException as error:
                if len(trace.arrays) == start + len(order):
                    return interrupt or error  # it has run all the same
                if last:
                    raise
                interrupt = interrupt or (error if not isinstance(error, Exception) else None)
        raise AssertionError

    def _find(self, family: Family, held: Set[int] = frozenset()) -> CompiledProgram | HostedProgram:
        program = family.find(dying(family, held))
        self.known = self.known and family.known
        return program

    def _call(
        self,
        program: CompiledProgram | HostedProgram,
        order: list[int],
        commit: Callable[[Sequence[Any]], None],
    ) -> None:
        arrays = [trace.arrays[at] for at in program.slots]  # type: ignore[index]  # no slot is a tuple
        # An exact program takes an array without its padding.
        arrays = [array.exact() if type(array) is Slack else array for array in arrays]
        constants = program.pack_numbers(trace.numbers, trace.offsets)
        lines = dict(trace.lines)

        def bind(results: Sequence[Any]) -> None:
            commit([results[at] for at in order])

        outputs = runner.run(program, arrays, bind, constants=constants, draws=trace.draws)
        self._settle.append(partial(program.report, outputs, lines))

    def settle(self) -> None:
        """Do what is to be done about the conditions of the programs."""
        for settle in self._settle:
            settle()


def family_of(wanted: tuple[Node, ...], shardings: Shardings = None) -> Family:
    """Return the programs that compute these nodes, split like this, from the leaves of the trace."""
    key = (config.backend, *wanted, *(shardings or ()))
    family = _families.get(key)
    if family is None:
        family = _families[key] = Family(wanted, shardings)
    return family


def dying(family: Family, held: Set[int] = frozenset()) -> frozenset[int]:
    """Return which of the leaves whose memory an output could take only the trace holds, of those not ``held``."""
    if config.donate != "auto":
        return frozenset()
    arrays = trace.arrays
    # Counted in the trace's own list: a local name for an array would be one reference more.
    alone = [at for at in family.donatable if at not in held and getrefcount(arrays[at]) == _OWNED]
    return frozenset(
        [at for at in alone if type(arrays[at]) is not Slack or donation.is_unshared(arrays[at])]
    )


def restore(error: BaseException) -> None:
    """Give buffers that hold nodes the contents they had when recording began, since their program failed.

    A buffer made since then gets what it was made of, if that takes numbers alone: zeros, say. Others had no contents,
    and reading them raises an error that names this one.
    """
    donation.finish(lambda: _restore(error))


def _restore(error: BaseException) -> None:
    # What each buffer held when recording began, by the address of the buffer.
    before = {id(origin()): array for origin, array in zip(trace.origins, trace.arrays, strict=False)}
    live = trace.live()
    starts = {id(buffer): _first(buffer) for buffer in live}
    fresh = _computed({node for node in starts.values() if node is not None})
    for buffer in live:
        array = before.get(id(buffer))
        node = starts[id(buffer)]
        # Donated arrays are gone, and a resized buffer does not fit its old array.
        if array is not None and not array.is_deleted() and array.shape == buffer.signature.shape:
            buffer.held = array
        else:
            buffer.held = fresh.get(node) if node in fresh else Lost(error)  # type: ignore[arg-type]


def _first(buffer: Buffer) -> Node | None:
    """Return what a buffer held before it was written to, if it can be computed by itself."""
    origin, node = trace.first.get(id(buffer), (None, None))
    return node if origin is not None and origin() is buffer and node is not None and is_fixed(node) else None


def _computed(nodes: set[Node]) -> dict[Node, Any]:
    """Return the arrays of nodes that are made of numbers alone: by ATen on the CPU, since it is XLA that failed."""
    if not nodes:
        return {}
    graph = Graph.of(tuple(nodes))
    # By the reference backend, since it is XLA that failed.
    program = HostedProgram(graph, backend_named("reference"))
    constants = program.pack_numbers(trace.numbers, trace.offsets)
    arrays = program.call(*program.arguments([], constants, []))
    return dict(zip(graph.outputs, arrays, strict=True))


def is_fixed(node: Node) -> bool:
    """Return whether a node is computed of numbers and offsets, which a recording keeps."""
    leaves = [n.call for n in reachable([node]) if isinstance(n.call, Leaf)]
    return all(leaf.kind in ("number", "offset") for leaf in leaves)
