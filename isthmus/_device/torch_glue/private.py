"""Every private API of torch the device uses, needed ones and optional ones (``isthmus._upstream`` defines both).

torch promises nothing about these names, so each stands behind a function here that says in the device's words what
it is for: where a new torch changes one, this file changes and no other. What Dynamo hides is in
``_dynamo/private.py``, what every layer needs (schemas, the class of an op) in ``_graph/private.py``::

    contents(storage)                # the Buffer that hangs on a storage; ``torch.Storage`` has no slot for one
    redispatch_to_meta(op, ...)      # the op's Meta kernel, as the dispatcher would call it
    is_fake(tensor)                  # whether torch.compile or torch.export is tracing

What is looked up while this module is imported is needed, and so are the guards without an ``optional`` above them:
without one of those the device cannot be had, and ``SetupError`` says which name is missing. The rest has another way,
slower or with less comfort. tests/device/test_private.py checks what each name does, tests/device/test_drift.py what
happens without it, and tests/project/test_imports.py that no other file uses one.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, MutableMapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch

from isthmus._device.torch_glue import patches
from isthmus._graph.private import OpOverload
from isthmus._upstream import choose, optional

# The Meta kernels of view ops build a tensor on the storage they are given, whatever its device.
META = torch._C.DispatchKeySet(torch._C.DispatchKey.Meta)
_AUTOCAST = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastPrivateUse1)  # type: ignore[attr-defined]
_UNDEFINED = torch._C.DispatchKey.Undefined
_AUTOCASTS = [key for name, key in torch._C.DispatchKey.__members__.items() if name.startswith("Autocast")]
empty_tensor = torch._C._acc.create_empty_tensor
PRIVATE_USE_1 = int(torch._C._autograd.DeviceType.PrivateUse1)  # type: ignore[call-overload]
Generator = torch._C.Generator  # ``torch.Generator`` is replaced (generators.py)


def contents(storage: Any) -> Any:
    """Return the Buffer or Bytes behind a "jax" storage; None for a storage of any other device.

    torch keeps no memory behind a "jax" storage. A Python attribute hangs there instead, and torch preserves the Python
    object of a storage for as long as the storage lives, whatever happens to the tensors on it.
    """
    # ``getattr`` with a default: storages of other devices have no such attribute.
    return getattr(storage, "_buffer", None)


def read_storage(storage: torch.UntypedStorage, *args: Any) -> None:
    """Read the bytes of a CPU storage from a file, as ``torch.load`` of its old format asks."""
    storage._set_from_file(*args)


def set_contents(storage: Any, held: Any) -> None:
    """Hang a Buffer or Bytes on a "jax" storage."""
    storage._buffer = held


def _never_alike(*tensors: torch.Tensor) -> bool:
    return False


@optional(
    "compiled functions and isthmus.jit compare their arguments in Python", lambda tensors: _never_alike
)
def likeness(tensors: Sequence[torch.Tensor]) -> Callable[..., bool]:
    """Return a function of as many tensors: whether all have the dtypes, layouts and requires_grad of these, and what
    decides how ops are dispatched on this thread is the same.
    """
    guards = torch._C._dynamo.guards.TensorGuards  # type: ignore[attr-defined]
    # Sizes and strides are compared exactly; Dynamo's own use allows dynamic ones.
    check = guards(*tensors, dynamic_dims_sizes=None, dynamic_dims_strides=None).check
    # Tried on the tensors themselves: a changed API is noticed here and not by a wrong answer.
    if check(*tensors) is not True:
        raise TypeError("TensorGuards finds tensors unlike themselves")
    return check


def redispatch(op: OpOverload, key: str, *args: Any, **kwargs: Any) -> Any:
    """Run the kernel that torch has for an op under another dispatch key, on tensors of any device."""
    return op.redispatch(_KEY_SETS[key], *args, **kwargs)


_KEY_SETS = {
    name: torch._C.DispatchKeySet(torch._C.DispatchKey.__members__[name])
    for name in ("CPU", "SparseCPU", "SparseCsrCPU")
}


def redispatch_to_meta(op: OpOverload, *args: Any, **kwargs: Any) -> Any:
    """Run torch's own Meta kernel of a view op on a "jax" tensor."""
    return op.redispatch(META, *args, **kwargs)


