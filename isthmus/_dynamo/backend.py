"""Where ``torch.compile(backend="isthmus")`` enters: AOTAutograd makes functional graphs, each becomes a program.

Dynamo calls ``isthmus`` with an FX graph and example inputs. AOTAutograd traces it through autograd, removes mutation,
and calls back with functional graphs::

    _partition     a training graph of forward and backward: passes, then torch's min-cut splits it
    _compile       forward, or backward: a ``Clusters``, which is nearly always one ``Program``
    _infer         a graph without gradients; parameters may be frozen

Nothing is compiled by XLA before the first call, which brings the layouts of the arguments.

A small program takes less time than AOTAutograd's wrapper around it, so a graph that needs nothing of the wrapper is
called without it (``_unwrapped``), at last by a function written for calls like the last one (``fast_path.py``).

What can go wrong: a call that the CPU refuses makes the graph run op by op (``refusals.py``), so that the user sees
torch's own error; importing this file patches Dynamo (``private.py``; ``torch_glue/patches.py`` lists it).
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node

from isthmus._device.torch_glue.private import has_saving_hooks
from isthmus._dynamo import decompositions, marks, saved_tensors
from isthmus._dynamo import joint as joint_passes
from isthmus._dynamo.clusters import Clusters
from isthmus._dynamo.fast_path import quick
from isthmus._dynamo.options import Options, check_mode, parse
from isthmus._dynamo.private import (
    allow_registering_again,
    aot_autograd,
    give_attention_shapes,
    keep_optimizer_steps_on_device,
    only_calls_graph,
    parameter_places,
    spare_call,
    takes_list,
    write_short_calls,
)
from isthmus._dynamo.program import Program
from isthmus._dynamo.random import key_random_nodes, seeded_again, unseeded
from isthmus._dynamo.refusals import Refused, refuses_a_write, writes_bytes_as_booleans
from isthmus._dynamo.targets import NodeFailure
from isthmus._graph.private import OpOverload
from isthmus._runtime import tracebacks

_numbers = itertools.count()
# When Dynamo loads this backend, and not with ``import torch``: each is in the table of patches.
keep_optimizer_steps_on_device()
give_attention_shapes()
write_short_calls()
allow_registering_again()


def isthmus(
    module: GraphModule,
    example_inputs: Sequence[Any],
    *,
    mode: str | None = None,
    options: Mapping[str, Any] | None = None,
) -> Callable[..., Any]:
    """Compile one graph of Dynamo's: forward and backward become XLA programs."""
    # Before anything is compiled: a wrong option is an error at the line of the user's.
    check_mode(mode)
    chosen = parse(options)
    if refuses_a_write(module.graph):
        return module.forward  # op by op, to raise in torch's words where the call is made
    if writes_bytes_as_booleans(module.graph):
        return module.forward  # op by op, where bytes beside those that are written stay as they are
    marks.note(module)
    number = next(_numbers)
    alone: list[Clusters] = []
    compiled = aot_autograd(
        fw_compiler=functools.partial(_compile, chosen, f"forward {number}"),
        bw_compiler=functools.partial(_compile, chosen, f"backward {number}"),
        inference_compiler=functools.partial(_infer, chosen, f"inference {number}", alone),
        partition_fn=functools.partial(_partition, chosen),
        decompositions=decompositions.table(),
        # Writes to arguments stay in the graph as trailing ``copy_``s, which the program does itself.
        keep_inference_input_mutations=True,
    )
    try:
        wrapped = compiled(module, example_inputs)
    except Refused:
        return module.forward
    # Dynamo writes the code around the graph once this function has returned.
    spare_call(module.graph)
    # Compiled autograd hands its inputs over in lists, which torch's wrapper flattens.
    nested = any(isinstance(each, (list, tuple, dict)) for each in example_inputs)
    plain = not nested and not [*module.parameters(), *module.buffers()]
    return _unwrapped(alone[0], wrapped) if alone and plain else wrapped


def _partition(
    options: Options, joint: GraphModule, *args: Any, num_fwd_outputs: int, **kwargs: Any
) -> tuple[GraphModule, GraphModule]:
    """Split the joint graph where the least has to be kept for backward."""
    from functorch.compile import min_cut_rematerialization_partition

    # In this order: random nodes are keyed before passes look for equal calls, and all rewriting is done before
    # torch's partitioner decides what is saved.
    key_random_nodes(joint.graph)
    joint_passes.optimise(joint.graph)
    _gather_again(joint.graph)
    _save_what_is_overwritten(joint.graph)
    cut = functools.partial(min_cut_rematerialization_partition, num_fwd_outputs=num_fwd_outputs)
    unseeded(joint.graph)
    split: tuple[GraphModule, GraphModule] = cut(joint, *args, **kwargs)
    for module in split:
        seeded_again(module.graph)
    # Padded results travel each in its own buffer.
    varies = any(
        isinstance(node.meta.get("val"), torch.SymInt) for node in joint.graph.find_nodes(op="placeholder")
    )
    if options.keep == "together" and not (options.ranged and varies) and not has_saving_hooks():
        saved_tensors.together(*split, num_fwd_outputs)
    return split


