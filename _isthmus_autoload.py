"""What torch finds by entry points: ``import torch`` adds the device "jax", unless that would cost it another one.

A device from outside takes torch's one place for an accelerator. From then on autograd asks it for the streams
of every device, and ``backward()`` of a CUDA tensor dies in an internal assert (torch 2.11). So where torch
has an accelerator of its own, only ``import isthmus`` or ISTHMUS_AUTOLOAD=1 adds the device.
"""

from __future__ import annotations

import os
import sys
import warnings
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


def run() -> None:
    """Register the device if nothing is lost by it.

    A torch that Isthmus does not fit must still be importable, by people who may not even use the device.
    """
    if rival() is None or os.environ.get("ISTHMUS_AUTOLOAD") == "1":
        try:
            import isthmus  # noqa: F401
        except Exception as error:
            warnings.warn(f"device 'jax' is not available: {error}", stacklevel=2)


asked_for = True
"""Whether whoever imports ``isthmus`` wants the device; the backend for tensors of other devices does not."""


def __getattr__(name: str) -> Any:
    """Load the backend when torch looks it up, before it traces anything, and without a device torch would pay for."""
    global asked_for
    if name != "backend":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    asked_for = rival() is None
    try:
        from isthmus._dynamo.backend import isthmus
    finally:
        asked_for = True
    return isthmus