def restride(tensor: torch.Tensor, size: Any, stride: Any, offset: Any = 0) -> torch.Tensor:
    """Return a tensor on the same storage with this layout."""
    return torch.ops.aten.as_strided.default.redispatch(META, tensor, size, stride, offset)


def _restriding_guard() -> Callable[[], AbstractContextManager[Any]]:
    """Return the function that makes the guard of ``restriding``; it is tried once."""
    keys = torch._C.DispatchKey
    trackers = [key for name, key in keys.__members__.items() if name.startswith("Autograd")]
    trackers.append(keys.ADInplaceOrView)  # type: ignore[attr-defined]
    tracking = functools.reduce(torch._C.DispatchKeySet.add, trackers, torch._C.DispatchKeySet(trackers[-1]))

    @contextlib.contextmanager
    def guard() -> Iterator[None]:
        with torch._C.DisableTorchFunction(), torch._C._ForceDispatchKeyGuard(META, tracking):
            yield

    # Entered once, so that a torch without it is noticed now.
    with guard():
        return guard


# Inside ``restriding()`` the function ``restrided`` does what ``restride`` does, for a third of the cost.
restriding: Callable[[], AbstractContextManager[Any]] = choose(
    "_device.private.restriding",
    "results of compiled functions that are views take a few microseconds more",
    _restriding_guard,  # type: ignore[arg-type]
    contextlib.nullcontext,
)
restrided = restride if restriding is contextlib.nullcontext else torch.Tensor.as_strided


