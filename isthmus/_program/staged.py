"""``StagedProgram``: a graph in stages, run one program after another; to the runner it is like one program.

``torch.compile`` (``_dynamo/specialization.py``) makes one where a pass cut its graph (``_graph/passes/stages.py``).
Stages with equal keys are runs of the same ``CompiledProgram``::

    stages      embed | layer | layer | layer | head          three programs, five calls
    values      [arguments ... | results of embed | of the first layer | ...]

Every call of a stage takes its inputs from the list of values and appends its results; a value is dropped after the
last stage that reads it, so that memory is bounded as in one program. Nothing is donated, so a run that is interrupted
leaves its arguments as they were.

A stage that is run ``once`` (parameters alone, ``freeze.py``) gives its first results at every later call.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence

import jax

from isthmus._device.checks.value_checks import Conditions
from isthmus._device.core.resident_state import Packing
from isthmus._graph.arguments import Value
from isthmus._graph.graph import Graph
from isthmus._graph.nodes import Leaf, Node, Type
from isthmus._graph.passes.stages import Stage
from isthmus._program.program import NO_LINES, CompiledProgram, Places, Words

Array = jax.Array


class StagedProgram:
    """A graph in stages, with the slots and results of a ``CompiledProgram``; it has no state and donates nothing.

    Arguments:
        graph: what to compute; its leaves are arrays.
        stages: all of its nodes, in the order of running.
        arrays: the type of every array leaf, by its index.
        slots: array leaves in the order of the call; a tuple of leaves is one argument.
        results: outputs to return, in order; a tuple of outputs is one result.
        compile: makes the program of a stage from its graph, the types of its inputs, its slots and its results.
        once: how many of the first stages are run at the first call only.
    """

    donated: tuple[int, ...] = ()
    # No bundles: asking how large they may be would start JAX with the import.
    packing = Packing((), {}, False)
    result_shardings = None  # graphs on a mesh are not cut

    def __init__(
        self,
        graph: Graph,
        stages: Sequence[Stage],
        arrays: Mapping[int, Type],
        slots: Sequence[Places],
        results: Sequence[Places],
        compile: Callable[[Graph, dict[int, Type], list[Places], list[Places]], CompiledProgram],
        once: int = 0,
    ) -> None:
        self.slots, self.results, self._once = tuple(slots), tuple(results), once
        self._frozen: list[Sequence[Array]] = []
        programs: dict[Hashable, CompiledProgram] = {}
        # Where each value is: leaves by their order in the slots, then the results of the stages.
        leaves = [at for places in slots for at in (places if isinstance(places, tuple) else (places,))]
        at_leaf = {leaf: at for at, leaf in enumerate(leaves)}
        places = {n: at_leaf[n.call.index] for n in graph.inputs if isinstance(n.call, Leaf)}
        self._calls: list[tuple[CompiledProgram, list[int]]] = []
        count = len(leaves)
        for stage in stages:
            program = programs.get(stage.key)
            if program is None:
                alone = stage.alone(graph.origins)
                types = {at: n.type for at, n in enumerate(stage.inputs)}
                program = compile(alone, types, [*types], [*range(len(stage.outputs))])
                programs[stage.key] = program
            self._calls.append((program, [places[n] for n in stage.inputs]))
            for n in stage.outputs:
                places[n], count = count, count + 1
        self.parts = list(programs.values())
        self._outputs = [places[n] for n in graph.outputs]
        self._dead = self._last_reads(count)
        self.checks = JoinedConditions([part.checks for part in self.parts if part.checks.errors])
        self.nothing_failed = self.checks.before()

    def _last_reads(self, count: int) -> list[list[int]]:
        """Return for each stage the values that no later stage and no result reads."""
        last = {at: n for n, (_, inputs) in enumerate(self._calls) for at in inputs}
        return [
            [at for at in inputs if last[at] == n and at not in self._outputs]
            for n, (_, inputs) in enumerate(self._calls)
        ]

    def call(self, *inputs: Value) -> Sequence[Value]:
        """Run the stages on an array for each slot and the codes of the value checks."""
        *given, codes = inputs
        codes = dict(codes)
        values: list[Value] = []  # None where no later stage reads it
        for places, value in zip(self.slots, given, strict=True):
            values += value if isinstance(places, tuple) else [value]
        for n, (program, taken) in enumerate(self._calls):
            values += self._run(n, program, [values[at] for at in taken], codes)
            for at in self._dead[n]:
                values[at] = None
        outputs = [values[at] for at in self._outputs]
        results = [
            tuple(outputs[at] for at in p) if isinstance(p, tuple) else outputs[p] for p in self.results
        ]
        return (*results, codes)

    def _run(
        self, n: int, program: CompiledProgram, arrays: list[Array], codes: dict[Conditions, Array]
    ) -> Sequence[Array]:
        """Return the results of a stage, and leave its check code in ``codes``."""
        if n < len(self._frozen):
            return self._frozen[n]
        checks = program.checks
        outputs = program.call(*arrays, codes.get(checks, program.nothing_failed))
        if checks.errors:
            *outputs, codes[checks] = outputs
        if n < self._once and not any(isinstance(array, jax.core.Tracer) for array in outputs):
            self._frozen.append(outputs)
        return outputs  # type: ignore[no-any-return]

    def unbundled(self) -> StagedProgram:
        """Return the program itself: it keeps no state."""
        return self

    def arguments(
        self, arrays: list[Array], constants: Sequence[Array], draws: Sequence[Words]
    ) -> list[Value]:
        """Return the arguments of ``call``."""
        return [*arrays, self.checks.before()]

    def report(
        self, outputs: Sequence[Value], lines: Mapping[Node, str] = NO_LINES, auto: str = "later"
    ) -> None:
        """Raise for a value check that failed in a run with these outputs, now or at the next read of a value."""
        if self.checks.errors:
            self.checks.settle(outputs[-1], auto)


class JoinedConditions(Conditions):
    """The conditions of several programs that run one after another; their codes travel as a dict."""

    def __init__(self, parts: Sequence[Conditions]) -> None:
        self.parts = parts
        self.errors = [error for part in parts for error in part.errors]

    def before(self) -> dict[Conditions, Array]:
        """Return the code of each program for the next run."""
        return {part: part.before() for part in self.parts}

    def settle(self, number: dict[Conditions, Array], auto: str) -> None:
        """Raise for the codes of a run now, later or never, as the config says."""
        for part in self.parts:
            part.settle(number[part], auto)


Program = CompiledProgram | StagedProgram
