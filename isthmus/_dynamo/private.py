"""Every private API of Dynamo that Isthmus uses, all of it optional as ``isthmus._upstream`` defines that.

These make compiled functions faster or their reports better, and each says in its ``@optional`` what a torch without
it loses:

- ``write_short_calls``, ``spare_call``: the bytecode that Dynamo writes around a graph sets no marks for a profiler and
  looks up no streams, microseconds at every call;
- ``keep_optimizer_steps_on_device``: an optimizer's step counts do not cross to the CPU and back in every step;
- ``graph_breaks``: where Dynamo gave up, for ``isthmus.explain``;
- ``aot_autograd``, ``example_of``, ``takes_list``: how a backend is called.

``backend.py`` calls them when the first function is compiled; those that replace a name of torch's are rows of the
table of patches (``_device/torch_glue/patches.py``). tests/device/test_private.py checks what each name does,
tests/device/test_drift.py what happens without it.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch

from isthmus._device.torch_glue import patches
from isthmus._device.torch_glue.private import has_kernel
from isthmus._upstream import optional

GraphBreak = tuple[list[tuple[str, int]], str, str | None]
"""Files and lines, innermost last, the reason, and the function that was given up where it could not be resumed."""


@functools.cache
@optional(
    "an optimizer inside torch.compile keeps its step counts on the CPU, which costs transfers", lambda: None
)
def keep_optimizer_steps_on_device() -> None:
    """Let Dynamo trace an optimizer on "jax" as it does on CUDA: with its step counts on the device.

    Left on the CPU, each parameter's count would cross to the device and back in every step. From torch 2.14 on, Dynamo
    sets ``capturable`` only while the optimizer makes its state, for groups that ``_safe_to_set_capturable`` names;
    before, it sets it for good in ``_set_capturable``.
    """
    from torch._dynamo.variables.optimizer import OptimizerVariable

    owner = "torch._dynamo.variables.optimizer.OptimizerVariable"
    if hasattr(OptimizerVariable, "_safe_to_set_capturable"):
        names_group = OptimizerVariable._safe_to_set_capturable

        def safe_to_set_capturable(self: Any, group: dict[str, Any], *rest: Any) -> bool:
            return names_group(self, group, *rest) or _has_fresh_state(self, group)

        patches.replace(owner, "_safe_to_set_capturable", lambda theirs: safe_to_set_capturable)
        return
    original = OptimizerVariable._set_capturable

    def set_capturable(self: Any, *args: Any) -> None:
        for group in self.value.param_groups:
            if _has_fresh_state(self, group):
                group["capturable"] = True
        original(self, *args)

    patches.replace(owner, "_set_capturable", lambda theirs: set_capturable)


def _has_fresh_state(variable: Any, group: dict[str, Any]) -> bool:
    """Return whether the parameters of a group are all on "jax" and have no state yet."""
    state = variable.value.state
    return "capturable" in group and all(p.device.type == "jax" and p not in state for p in group["params"])


@functools.cache
@optional("attention with sizes that change cannot be trained under torch.compile", lambda: None)
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
    before = _compilation_metrics()
    breaks: list[GraphBreak] = []
    _resumed_breaks(forget=True)
    yield breaks
    breaks += _resumed_breaks()
    for metrics in _compilation_metrics():
        if metrics.fail_reason is None or any(metrics is old for old in before):
            continue
        # A break that cannot be resumed from, as in a loop, is no graph's reason: the whole frame is left to Python.
        file = metrics.fail_user_frame_filename or metrics.co_filename or ""
        line = metrics.fail_user_frame_lineno or metrics.co_firstlineno or 0
        breaks.append(([(file, line)], metrics.fail_reason, metrics.co_name))


@optional("isthmus.explain shows no graph breaks that Dynamo resumed from", lambda forget=False: [])
def _resumed_breaks(forget: bool = False) -> list[GraphBreak]:
    """Return the breaks that Dynamo noted since they were last forgotten."""
    from torch._dynamo.utils import graph_break_reasons

    if forget:
        graph_break_reasons.clear()
    return [
        ([(frame.filename, frame.lineno or 0) for frame in each.user_stack], each.reason, None)
        for each in graph_break_reasons
    ]


@optional("isthmus.explain shows no functions that Dynamo gave up", list)
def _compilation_metrics() -> list[Any]:
    """Return Dynamo's records of what it compiled, with the fields that ``graph_breaks`` reads."""
    from torch._dynamo.utils import get_compilation_metrics

    fields = (
        "fail_reason",
        "fail_user_frame_filename",
        "fail_user_frame_lineno",
        "co_filename",
        "co_firstlineno",
    )
    for metrics in (every := get_compilation_metrics()):
        for field in (*fields, "co_name"):
            getattr(metrics, field)
    return every


@optional("torch.compile freezes no parameters", set)
def parameter_places() -> set[int]:
    """Return which arguments of the graph being compiled are parameters and buffers."""
    from torch._guards import TracingContext

    context = TracingContext.try_get()
    metadata = None if context is None else context.fw_metadata
    return set() if metadata is None else set(metadata.static_input_indices)


