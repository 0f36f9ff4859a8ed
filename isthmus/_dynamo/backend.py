"""Where ``torch.compile(backend="isthmus")`` enters: AOTAutograd makes functional graphs, each becomes a program."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node

from isthmus._dynamo import decompositions
from isthmus._dynamo.clusters import Clusters
from isthmus._dynamo.options import Options, parse
from isthmus._dynamo.private import keep_optimizer_steps_on_device, parameter_places
from isthmus._dynamo.random import key_random_nodes

_numbers = itertools.count()
keep_optimizer_steps_on_device()


def isthmus(
    module: GraphModule,
    example_inputs: Sequence[Any],
    *,
    mode: str | None = None,
    options: Mapping[str, Any] | None = None,
) -> Callable[..., Any]:
    """Compile one graph of Dynamo's: forward and backward become XLA programs."""
    from torch._dynamo.backends.common import aot_autograd

    chosen = parse(options)
    number = next(_numbers)
    compiled = aot_autograd(
        fw_compiler=functools.partial(_compile, chosen, f"forward {number}"),
        bw_compiler=functools.partial(_compile, chosen, f"backward {number}"),
        inference_compiler=functools.partial(_infer, chosen, f"inference {number}"),
        partition_fn=_partition,
        decompositions=decompositions.table(),
        keep_inference_input_mutations=True,
    )
    return compiled(module, example_inputs)


def _partition(joint: GraphModule, *args: Any, **kwargs: Any) -> tuple[GraphModule, GraphModule]:
    """Split the joint graph where the least has to be kept for backward."""
    from torch._functorch.partitioners import min_cut_rematerialization_partition

    key_random_nodes(joint.graph)
    _save_what_is_overwritten(joint.graph)
    return min_cut_rematerialization_partition(joint, *args, **kwargs)


def _save_what_is_overwritten(graph: Graph) -> None:
    """Keep torch from computing in backward, once more, what forward computed of an argument it then wrote to."""
    from torch.utils.checkpoint import CheckpointPolicy

    written = [node.args[0] for node in graph.nodes if node.target is torch.ops.aten.copy_.default]
    for place in written:
        assert isinstance(place, Node)
        for user in place.users:
            if user.target is not torch.ops.aten.copy_.default:
                user.meta["recompute"] = CheckpointPolicy.MUST_SAVE


def _compile(
    options: Options,
    name: str,
    module: GraphModule,
    example_inputs: Sequence[Any],
    parameters: set[int] | None = None,
) -> Callable[..., Any]:
    """Return the callable torch runs in place of a functional graph."""
    key_random_nodes(module.graph)
    module.graph.eliminate_dead_code()
    module.recompile()
    return _boxed(Clusters(module, options, name, parameters))


def _infer(
    options: Options, name: str, module: GraphModule, example_inputs: Sequence[Any]
) -> Callable[..., Any]:
    """Return the callable for a graph without gradients, whose parameters may be frozen."""
    parameters = parameter_places() if options.freeze else set()
    return _compile(options, name, module, example_inputs, parameters)


def _boxed(clusters: Callable[[list[Any]], Any]) -> Callable[[list[Any]], Any]:
    """Return a compiled graph as torch calls it: with its list of arguments, which are freed as soon as they can be."""

    def call(args: list[Any]) -> Any:
        return clusters(args)

    call._boxed_call = True  # type: ignore[attr-defined]
    return call
