"""Every private API of Dynamo that Isthmus uses; checked on torch 2.11 and 2.13 by tests/test_private.py."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch

from isthmus._device.private import has_kernel

GraphBreak = tuple[list[tuple[str, int]], str, str | None]
"""Files and lines, innermost last, the reason, and the function that was given up where it could not be resumed."""


@functools.cache
def keep_optimizer_steps_on_device() -> None:
    """Let Dynamo trace an optimizer on "jax" as it does on CUDA: with its step counts on the device.

    Left on the CPU, each parameter's count would cross to the device and back in every step.
    """
    from torch._dynamo.variables.optimizer import OptimizerVariable

    original = OptimizerVariable._set_capturable

    def set_capturable(self: Any, tx: Any) -> None:
        for group in self.value.param_groups:
            fresh = all(p.device.type == "jax" and p not in self.value.state for p in group["params"])
            if fresh and "capturable" in group:
                group["capturable"] = True
        original(self, tx)

    OptimizerVariable._set_capturable = set_capturable  # type: ignore[method-assign]


@functools.cache
def give_attention_shapes() -> torch.library.Library | None:
    """Say what the gradients of attention look like, which torch 2.11 does not: without it no size may change."""
    op = torch.ops.aten._scaled_dot_product_fused_attention_overrideable_backward.default
    if has_kernel(op, "Meta"):
        return None
    library = torch.library.Library("aten", "IMPL")
    library.impl(op, gradients_of_attention, "Meta")
    return library  # which takes the kernel back when it is forgotten


def gradients_of_attention(
    grad_out: Any, query: Any, key: Any, value: Any, attn_bias: Any, *args: Any, **kwargs: Any
) -> tuple[Any, ...]:
    """Return empty gradients for query, key, value and bias."""
    return tuple(None if x is None else torch.empty_like(x) for x in (query, key, value, attn_bias))


@contextlib.contextmanager
def graph_breaks() -> Iterator[list[GraphBreak]]:
    """Collect the breaks of what is compiled inside this block, which begins with nothing compiled."""
    from torch._dynamo.utils import get_compilation_metrics, graph_break_reasons

    graph_break_reasons.clear()
    before = get_compilation_metrics()
    found: list[GraphBreak] = []
    yield found
    for one in graph_break_reasons:
        found.append(([(frame.filename, frame.lineno or 0) for frame in one.user_stack], one.reason, None))
    for metrics in get_compilation_metrics():
        if metrics.fail_reason is None or any(metrics is old for old in before):
            continue
        # A break that cannot be resumed from, as in a loop, is no graph's reason: the whole frame is left to Python.
        file = metrics.fail_user_frame_filename or metrics.co_filename or ""
        line = metrics.fail_user_frame_lineno or metrics.co_firstlineno or 0
        found.append(([(file, line)], metrics.fail_reason, metrics.co_name))


def parameter_places() -> set[int]:
    """Return which arguments of the graph being compiled are parameters and buffers."""
    from torch._guards import TracingContext

    context = TracingContext.try_get()
    metadata = None if context is None else context.fw_metadata
    return set() if metadata is None else set(metadata.static_input_indices)


def nonstrict_trace(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that Dynamo puts into its graph by what it does to tensors, not by its Python code."""
    import torch._dynamo

    return torch._dynamo.nonstrict_trace(function)  # type: ignore[no-any-return]


def spare_call(graph: torch.fx.Graph) -> None:
    """Keep the code that Dynamo is about to write around a graph short: it runs at every call.

    It marks, for a profiler, where the code begins and ends, and it looks up the current stream for whatever may name
    one (later torch only where one does). Both are done in Python and take half as long as a small program's call.
    """
    _Unmarked.next = True
    try:
        from torch._dynamo.graph_bytecode_inputs import (
            index_to_bytecode_constructor,
            index_to_external_object_weakref,
        )
    except ImportError:  # said elsewhere in other versions: the lookup is only slow
        return
    found = [reference() for reference in index_to_external_object_weakref.values()]
    alone = len(index_to_bytecode_constructor) == 1 and isinstance(found[0], torch.Stream)
    if alone and not any(_names_objects(node.target) for node in graph.nodes):
        index_to_bytecode_constructor.clear()


class _Unmarked:
    """Whether the next graph that Dynamo writes a call of is to be called without marks for a profiler."""

    next = False


@functools.cache
def write_short_calls() -> None:
    """Let Dynamo write calls without marks where ``spare_call`` asked for it."""
    from torch._dynamo import config
    from torch._dynamo.codegen import PyCodegen

    original = PyCodegen.make_call_generated_code

    def make_call_generated_code(self: Any, fn_name: str) -> None:
        marked = config.record_runtime_overhead and not _Unmarked.next
        _Unmarked.next = False
        with config.patch(record_runtime_overhead=marked):
            original(self, fn_name)

    PyCodegen.make_call_generated_code = make_call_generated_code  # type: ignore[method-assign]


def _names_objects(target: Any) -> bool:
    """Return whether what a node calls may ask for one of the objects that Dynamo keeps by number."""
    names = (getattr(target, "namespace", ""), getattr(target, "__name__", str(target)))
    return names[0] == "streams" or "external_object" in names[1] or "leaf_function" in names[1]


def only_calls_graph() -> bool:
    """Return whether AOTAutograd, which is compiling an inference graph, will do nothing but call what is compiled.

    Nothing is written to, no result shows an argument or another result, none is of a subclass or has a size to be
    marked as changing. What is then left of its wrapper turns off autograd and autocast, which a program asks neither.
    """
    context = torch._guards.TracingContext.try_get()
    meta = context.fw_metadata if context is not None else None
    if meta is None:
        return False
    try:
        return _adds_nothing(meta)
    except AttributeError:  # another torch says it in other words: its wrapper is always right
        return False


def _adds_nothing(meta: Any) -> bool:
    written = (i.mutates_data or i.mutates_metadata or i.mutates_storage_metadata for i in meta.input_info)
    plain = (
        type(m).__name__ == "PlainTensorMeta"
        for m in (*meta.subclass_inp_meta, *meta.subclass_fw_graph_out_meta)
    )
    return not (
        any(written)
        or meta.num_outputs_aliased
        or meta.num_intermediate_bases
        or meta.dynamic_outputs
        or meta.tokens
        or meta.num_graphsafe_rng_states
        or meta.grad_enabled_mutation is not None
    ) and all(plain)


def without_modes() -> Any:
    """Return a guard under which calls are not traced: the modes of AOTAutograd would see them."""
    from torch.utils._python_dispatch import _disable_current_modes

    return _disable_current_modes()
