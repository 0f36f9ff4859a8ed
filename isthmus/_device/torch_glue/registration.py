"""What ``import torch`` runs: device, hooks and guard, without JAX; the rest loads with the first tensor.

``register`` (from ``_isthmus_autoload.py``) names torch's one slot for outside devices "jax" and registers a fallback
kernel for all ops. The first op on the device calls that fallback, ``load`` imports JAX and registers every kernel
(``kernels/register.py``), and torch finds those from then on. ``load`` does all of it or nothing: a Ctrl-C in the
middle must not leave half of the kernels behind.

What can go wrong: another package has the slot; torch counts its devices at the process's first backward, so a device
registered later gets no gradients; a new torch lacks a private name (``_upstream.py`` says which).
"""

from __future__ import annotations

import functools
import sys
import threading
import warnings
from typing import Any

import torch
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

from _isthmus_autoload import create_process_group, make_room, rival
from isthmus._device.torch_glue import patches, private
from isthmus._upstream import DRIFT, not_available, require_jax, warn_if_unchecked
from isthmus.errors import RegistrationError

_lock = threading.RLock()
_state: dict[str, Any] = {}


def register() -> None:
    """Give torch the device "jax"; a second call does nothing.

    ``import isthmus`` calls it, and so does ``import torch`` where torch has no accelerator of its own. Call it
    yourself where ``torch.compile(backend="isthmus")`` for CUDA tensors loaded Isthmus first, which adds no device.
    ``isthmus.errors.RegistrationError`` is raised where another library has taken torch's one place for devices of this
    kind (PrivateUse1).

    Example:
        >>> import torch, isthmus
        >>> isthmus.register()
        >>> torch.zeros(2, device="jax").device.type
        'jax'
    """
    with _lock:
        if "library" in _state:
            return
        _check_first()
        _state["with torch"] = getattr(torch.__spec__, "_initializing", False)
        from isthmus._device.torch_glue import (
            autocast,
            generators,
            scripted,
            storage_patches,
            streams,
            torch_jax,
        )

        _state["guard"] = _Guard()
        make_room()
        _setup_privateuseone_for_python_backend(
            "jax", backend_module=torch_jax, hook=_Hooks(), device_guard=_state["guard"]
        )
        torch.backends.jax = torch_jax.backends  # type: ignore[attr-defined]
        sys.modules["torch.backends.jax"] = torch_jax.backends
        _state["library"] = library = torch.library.Library("_", "IMPL")
        library.fallback(_load_then_call, "PrivateUse1")
        for key, kind in _OTHER_LAYOUTS.items():
            library.fallback(functools.partial(_load_then_refuse, kind), key)
        private.hide_from_dynamo(_load_then_call)
        private.hide_from_dynamo(_load_then_refuse)
        private.hide_from_dynamo(_Guard.type_)
        _state["pass autocast"] = autocast.allow()
        storage_patches.install_on_import()
        generators.install()
        streams.install()
        # As on the CPU: float16 would need a gradient scaler. torch keeps the default per thread, so threads started
        # by the user have torch's own, float16.
        torch.set_autocast_dtype("jax", torch.bfloat16)
        scripted.install_loading()
        _serve_accelerator()
        _serve_process_groups()
        _warn_of_rival()


def _warn_of_rival() -> None:
    accelerator = rival()
    if accelerator is not None:
        warnings.warn(
            f"device 'jax' takes this process's place for an accelerator: backward() of a {accelerator!r} tensor may "
            f"now fail inside torch; train on {accelerator!r} in a process that does not import isthmus",
            stacklevel=3,
        )


class _Hooks(torch._C._acc.PrivateUse1Hooks):
    def is_available(self) -> bool:
        return True

    def has_primary_context(self, device_index: int) -> bool:
        return True

    def is_built(self) -> bool:
        return True


_TYPE = torch._C._autograd.DeviceType.PrivateUse1


class _Guard(torch._C._acc.DeviceGuard):
    """What C++ asks for the device's type, once per recorded op and several times per op of backward."""

    def type_(self) -> Any:  # until ``engine_errors`` knows better
        return _TYPE


def _check_first() -> None:
    name = torch._C._get_privateuse1_backend_name()
    if name not in ("privateuseone", "jax"):
        raise RegistrationError(
            f"torch's one slot for a device from outside is already taken by {name!r}, so 'jax' cannot be "
            f"added; uninstall that package or set TORCH_DEVICE_BACKEND_AUTOLOAD=0 and import only isthmus"
        )


def _load_then_call(op: Any, *args: Any, **kwargs: Any) -> Any:
    """Answer the first call on the device by loading JAX and every kernel, then what nothing else answers."""
    load()
    from isthmus._device.kernels import register

    return register.call(op, *args, **kwargs)


_OTHER_LAYOUTS = {
    "SparsePrivateUse1": "sparse tensors, on the CPU neither",
    "SparseCsrPrivateUse1": "sparse tensors of compressed layouts, on the CPU neither",
    "QuantizedPrivateUse1": "torch.ao's quantized dtypes on 'jax'; torchao's quantized tensors work, and so does "
    "dequantize() on the CPU",
}
"""What the ops are called for that have no kernel under these dispatch keys."""


def _load_then_refuse(kind: str, op: Any, *args: Any, **kwargs: Any) -> Any:
    """Answer a first call on the device, which is one of a sparse tensor, by loading; refuse what has no kernel."""
    if "autocast" not in _state:
        load()
        return op(*args, **kwargs)
    raise NotImplementedError(f"{op} has no kernel for {kind}")