def _gather_again(graph: Graph) -> None:
    """Let backward gather once more what ``fully_shard`` gathered, and its views and casts, rather than keep copies."""
    from torch.utils.checkpoint import CheckpointPolicy

    gathered: set[Node] = set()
    for node in graph.nodes:
        op = node.target
        if not isinstance(op, OpOverload):
            continue
        again = op.name() == "isthmus::redistribute" and len(node.args) > 3 and node.args[3]
        cheap = op.is_view or torch.Tag.pointwise in op.tags or op is torch.ops.aten._to_copy.default
        # What is cheap to compute of something gathered is computed again as well, or the cut would save it
        # instead.
        if again or (cheap and node.all_input_nodes and gathered.issuperset(node.all_input_nodes)):
            gathered.add(node)
            node.meta["recompute"] = CheckpointPolicy.MUST_RECOMPUTE


def _save_what_is_overwritten(graph: Graph) -> None:
    """Keep torch from computing in backward, once more, what forward computed of an argument it then wrote to."""
    from torch.utils.checkpoint import CheckpointPolicy

    written = [node.args[0] for node in graph.nodes if node.target is torch.ops.aten.copy_.default]
    for place in written:
        assert isinstance(place, Node)
        for user in place.users:
            # A view of the argument too: after the write it would show the new values.
            if user.target is not torch.ops.aten.copy_.default:
                user.meta["recompute"] = CheckpointPolicy.MUST_SAVE


def _compile(
    options: Options, name: str, module: GraphModule, example_inputs: Sequence[Any]
) -> Callable[..., Any]:
    """Return the callable torch runs in place of a functional graph."""
    return _boxed(_clusters(options, name, module))


def _clusters(
    options: Options, name: str, module: GraphModule, parameters: set[int] | None = None
) -> Clusters:
    key_random_nodes(module.graph)
    module.graph.eliminate_dead_code()
    # The graph was changed under FX's generated code.
    module.recompile()
    return Clusters(module, options, name, parameters)


def _infer(
    options: Options, name: str, alone: list[Clusters], module: GraphModule, example_inputs: Sequence[Any]
) -> Callable[..., Any]:
    """Return the callable for a graph without gradients, whose parameters may be frozen.

    Where it needs nothing of torch's around it, it is also put into ``alone``.
    """
    parameters = parameter_places() if options.freeze else set()
    clusters = _clusters(options, name, module, parameters)
    if only_calls_graph():
        alone.append(clusters)
    return _boxed(clusters)


def _unwrapped(clusters: Clusters, wrapped: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that runs a graph without AOTAutograd's wrapper, which takes longer than a small program."""

    way: Callable[..., Any]

    def slow(*args: Any) -> Any:
        nonlocal way
        # Nodes outside of programs are torch's own, and torch's modes are theirs.
        if clusters.reasons:
            return wrapped(*args)
        try:
            results = clusters.run([*args])
        except NodeFailure:
            return wrapped(*args)
        except Exception as error:
            __tracebackhide__ = True  # for IPython and pytest
            tracebacks.shorten(error)
            raise
        # Only now: ``last`` is what this call has set.
        way = _shortest(clusters.run, slow)
        if isinstance(clusters.run, Program):
            clusters.run.on_drop = forget
        return results

    def forget() -> None:
        nonlocal way
        way = slow

    way = slow
    return lambda *args: way(*args)


def _shortest(program: Any, slow: Callable[..., Any]) -> Callable[..., Any]:
    """Return the shortest way to make the next call, if it is like the last."""
    like = program.last if isinstance(program, Program) else None
    if like is None:
        return slow
    if like.run.quick is None:
        like.run.quick = quick(like, slow)
    return like.run.quick


def _boxed(clusters: Callable[[list[Any]], Any]) -> Callable[[list[Any]], Any]:
    """Return a compiled graph as torch calls it: with its list of arguments, which are freed as soon as they can be."""

    def call(args: list[Any]) -> Any:
        try:
            return clusters(args)
        except Exception as error:
            __tracebackhide__ = True  # for IPython and pytest
            tracebacks.shorten(error)
            raise

    return takes_list(call)
