"""pykeops: reductions of tensors on the device run on the CPU, as an op does that nothing lowers.

KeOps compiles a C++ function for each formula and calls it with addresses. It takes every device but CUDA for the CPU,
and a tensor of this device has no address there: without this change the process ends with a segmentation fault.
"""

from __future__ import annotations

import functools
from types import ModuleType
from typing import Any

import torch


def reduction(module: ModuleType) -> None:
    """Let KeOps compute on copies of the device's tensors and hand its result back on the device."""
    loader = module.LoadKeOps
    theirs = loader.genred

    @functools.wraps(theirs)
    def genred(
        self: Any, device_args: Any, ranges: Any, nx: Any, ny: Any, nbatchdims: Any, out: Any, *args: Any
    ) -> Any:
        if device_args.type != "jax":
            return theirs(self, device_args, ranges, nx, ny, nbatchdims, out, *args)
        from isthmus._device.core import fallback

        fallback.announce(
            f"pykeops {self.params.reduction_op}",
            {f"argument {number}": x for number, x in enumerate(args)},
            "KeOps reads memory by its address",
        )
        there = [part.cpu() for part in ranges] if ranges else ranges
        done = theirs(self, torch.device("cpu"), there, nx, ny, nbatchdims, None, *(x.cpu() for x in args))
        return done.to("jax") if out is None else out.copy_(done)

    # The same function under two names: autograd and the solver call the second.
    loader.genred = loader.genred_pytorch = genred


def takes() -> str:
    """Return the type of the device that tensors may be on."""
    from pykeops.common.keops_io.LoadKeOps import LoadKeOps

    return "jax" if getattr(LoadKeOps.genred, "__wrapped__", None) else "cpu"