def load() -> None:
    """Load JAX and every kernel, all of it or nothing: after a failure or Ctrl-C the next call starts anew."""
    _check_in_time()
    if "autocast" in _state:
        return
    require_jax()
    with _lock:
        if "autocast" in _state:
            return  # another thread was first
        before = set(sys.modules)
        try:
            from isthmus._device.kernels import register  # noqa: F401
            from isthmus._device.torch_glue import (
                autocast,
                default_backend,
                engine_errors,
                op_modes,
                processes,
                scripted,
                storage_patches,
                torch_profiler,
            )
            from isthmus._runtime import forks

            _try_device()
            forks.watch()
            engine_errors.install(_state["guard"], _TYPE)
            processes.install()
            storage_patches.install()
            default_backend.install()
            torch_profiler.install()
            op_modes.install()
            scripted.install_saving()
            private.allow_flex_attention()
            library = autocast.install()
        except BaseException as error:
            _unload(before)
            if isinstance(error, DRIFT):
                raise not_available(error) from error
            raise
        _state["autocast"] = library  # last: it says that all is there
        warn_if_unchecked()


def _try_device() -> None:
    """Make a tensor and look at the device's type, so that a torch which changed either says so here, in one place."""
    if private.empty_tensor((1,), torch.float32).device.type != "jax":
        raise TypeError("torch._C._acc.create_empty_tensor makes tensors of another device")
    if type(_TYPE).__name__ != "DeviceType":
        raise TypeError("torch._C._autograd.DeviceType.PrivateUse1 is not what it was")


def _unload(before: set[str]) -> None:
    """Forget the modules of this package that were imported since, and with them the kernels they registered.

    A module half imported would otherwise meet what its first half has filed: "already has a lowering".
    """
    for name in [name for name in sys.modules if name.startswith("isthmus.") and name not in before]:
        parent, _, child = name.rpartition(".")
        # A library takes its ops and kernels back when it is freed, but the traceback still holds the module.
        for value in list(vars(sys.modules[name]).values()):
            for library in value.values() if isinstance(value, dict) else (value,):
                if isinstance(library, torch.library.Library):
                    library._destroy()
        del sys.modules[name]
        # ``from package import child`` asks the package first, which still has it.
        if parent in sys.modules and hasattr(sys.modules[parent], child):
            delattr(sys.modules[parent], child)


def _check_in_time() -> None:
    """Raise unless autograd knows the device: it counts the devices once, at the process's first backward."""
    if "in time" not in _state:
        # While torch is still being imported, backward cannot have been called.
        _state["in time"] = _state["with torch"] or _backward_reaches_device()
    if not _state["in time"]:
        raise RegistrationError(
            "device 'jax' was registered after this process's first backward(), when torch had already "
            "counted its devices, so no gradient could flow through it\n"
            "  to fix it    import isthmus before the first backward(), or leave "
            "TORCH_DEVICE_BACKEND_AUTOLOAD unset so that `import torch` does it"
        )


def _backward_reaches_device() -> bool:
    """Return whether a backward through a tensor of the device finds its queue; needs no JAX."""
    empty = torch._C._acc.create_empty_tensor

    class Pass(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return empty((1,), torch.float32)

        @staticmethod
        def backward(ctx: Any, *grads: torch.Tensor) -> torch.Tensor:
            return grads[0]

    with torch.inference_mode(False), torch.enable_grad(), torch.autograd.set_multithreading_enabled(True):
        x = empty((1,), torch.float32).requires_grad_()
        try:
            torch.autograd.grad(Pass.apply(x), x, empty((1,), torch.float32))
        except RuntimeError:
            return False
    return True


def _serve_accelerator() -> None:
    """Answer what ``torch.accelerator`` asks C++ for, where a device in Python has nothing to register."""
    from isthmus._device.torch_glue import device_memory, streams, torch_jax

    for name, ours in {
        # False lets torch answer by itself that nothing is allocated, without loading JAX.
        "_accelerator_isAllocatorInitialized": lambda: "isthmus._device.kernels.register" in sys.modules,
        "_accelerator_emptyCache": device_memory.empty_cache,
        "_accelerator_emptyHostCache": device_memory.empty_host_cache,
        "_accelerator_getDeviceStats": device_memory.memory_stats,
        "_accelerator_resetAccumulatedStats": device_memory.reset_accumulated_memory_stats,
        "_accelerator_resetPeakStats": device_memory.reset_peak_memory_stats,
        "_accelerator_getMemoryInfo": device_memory.get_memory_info,
        "_accelerator_getDeviceCapability": torch_jax.get_device_capability,
        "_accelerator_synchronizeDevice": torch_jax.synchronize,
        "_accelerator_getStream": streams.current_stream,
        "_accelerator_setStream": streams.set_stream,
    }.items():
        patches.replace("torch._C", name, functools.partial(_instead, ours))


def _serve_process_groups() -> None:
    """Let ``init_process_group()`` find a backend for the device; the group itself is loaded when one is made."""
    if torch.distributed.is_available():
        backends = torch.distributed.Backend
        backends.register_backend("jax", create_process_group, extended_api=True, devices=["jax", "cpu"])


def _instead(ours: Any, theirs: Any) -> Any:
    """Return ours: where this device is registered, it is the accelerator, and torch's function is for no other."""
    return ours