@optional("a JAX function inside a compiled one breaks its graph", lambda function: function)
def nonstrict_trace(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that Dynamo puts into its graph by what it does to tensors, not by its Python code."""
    import torch._dynamo

    return torch._dynamo.nonstrict_trace(function)  # type: ignore[no-any-return]


@optional("every call of a compiled function takes about 10 us more", lambda graph: None)
def spare_call(graph: torch.fx.Graph) -> None:
    """Keep the code that Dynamo is about to write around a graph short: it runs at every call.

    It marks, for a profiler, where the code begins and ends, and it looks up the current stream for whatever may name
    one (later torch only where one does). Both are done in Python and take half as long as a small program's call.
    """
    from torch._dynamo import graph_bytecode_inputs as external

    _Unmarked.next = True
    # Dynamo's objects by number: dicts up to torch 2.14, lists since.
    writers, references = external.index_to_bytecode_constructor, external.index_to_external_object_weakref
    objects = [
        reference() for reference in (references.values() if isinstance(references, dict) else references)
    ]
    alone = len(writers) == len(objects) == 1 and isinstance(objects[0], torch.Stream)
    if alone and not any(_names_objects(node.target) for node in graph.nodes):
        writers.clear()


class _Unmarked:
    """Whether the next graph that Dynamo writes a call of is to be called without marks for a profiler."""

    next = False


@functools.cache
@optional("every call of a compiled function takes some microseconds more", lambda: None)
def write_short_calls() -> None:
    """Let Dynamo write calls without marks where ``spare_call`` asked for it."""
    from torch._dynamo import config
    from torch._dynamo.codegen import PyCodegen

    original = PyCodegen.make_call_generated_code
    with config.patch(record_runtime_overhead=config.record_runtime_overhead):
        pass  # the setting exists and can be patched

    @functools.wraps(original)
    def make_call_generated_code(self: Any, *args: Any, **kwargs: Any) -> None:
        marked = config.record_runtime_overhead and not _Unmarked.next
        _Unmarked.next = False
        with config.patch(record_runtime_overhead=marked):
            original(self, *args, **kwargs)

    owner = "torch._dynamo.codegen.PyCodegen"
    patches.replace(owner, "make_call_generated_code", lambda theirs: make_call_generated_code)


class _Registered(dict[str, Any]):
    """Dynamo's table of backends, in which this one may be registered again."""

    def __contains__(self, name: object) -> bool:
        return name != "isthmus" and super().__contains__(name)


@functools.cache
@optional(
    "the first torch.compile of several threads at once may fail, and works when it is tried again",
    lambda: None,
)
def allow_registering_again() -> None:
    """Let several threads look this backend up at once.

    Each of them finds that it is not registered, loads it, which takes seconds, and registers it; torch refuses all but
    the first. The functions they are inside of cannot be replaced any more, but the table that these ask can.
    """
    from torch._dynamo.backends import registry

    if not isinstance(registry._COMPILER_FNS, dict):
        raise TypeError("torch._dynamo.backends.registry keeps its backends otherwise")
    patches.replace("torch._dynamo.backends.registry", "_COMPILER_FNS", _Registered)


def _names_objects(target: Any) -> bool:
    """Return whether what a node calls may ask for one of the objects that Dynamo keeps by number."""
    names = (getattr(target, "namespace", ""), getattr(target, "__name__", str(target)))
    return names[0] == "streams" or "external_object" in names[1] or "leaf_function" in names[1]


@optional("compiled functions without gradients run inside torch's wrapper", lambda: False)
def only_calls_graph() -> bool:
    """Return whether AOTAutograd, which is compiling an inference graph, will do nothing but call what is compiled.

    Nothing is written to, no result shows an argument or another result, none is of a subclass or has a size to be
    marked as changing. What is then left of its wrapper turns off autograd and autocast, which a program asks neither.
    """
    context = torch._guards.TracingContext.try_get()
    meta = context.fw_metadata if context is not None else None
    return meta is not None and _adds_nothing(meta)


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


@optional("torch.compile runs its graphs op by op", lambda **options: lambda module, inputs: module.forward)
def aot_autograd(**options: Any) -> Callable[..., Any]:
    """Return a backend that gets functional graphs of forward and backward; docs of torch name its maker."""
    from torch._dynamo.backends.common import aot_autograd

    backend = aot_autograd(**options)
    if not callable(backend):
        raise TypeError("torch._dynamo.backends.common.aot_autograd makes no backend")
    return backend


@optional("calls that the CPU's kernels refuse may be compiled", contextlib.nullcontext)
def without_modes() -> Any:
    """Return a guard under which calls are not traced: the modes of AOTAutograd would see them."""
    from torch.utils._python_dispatch import _disable_current_modes

    return _disable_current_modes()


@optional("torch._dynamo.mark_dynamic(max=...) chooses no padded size", lambda node: None)
def example_of(node: torch.fx.Node) -> Any:
    """Return the value that a placeholder of Dynamo's graph was called with; None where it is not known."""
    argument = node.meta.get("grapharg")
    return None if argument is None or not argument.is_tensor else argument.example


@optional("programs for ranges of sizes begin with the third size of a compiled function", lambda: False)
def compiles_again() -> bool:
    """Return whether what Dynamo compiles is code that it has compiled before: it has another size, if any varies."""
    now = torch._guards.CompileContext.current_compile_id()
    return now is not None and bool(now.frame_compile_id)


def takes_list(call: Callable[[list[Any]], Any]) -> Callable[[list[Any]], Any]:
    """Mark a compiled graph as one that takes the list of its arguments, which it may empty, as AOTAutograd asks."""
    call._boxed_call = True  # type: ignore[attr-defined]
    return call