def become(tensor: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """Give ``tensor`` the storage and the layout of ``other``, keeping its identity and version."""
    torch.Tensor.data.__set__(tensor, other)  # type: ignore[attr-defined]
    return tensor


def has_kernel(op: OpOverload, key: str) -> bool:
    """Return whether torch has a kernel for ``op`` under this dispatch key."""
    return torch._C._dispatch_has_kernel_for_dispatch_key(op.name(), key)


@optional("a TorchFunctionMode of the user's sees calls that the device makes itself", contextlib.nullcontext)
def without_torch_function() -> Any:
    """Return a guard under which no mode or subclass of the user's sees calls of ours."""
    return torch._C.DisableTorchFunction()


@optional("after a graph break Dynamo may try to compile the device's own kernels", lambda function: None)
def hide_from_dynamo(function: Any) -> None:
    """Keep Dynamo from compiling a kernel, and what it calls, when code it could not trace runs in Python."""
    frames = torch._C._dynamo.eval_frame  # type: ignore[attr-defined]
    strategy = frames._FrameExecStrategy(frames._FrameAction.SKIP, frames._FrameAction.SKIP)
    frames.set_code_exec_strategy(function.__code__, strategy)


def in_traced_backward(*tensors: torch.Tensor) -> bool:
    """Return whether a backward formula of torch's is being traced, on tensors without values."""
    return any([is_fake(tensor) for tensor in tensors]) and in_backward()


@optional(
    "fake tensors are known by the name of their class", lambda tensor: type(tensor).__name__ == "FakeTensor"
)
def is_fake(tensor: torch.Tensor) -> bool:
    """Return whether a tensor stands for another while a graph is traced."""
    from torch._subclasses.fake_tensor import FakeTensor

    return isinstance(tensor, FakeTensor)


@optional("the gradient of a complex svd may refuse to be traced", lambda: False)
def in_backward() -> bool:
    """Return whether a backward pass is running on this thread."""
    return torch._C._current_autograd_node() is not None


def carry(key: str, value: Any) -> None:
    """Give this thread a value that torch carries along to the threads that work for it, as in backward.

    None removes it: a thread must not end with one, as torch would free it then, and wait for the GIL while it does.
    torch 2.11 has no way to.
    """
    if value is not None:
        torch._C._stash_obj_in_tls(key, value)
    else:
        torch._C._remove_obj_from_tls(key)


def carried(key: str) -> Any:
    """Return the value that ``carry`` gave this thread or the one it works for, or None."""
    return torch._C._get_obj_in_tls(key) if torch._C._is_key_in_tls(key) else None


def work_of_future(future: torch.futures.Future[Any]) -> Any:
    """Return the work of torch.distributed that ends with a future, for C++ as well."""
    return torch._C._distributed_c10d._create_work_from_future(future)  # type: ignore[attr-defined]


@optional("signals are taken to interrupt autograd's threads", lambda: True)
def runs_backward_here() -> bool:
    """Return whether the thread that calls backward runs it, rather than a thread of autograd's."""
    return not torch._C._is_multithreading_enabled()


def below_autograd() -> Any:
    """Return a guard under which a call goes straight to the backend."""
    return torch._C._AutoDispatchBelowAutograd()


@optional("JAX functions in torch are called as if tangents were wanted", lambda: True)
def in_forward_mode() -> bool:
    """Return whether tensors may carry tangents: inside ``dual_level`` or ``torch.func.jvp``."""
    return torch.autograd.forward_ad._current_level >= 0


@optional(
    "recurrent networks run step by step, and weights gathered for forward are kept, as if inside torch.func",
    lambda: True,
)
def in_function_transform() -> bool:
    """Return whether a function of ``torch.func`` or ``torch.vmap`` is at work on this thread."""
    return torch._C._are_functorch_transforms_active()


def above_autograd() -> Any:
    """Return a guard under which a call made by a kernel is recorded by autograd, as one from outside would be."""
    excluded, still = torch._C._dispatch_tls_local_exclude_set(), torch._C.DispatchKeySet(_UNDEFINED)
    for key in _AUTOCASTS:
        still = still.add(key) if excluded.has(key) else still
    return torch._C._ForceDispatchKeyGuard(torch._C._dispatch_tls_local_include_set(), still)


def without_autocast() -> Any:
    """Return a guard under which calls pass autocast by."""
    return torch._C._ExcludeDispatchKeyGuard(_AUTOCAST)


@optional("torch.nn.attention.sdpa_kernel cannot switch the device's own attention off", lambda: True)
def fused_attention_enabled() -> bool:
    """Return whether ``torch.nn.attention.sdpa_kernel`` allows the device's own attention."""
    return bool(torch._C._get_overrideable_sdp_enabled())


@optional("`isthmus ops` and `isthmus where` know no ops but those with a lowering", list)
def op_names() -> list[str]:
    """Return the full name of every op torch's dispatcher knows; TorchScript's own overloads are not among them."""
    return list(torch._C._dispatch_get_all_op_names())


@optional("flex_attention refuses tensors of the device", lambda: None)
def allow_flex_attention() -> None:
    """Let ``flex_attention`` take tensors of the device: torch names the devices it serves inside a function."""
    from torch._higher_order_ops.flex_attention import flex_attention as op
    from torch.nn.attention import flex_attention

    theirs = flex_attention._validate_device

    @functools.wraps(theirs)
    def validate(query: torch.Tensor, *args: Any, **kwargs: Any) -> None:
        if query.device.type != "jax":
            theirs(query, *args, **kwargs)

    patches.replace("torch.nn.attention.flex_attention", "_validate_device", lambda theirs: validate)
    autocast = torch._C.DispatchKey.AutocastPrivateUse1  # type: ignore[attr-defined]
    if autocast not in op.py_kernels:
        as_kernel = patches.register("torch._higher_order_ops.flex_attention", "py_impl", autocast)
        if as_kernel is not None:
            as_kernel(_flex_attention_autocast)


def _flex_attention_autocast(*args: Any) -> Any:
    """Run it on queries, keys and values of autocast's dtype, as torch does on its own devices."""
    from torch._higher_order_ops.flex_attention import flex_attention

    dtype = torch.get_autocast_dtype("jax")
    castable = (torch.float32, torch.float16, torch.bfloat16)
    queries_keys_values = [x.to(dtype) if x.dtype in castable else x for x in args[:3]]
    with without_autocast():
        return flex_attention(*queries_keys_values, *args[3:])


@optional("ops on sparse tensors that are not in our tables fail", lambda key: [])
def names_with_kernel(key: str) -> list[str]:
    """Return the full name of every op of ATen that torch has a kernel for under this dispatch key."""
    has = torch._C._dispatch_has_kernel_for_dispatch_key
    return [name for name in op_names() if name.startswith("aten::") and has(name, key)]


def composite(op: OpOverload, *args: Any) -> Any:
    """Run the C++ kernel of an op that torch composes of others.

    ``op.decompose`` takes a kernel in Python where torch has one, and that of ``lstm`` never drops anything between
    layers (torch 2.13: ``_rnn_helper`` compares ``num_layers < i - 1``).
    """
    return op._op_dk(torch._C.DispatchKey.CompositeImplicitAutograd, *args)


def generator_address(generator: torch.Generator) -> int:
    """Return the address of a generator, its identity: a kernel gets a new object of torch's own class for it."""
    return generator._cdata  # type: ignore[attr-defined, no-any-return]


def trace_as_objects(cls: type) -> None:
    """Let Dynamo break a graph at methods and draws of a generator of this class, as at those of torch's own class.

    torch 2.13 has torch's generators opaque to ``make_fx``, and Dynamo excepts exactly their class from that; a
    subclass would reach fake kernels as a wrapper that these refuse.
    """
    opaque = getattr(getattr(torch, "_library", None), "opaque_object", None)
    if isinstance(getattr(opaque, "_OPAQUE_TYPES", None), MutableMapping):
        opaque._OPAQUE_TYPES[cls] = None  # type: ignore[union-attr]  # read as "not opaque" before its bases are asked


_PLAIN = frozenset({torch.Tensor, torch.nn.Parameter})


@optional("JAX functions in torch go through torch's dispatcher", lambda tensors: False)
def are_plain(tensors: list[torch.Tensor]) -> bool:
    """Return whether an op on these would go straight to the kernel of "jax", gradients aside."""
    if torch._C._len_torch_dispatch_stack() or in_function_transform():
        return False
    for t in tensors:
        elsewhere = type(t) not in _PLAIN or t.is_cpu or t.is_cuda or t.is_meta
        if elsewhere or t.is_conj() or t.is_neg():
            return False
    return True


@optional("containers that torch knows are not opened for JAX", lambda kind: None)
def container_of(kind: type) -> tuple[Callable[[Any], Any], Callable[[Any, Any], Any]] | None:
    """Return how torch's pytrees take a container apart and, given the rest first, put it together again."""
    from torch.utils._pytree import SUPPORTED_NODES

    container = SUPPORTED_NODES.get(kind)
    if container is None:
        return None
    return container.flatten_fn, lambda rest, items: container.unflatten_fn(list(items), rest)


@optional("what a compiled forward keeps for backward are many tensors, not one", lambda: True)
def has_saving_hooks() -> bool:
    """Return whether hooks on all saved tensors are in force, as inside ``torch.autograd.graph.save_on_cpu``."""
    return torch._C._autograd._top_saved_tensors_default_hooks(True) is not None


@optional("module.to makes new parameters on its way to the device and back", lambda tensor: False)
def is_plain_in_memory(tensor: torch.Tensor) -> bool:
    """Return whether a tensor is what its storage holds: no subclass with its own dispatch, no functional wrapper."""
    keys, known = torch._C._dispatch_keys(tensor), torch._C.DispatchKey.__members__
    return not (keys.has(known["Python"]) or keys.has(known["Functionalize"]))


def scripted_tensors(module: Any) -> list[tuple[str, Any]]:
    """Return the parameters and buffers of the C++ object behind one ``torch.jit.ScriptModule``, by name."""
    parameters, buffers = torch._C.ParameterDict(module), torch._C.BufferDict(module)
    return [*parameters.items(), *buffers.items()]  # type: ignore[attr-defined]


def _try_needed() -> None:
    """Use what the device needs once, so that a torch which changed it is found out at import, not in the middle."""
    with below_autograd(), without_autocast(), above_autograd():
        pass
    if has_kernel(torch.ops.aten.add.Tensor, "CPU") is not True:
        raise TypeError("torch._C._dispatch_has_kernel_for_dispatch_key does not find a kernel that is there")
    if not isinstance(META, torch._C.DispatchKeySet) or not callable(empty_tensor):
        raise TypeError("torch._C.DispatchKeySet or torch._C._acc.create_empty_tensor is not what it was")


_try_needed()


@optional("torch._dynamo.mark_dynamic(max=...) chooses no padded size", lambda tensor: {})
def largest_sizes(tensor: Any) -> dict[int, int]:
    """Return the largest sizes that ``torch._dynamo.mark_dynamic`` has said of a tensor, by dim."""
    marks = getattr(tensor, "_dynamo_dynamic_range", None) or ()
    return {mark.dim: int(mark.max) for mark in marks if mark.max is not None}


# What a module and an optimizer are made of, as torch's classes spell it: ``named_parameters`` and its like take
# microseconds for each module, and hooks have no public list. isthmus.jit looks at all of them before every replay.
MODULE_PARTS = ("_parameters", "_buffers", "_modules")
MODULE_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
STEP_HOOKS = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")
TENSOR_HOOKS = ("_backward_hooks", "_post_accumulate_grad_hooks")


def has_forward_hooks(module: torch.nn.Module) -> bool:
    """Return whether Python of the user's runs before or after a module's forward."""
    return bool(module._forward_hooks or module._forward_pre_hooks)


def parameters_of(module: torch.nn.Module) -> dict[str, torch.nn.Parameter | None]:
    """Return a module's own parameters by name, tied ones and those that are None among them."""
    return module._parameters


def buffers_of(module: torch.nn.Module) -> dict[str, torch.Tensor | None]:
    """Return a module's own buffers by name, those that are None among them."""
    return module._buffers


def in_cpp(module: torch.nn.Module) -> Any:
    """Return the C++ object of a scripted module, which has the tensors it computes with; None for any other."""
    return getattr(module, "_c", None)


def after_backward(callback: Callable[[], None]) -> None:
    """Run a function at the end of the backward pass that is running; called there, after those queued so far."""
    torch.autograd.Variable._execution_engine.queue_callback(callback)


def is_ignored_by_ddp(parameter: torch.Tensor) -> bool:
    """Return whether DistributedDataParallel leaves a parameter alone, which it marks so."""
    return hasattr(parameter, "_ddp_ignored")


def group_named(name: str) -> Any:
    """Return the process group that a functional collective names."""
    from torch.distributed import distributed_c10d

    return distributed_c10d._resolve_process_group(name)  # type: ignore[attr-defined,arg-type]


def dtensor_rules() -> list[Any]:
    """Return DTensor's tables of how ops may be split, each by op; there is no public way to ask for a rule."""
    from torch.distributed.tensor import DTensor

    propagator = DTensor._op_dispatcher.sharding_propagator
    names = (
        "op_strategy_funcs",
        "op_to_rules",
        "op_single_dim_strategy_funcs",
    )  # not every release has the last
    return [getattr(propagator, name, {}) for name in names]
