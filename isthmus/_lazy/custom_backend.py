"""Graphs on a backend that takes and returns tensors of the CPU."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from isthmus._device.core.host_tensors import array_from_cpu, cpu_from_array
from isthmus._device.core.resident_state import Packing
from isthmus._graph.graph import Backend, Graph
from isthmus._graph.nodes import Leaf, Node
from isthmus.errors import IsthmusError

Array = Any


class HostedProgram:
    """A graph compiled by a backend that was registered; every offset is a run-time input."""

    def __init__(self, graph: Graph, backend: Backend) -> None:
        self.graph, self.run = graph, backend.compile(graph)
        self.leaves = [n.call for n in graph.inputs if isinstance(n.call, Leaf)]
        self.arrays = [leaf for leaf in self.leaves if leaf.kind == "array"]
        # In the order of the graph's inputs: arrays first (``Graph.of``).
        self.slots = tuple(leaf.index for leaf in self.arrays)
        # As for ``CompiledProgram``: draws are numbered from 0 on.
        self.draws = 1 + max((leaf.index for leaf in self.leaves if leaf.kind == "draw"), default=-1)
        self.donated: tuple[int, ...] = ()
        self.packing = Packing((), {})  # it keeps nothing
        self.places = {at: at for at in range(len(graph.outputs))}

    def pack_numbers(self, numbers: Mapping[torch.dtype, list[Any]], offsets: Sequence[int]) -> list[Any]:
        """Return numbers and offsets for the graph's inputs, in their order."""
        values = []
        for leaf in self.leaves:
            if leaf.kind == "number":
                values.append(numbers[leaf.type.dtype][leaf.index])
            elif leaf.kind == "offset":
                values.append(offsets[leaf.index])
        return values

    def arguments(self, arrays: list[Array], constants: Sequence[Any], draws: Sequence[Any]) -> list[Any]:
        """Return the arguments of ``call``."""
        # A backend takes CPU tensors, so the words of a draw become one as well.
        words = [torch.from_numpy(draws[leaf.index]) for leaf in self.leaves if leaf.kind == "draw"]
        return [*arrays, *constants, *words]

    def call(self, *inputs: Any) -> Sequence[Array]:
        """Run on the inputs; nothing is donated."""
        count = len(self.arrays)
        pairs = zip(inputs[:count], self.arrays, strict=True)
        # Arrays come as CPU tensors; numbers and words are in the form that the backend takes.
        results = self.run(*[cpu_from_array(a, leaf.type.dtype) for a, leaf in pairs], *inputs[count:])
        if len(results) != len(self.graph.outputs):
            # Checked here, since a wrong shape would surface in some later program.
            raise IsthmusError(f"the backend returned {len(results)} of {len(self.graph.outputs)} outputs")
        for output, tensor in zip(self.graph.outputs, results, strict=True):
            if (tuple(tensor.shape), tensor.dtype) != tuple(output.type):
                raise IsthmusError(
                    f"the backend returned {tensor.dtype}{list(tensor.shape)} where the graph says {output.type}"
                )
        return [array_from_cpu(tensor) for tensor in results]

    def report(self, outputs: Sequence[Array], lines: Mapping[Node, str]) -> None:
        """Do nothing: such a backend raises where it runs."""
