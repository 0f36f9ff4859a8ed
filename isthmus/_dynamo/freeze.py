"""``options={"freeze": True}``: what depends on parameters alone is computed once and kept, for inference."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from isthmus._dynamo import repeated_blocks
from isthmus._dynamo.options import Options
from isthmus._dynamo.program import Program
from isthmus._dynamo.random import Draw, Keyed
from isthmus._ops.tensors.views import VIEWS
from isthmus.errors import ConfigError


def frozen(
    module: GraphModule, parameters: set[int], options: Options, name: str
) -> tuple[Callable[[list[Any]], Any], list[Program]] | None:
    """Return a graph that computes what its parameters decide at its first call only, or None if that is nothing."""
    placeholders = [node for node in module.graph.nodes if node.op == "placeholder"]
    calls = [node for node in module.graph.nodes if node.op == "call_function"]
    given = {node for at, node in enumerate(placeholders) if at in parameters}
    if not given:
        return None
    _check(calls, given)
    constants = {node for node in calls if not node.all_input_nodes and not _random(node)}
    known = _known(calls, given | constants)
    # A constant that the rest needs too is cheaper made there than kept.
    known = _known(calls, given | {node for node in constants if all(user in known for user in node.users)})
    early = [node for node in calls if node in known]
    if all(node.target in VIEWS for node in early):
        return None
    rest = [node for node in calls if node not in known]
    cut, (first, second) = repeated_blocks.split(
        module, [repeated_blocks.segment(early), repeated_blocks.segment(rest)], options, name
    )
    return _keeping(cut, first), [first, second]


def _check(calls: list[Node], known: set[Node]) -> None:
    written = [node.args[0] for node in calls if node.target is torch.ops.aten.copy_.default]
    if any(place in known for place in written):
        raise ConfigError(
            "options={'freeze': True} takes parameters and buffers for constants, but this graph writes to one"
        )


def _known(calls: list[Node], given: set[Node]) -> set[Node]:
    """Return the nodes that depend on given ones alone, and these."""
    known = set(given)
    for node in calls:
        inputs = node.all_input_nodes
        if inputs and not _random(node) and all(n in known for n in inputs):
            known.add(node)
    return known


def _random(node: Node) -> bool:
    return isinstance(node.target, (Draw, Keyed))


def _keeping(cut: GraphModule, first: Program) -> Callable[[list[Any]], Any]:
    """Return a graph as a callable that runs its first program once, and takes its results from then on."""
    kept: list[Any] = []

    def once(*args: Any) -> Any:
        if not kept:
            kept.append([t.detach() if isinstance(t, Tensor) else t for t in first(list(args))])
        return kept[0]

    for node in cut.graph.nodes:
        if getattr(node.target, "program", None) is first:
            node.target = once
    cut.recompile()
    return repeated_blocks.calling(cut)
