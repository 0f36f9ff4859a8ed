"""Every private API of torch the device uses; checked on torch 2.11 and 2.13 by tests/test_private.py."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch._ops import OpOverload

# The Meta kernels of view ops build a tensor on the storage they are given, whatever its device.
META = torch._C.DispatchKeySet(torch._C.DispatchKey.Meta)
_TRACKERS = [key for name, key in torch._C.DispatchKey.__members__.items() if name.startswith("Autograd")]
_TRACKERS.append(torch._C.DispatchKey.ADInplaceOrView)  # type: ignore[attr-defined]
_TRACKING = functools.reduce(torch._C.DispatchKeySet.add, _TRACKERS, torch._C.DispatchKeySet(_TRACKERS[-1]))
_AUTOCAST = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastPrivateUse1)  # type: ignore[attr-defined]
_UNDEFINED = torch._C.DispatchKey.Undefined
_AUTOCASTS = [key for name, key in torch._C.DispatchKey.__members__.items() if name.startswith("Autocast")]
_frames = torch._C._dynamo.eval_frame  # type: ignore[attr-defined]
empty_tensor = torch._C._acc.create_empty_tensor
RecursiveScriptModule = torch.jit._script.RecursiveScriptModule


def likeness(tensors: Sequence[torch.Tensor]) -> Callable[..., bool]:
    """Return a function of as many tensors: whether all have the dtypes, layouts and requires_grad of these, and what
    decides how ops are dispatched on this thread is the same.
    """
    guards = torch._C._dynamo.guards.TensorGuards  # type: ignore[attr-defined]
    return guards(*tensors, dynamic_dims_sizes=None, dynamic_dims_strides=None).check


def redispatch_to_meta(op: OpOverload, *args: Any, **kwargs: Any) -> Any:
    """Run torch's own Meta kernel of a view op on a "jax" tensor."""
    return op.redispatch(META, *args, **kwargs)


def restride(tensor: torch.Tensor, size: Any, stride: Any, offset: int = 0) -> torch.Tensor:
    """Return a tensor on the same storage with this layout."""
    return torch.ops.aten.as_strided.default.redispatch(META, tensor, size, stride, offset)


@contextlib.contextmanager
def restriding() -> Iterator[None]:
    """Make ``as_strided`` what ``restride`` is, for a third of the cost where there are many."""
    with torch._C.DisableTorchFunction(), torch._C._ForceDispatchKeyGuard(META, _TRACKING):
        yield


