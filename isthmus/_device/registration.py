"""What ``import torch`` runs: device, hooks and guard, without JAX; the rest loads with the first tensor."""

from __future__ import annotations

import threading
from typing import Any

import torch
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

from isthmus.errors import RegistrationError

_lock = threading.RLock()
_state: dict[str, Any] = {}


def register() -> None:
    """Give torch the device "jax"; a second call does nothing."""
    with _lock:
        if "library" in _state:
            return
        _check_first()
        from isthmus._device import module

        _setup_privateuseone_for_python_backend("jax", backend_module=module, hook=_Hooks(), device_guard=_Guard())
        _state["library"] = library = torch.library.Library("_", "IMPL")
        library.fallback(_load_then_call, "PrivateUse1")
        _patch_accelerator()


class _Hooks(torch._C._acc.PrivateUse1Hooks):
    def is_available(self) -> bool:
        return True

    def has_primary_context(self, device_index: int) -> bool:
        return True

    def is_built(self) -> bool:
        return True


class _Guard(torch._C._acc.DeviceGuard):
    def type_(self) -> Any:
        return torch._C._autograd.DeviceType.PrivateUse1


def _check_first() -> None:
    name = torch._C._get_privateuse1_backend_name()
    if name not in ("privateuseone", "jax"):
        raise RegistrationError(
            f"torch's one slot for a device from outside is already taken by {name!r}, so 'jax' cannot be added; "
            f"uninstall that package or set TORCH_DEVICE_BACKEND_AUTOLOAD=0 and import only isthmus"
        )
    if "jax" in torch._C._autograd.__dict__.get("_isthmus", ()):  # pragma: no cover
        return


def _load_then_call(op: Any, *args: Any, **kwargs: Any) -> Any:
    """Answer the first call on the device: load JAX and every kernel, then every call nothing else answers."""
    from isthmus._device import kernels

    return kernels.call(op, *args, **kwargs)


def _patch_accelerator() -> None:
    # torch.accelerator.synchronize asks the C++ guard, which Python cannot provide.
    from isthmus._device import module

    original = torch.accelerator.synchronize

    def synchronize(device: Any = None, /) -> None:
        """Wait for everything queued on the current accelerator."""
        if torch.device("jax" if device is None else device if not isinstance(device, int) else f"jax:{device}").type == "jax":
            module.synchronize()
        else:
            original(device)

    torch.accelerator.synchronize = synchronize
