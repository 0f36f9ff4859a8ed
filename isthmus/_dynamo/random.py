"""Random ops of a graph: one (seed, offset) a call, and each op its own place after it.

Without this a recomputed dropout would draw again in backward; so every random node takes the words that the
call drew as an argument, and its number among the random nodes. The numbers are eager's for the same seed::

    %u = aten.rand(...)       ->      %draw = draw();  %u = aten.rand#0(%draw, ...)
    %v = aten.rand(...)               %v = aten.rand#1(%draw, ...)

``key_random_nodes`` runs before torch's partitioner, which then sees no op that draws: the words of forward are an
argument that backward can be given. Run node by node (``clusters.py``), a ``Keyed`` node replays its place of the draw
(``generator.replaying``), so that the numbers do not depend on what was compiled.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch.fx import Graph, Node

from isthmus._device.core import generator
from isthmus._graph.private import OpOverload
from isthmus._ops.registry import lowering_of

NO_WORDS = np.zeros(4, np.uint32)
"""Stands for the words of a call where only their shape matters."""


class Draw:
    """The target of the node that stands for the (seed, offset) of a call."""

    __name__ = "draw"
    __module__ = __name__

    def __init__(self, count: int, device: torch.device) -> None:
        self.count, self.device = count, device

    def __call__(self) -> torch.Tensor:
        """Return the words as a tensor, for a graph that is run node by node."""
        return torch.from_numpy(self.words()).to(self.device)

    def words(self) -> np.ndarray[Any, Any]:
        """Return the next (seed, offset); as many offsets as the graph has random nodes are used up."""
        # One draw for as many offsets: the next call begins after them.
        if self.device.type == "jax":
            return generator.draw(None, self.count)
        return generator.draw(torch.default_generator)


class Keyed:
    """The target of a random node: its op, and which of the call's offsets it uses."""

    def __init__(self, op: OpOverload, index: int) -> None:
        self.op, self.index = op, index
        # FX takes a target's names for its own, and wants no dots in them.
        self.__name__ = f"{op.__name__}_{index}".replace(".", "_")
        self.__module__ = __name__

    def __call__(self, words: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        """Run the op on its own, for a graph that is run node by node."""
        if words.device.type != "jax":
            return self.op(*args, **kwargs)
        with generator.replaying(words.cpu().numpy(), self.index):
            return self.op(*args, **kwargs)

    def __repr__(self) -> str:
        return f"{self.op}#{self.index}"


def is_random(node: Node) -> bool:
    """Return whether a node draws random numbers."""
    if not isinstance(node.target, OpOverload):
        return False
    lowering = lowering_of(node.target)
    return lowering is not None and lowering.random


def key_random_nodes(graph: Graph) -> None:
    """Give every random node of a graph the words of the call and its own index."""
    nodes = [node for node in graph.nodes if is_random(node)]
    if not nodes:
        return
    example = _first_tensor(nodes[0].meta.get("val"))
    # Before the first node that computes: all keyed nodes read it.
    with graph.inserting_before(_first_call(graph)):
        draw = graph.call_function(Draw(len(nodes), example.device))
    # Its fake value: torch's partitioner looks at what every node has.
    draw.meta["val"] = example.new_empty((4,), dtype=torch.uint32)
    for index, node in enumerate(nodes):
        assert isinstance(node.target, OpOverload)
        node.target = Keyed(node.target, index)
        node.args = (draw, *node.args)


class Unseeded:
    """The target of a node whose op may draw random numbers, and does not as it is called here."""

    def __init__(self, op: OpOverload) -> None:
        self.op = op
        self.__name__ = op.__name__.replace(".", "_")
        self.__module__ = __name__

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the op, for a graph that is run node by node."""
        return self.op(*args, **kwargs)


def unseeded(graph: Graph) -> None:
    """Hide from torch's partitioner that an op may draw, where none is left that does: ``Keyed`` has the others.

    Attention is tagged as random for its dropout, and is one op here only without. For a tagged op that backward
    computes again (``torch.utils.checkpoint``) the partitioner saves and restores the generator, by ops that know
    neither this device nor an offset per op.
    """
    for node in graph.nodes:
        op = node.target
        # Only ops that are lowered: others keep torch's own treatment.
        if isinstance(op, OpOverload) and torch.Tag.nondeterministic_seeded in op.tags and lowering_of(op):
            node.target = Unseeded(op)


def seeded_again(graph: Graph) -> None:
    """Take back what ``unseeded`` did, in a graph made of another."""
    for node in graph.nodes:
        if isinstance(node.target, Unseeded):
            node.target = node.target.op


def _first_call(graph: Graph) -> Node:
    return next(node for node in graph.nodes if node.op not in ("placeholder",))


def _first_tensor(value: Any) -> torch.Tensor:
    return _first_tensor(value[0]) if isinstance(value, Sequence) and not isinstance(value, str) else value