def become(tensor: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """Give ``tensor`` the storage and the layout of ``other``, keeping its identity and version."""
    torch.Tensor.data.__set__(tensor, other)  # type: ignore[attr-defined]
    return tensor


def has_kernel(op: OpOverload, key: str) -> bool:
    """Return whether torch has a kernel for ``op`` under this dispatch key."""
    return torch._C._dispatch_has_kernel_for_dispatch_key(op.name(), key)


def hide_from_dynamo(function: Any) -> None:
    """Keep Dynamo from compiling a kernel, and what it calls, when code it could not trace runs in Python."""
    strategy = _frames._FrameExecStrategy(_frames._FrameAction.SKIP, _frames._FrameAction.SKIP)
    _frames.set_code_exec_strategy(function.__code__, strategy)


def in_traced_backward(*tensors: torch.Tensor) -> bool:
    """Return whether a backward formula of torch's is being traced, on tensors without values."""
    return any([is_fake(tensor) for tensor in tensors]) and in_backward()


def is_fake(tensor: torch.Tensor) -> bool:
    """Return whether a tensor stands for another while a graph is traced."""
    from torch._subclasses.fake_tensor import FakeTensor

    return isinstance(tensor, FakeTensor)


def in_backward() -> bool:
    """Return whether a backward pass is running on this thread."""
    return torch._C._current_autograd_node() is not None


def below_autograd() -> Any:
    """Return a guard under which a call goes straight to the backend."""
    return torch._C._AutoDispatchBelowAutograd()


def in_forward_mode() -> bool:
    """Return whether tensors may carry tangents: inside ``dual_level`` or ``torch.func.jvp``."""
    return torch.autograd.forward_ad._current_level >= 0


def above_autograd() -> Any:
    """Return a guard under which a call made by a kernel is recorded by autograd, as one from outside would be."""
    excluded, kept = torch._C._dispatch_tls_local_exclude_set(), torch._C.DispatchKeySet(_UNDEFINED)
    for key in _AUTOCASTS:
        kept = kept.add(key) if excluded.has(key) else kept
    return torch._C._ForceDispatchKeyGuard(torch._C._dispatch_tls_local_include_set(), kept)


def without_autocast() -> Any:
    """Return a guard under which calls pass autocast by."""
    return torch._C._ExcludeDispatchKeyGuard(_AUTOCAST)


def fused_attention_enabled() -> bool:
    """Return whether ``torch.nn.attention.sdpa_kernel`` allows the device's own attention."""
    return bool(torch._C._get_overrideable_sdp_enabled())


def op_names() -> list[str]:
    """Return the full name of every op torch's dispatcher knows; TorchScript's own overloads are not among them."""
    return list(torch._C._dispatch_get_all_op_names())


def allow_flex_attention() -> None:
    """Let ``flex_attention`` take tensors of the device: torch names the devices it serves inside a function."""
    from torch._higher_order_ops.flex_attention import flex_attention as op
    from torch.nn.attention import flex_attention

    theirs = flex_attention._validate_device

    @functools.wraps(theirs)
    def validate(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> None:
        if query.device.type != "jax":
            theirs(query, key, value)

    flex_attention._validate_device = validate
    autocast = torch._C.DispatchKey.AutocastPrivateUse1  # type: ignore[attr-defined]
    if autocast not in op.py_kernels:
        op.py_impl(autocast)(_flex_attention_autocast)


def _flex_attention_autocast(*args: Any) -> Any:
    """Run it on queries, keys and values of autocast's dtype, as torch does on its own devices."""
    from torch._higher_order_ops.flex_attention import flex_attention

    dtype = torch.get_autocast_dtype("jax")
    wide = (torch.float32, torch.float16, torch.bfloat16)
    given = [x.to(dtype) if x.dtype in wide else x for x in args[:3]]
    with without_autocast():
        return flex_attention(*given, *args[3:])


_PLAIN = frozenset({torch.Tensor, torch.nn.Parameter})


def are_plain(tensors: list[torch.Tensor]) -> bool:
    """Return whether an op on these would go straight to the kernel of "jax", gradients aside."""
    if torch._C._len_torch_dispatch_stack() or torch._C._are_functorch_transforms_active():
        return False
    for t in tensors:
        elsewhere = type(t) not in _PLAIN or t.is_cpu or t.is_cuda or t.is_meta
        if elsewhere or t.is_conj() or t.is_neg():
            return False
    return True


def container_of(kind: type) -> tuple[Callable[[Any], Any], Callable[[Any, Any], Any]] | None:
    """Return how torch's pytrees take a container apart and, given the rest first, put it together again."""
    from torch.utils._pytree import SUPPORTED_NODES

    found = SUPPORTED_NODES.get(kind)
    if found is None:
        return None
    return found.flatten_fn, lambda rest, items: found.unflatten_fn(list(items), rest)


def has_saving_hooks() -> bool:
    """Return whether hooks on all saved tensors are in force, as inside ``torch.autograd.graph.save_on_cpu``."""
    return torch._C._autograd._top_saved_tensors_default_hooks(True) is not None


def held_by_script(inner: Any) -> list[Any]:
    """Return the parameters and the buffers of a module of ``torch.jit``, given its C++ object."""
    return [torch._C.ParameterDict(inner), torch._C.BufferDict(inner)]
