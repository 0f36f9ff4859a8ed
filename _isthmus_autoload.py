"""What torch finds by entry points: ``import torch`` adds the device "jax", unless that would cost it another one.

A device from outside takes torch's one place for an accelerator. From then on autograd asks it for the streams
of every device, and ``backward()`` of a CUDA tensor dies in an internal assert (torch 2.11). So where torch
has an accelerator of its own, only ``import isthmus`` or ISTHMUS_AUTOLOAD=1 adds the device; with ISTHMUS_AUTOLOAD=0
only ``import isthmus`` does, on every machine.
"""

from __future__ import annotations

import contextlib
import os
import sys
import warnings
from collections.abc import Iterator
from contextvars import ContextVar
from types import ModuleType
from typing import Any

import torch


def rival() -> str | None:
    """Return the accelerator this torch can use here, or None; nothing is initialised to find out."""
    if torch.version.cuda and (sys.platform != "linux" or _exists("/dev/nvidiactl", "/dev/dxg")):
        return "cuda"
    if torch.version.hip and _exists("/dev/kfd"):
        return "cuda"
    if getattr(torch.version, "xpu", None) and (sys.platform != "linux" or _exists("/dev/dri")):
        return "xpu"
    return "mps" if torch.backends.mps.is_built() else None


def _exists(*paths: str) -> bool:
    return any(os.path.exists(path) for path in paths)


def wanted() -> bool:
    """Return whether ``import torch`` is to add the device: where nothing is lost by it, or as the environment says."""
    asked = os.environ.get("ISTHMUS_AUTOLOAD", "")
    if asked not in ("", "0", "1"):
        warnings.warn(
            f"ISTHMUS_AUTOLOAD={asked!r} is ignored: ISTHMUS_AUTOLOAD takes '0' or '1'; by default `import torch` adds "
            f"the device 'jax' where torch has no accelerator of its own",
            stacklevel=3,
        )
    return asked == "1" or (asked != "0" and rival() is None)


def run() -> None:
    """Register the device if it is wanted.

    A torch that Isthmus does not fit must still be importable, by people who may not even use the device.
    """
    if not wanted():
        return
    try:
        import isthmus  # noqa: F401
    except Exception as error:
        warnings.warn(f"device 'jax' is not available: {error}", stacklevel=2)
        _refuse_uses(error)


class _Absent(ModuleType):
    """``torch.jax`` where the device is not available: torch initialises a device before its first use."""

    def __init__(self, error: Exception) -> None:
        super().__init__("torch.jax", "The device 'jax', which is not available.")
        self._error = (type(error), str(error))

    def is_available(self) -> bool:
        return False

    def device_count(self) -> int:
        return 0

    def _lazy_init(self) -> None:
        kind, message = self._error
        raise kind(message)


def _refuse_uses(error: Exception) -> None:
    """Let every use of the device say why it is not available.

    torch would not know the name "jax", and say that a device may be called "cpu", "cuda" and so on.
    """
    try:
        if torch._C._get_privateuse1_backend_name() == "privateuseone":
            torch.utils.rename_privateuse1_backend("jax")  # type: ignore[attr-defined]
            torch._register_device_module("jax", _Absent(error))
    except Exception:  # a torch of any age: where it has other names for these, it knows no "jax"
        return


def create_process_group(options: Any, backend_options: Any = None) -> Any:
    """Make a group of ``torch.distributed``'s backend "jax", for ``init_process_group`` and ``new_group``."""
    from isthmus import _upstream

    _upstream.require_jax()
    from isthmus._distributed.group import create

    return create(options)


def make_room() -> None:
    """Take back what says that there is no device: there is one now."""
    if isinstance(getattr(torch, "jax", None), _Absent):
        del torch.jax, sys.modules["torch.jax"]  # type: ignore[attr-defined]


_adds_device = ContextVar("whether importing isthmus adds the device", default=True)


def adds_device() -> bool:
    """Return whether an import of ``isthmus`` that is under way adds the device."""
    return _adds_device.get()


@contextlib.contextmanager
def backend_alone() -> Iterator[None]:
    """Let imports in this block add no device where torch has an accelerator of its own.

    ``torch.compile(backend="isthmus")`` of CUDA tensors needs the package, and not the device, which would cost torch
    its own.
    """
    token = _adds_device.set(rival() is None)
    try:
        yield
    finally:
        _adds_device.reset(token)


def __getattr__(name: str) -> Any:
    """Load the backend when torch looks it up, before it traces anything, and without a device torch would pay for."""
    if name != "backend":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    with backend_alone():
        from isthmus import _upstream

        _upstream.require_jax()
        from isthmus._dynamo.backend import isthmus
    return isthmus
