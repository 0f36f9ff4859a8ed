"""Foreach calls that one program cannot answer: lists of tensors on two devices, and numbers in a CPU vector.

The first are copied tensor by tensor; of the second the numbers are read and passed as a list.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from isthmus._device.checks import ask_cpu
from isthmus._device.core.dispatch import kernel_for
from isthmus._graph.names import aten


def copy_(self: list[Tensor], src: list[Tensor], non_blocking: bool = False) -> None:
    """Copy each source into its target: in one program if all of them are here."""
    if {t.device.type for t in self} == {t.device.type for t in src} == {"jax"}:
        kernel_for(aten._foreach_copy_.default)(self, src)
        return
    if len(self) != len(src):
        ask_cpu.raise_cpu_error(aten._foreach_copy_.default, (self, src, non_blocking))
    for target, source in zip(self, src, strict=True):
        target.copy_(source, non_blocking)


def _unpacked(packet: Any) -> Callable[..., Any]:
    """Return the ``Tensor`` overload of a foreach op: it takes its numbers from a vector on the CPU."""

    def call(self: list[Tensor], tensor1: list[Tensor], tensor2: list[Tensor], scalars: Tensor) -> Any:
        if scalars.device.type != "cpu":
            raise RuntimeError(f"Expected scalars to be on CPU, got {scalars.device} instead.")
        # One number per tensor; the CPU has the words for any other length.
        if scalars.dim() != 1 or scalars.numel() != len(self):
            ask_cpu.raise_cpu_error(packet.Tensor, (self, tensor1, tensor2, scalars))
        return packet.ScalarList(self, tensor1, tensor2, scalars.tolist())

    return call


KERNELS: dict[str, Callable[..., Any]] = {"_foreach_copy_": copy_} | {
    f"{name}.Tensor": _unpacked(getattr(aten, name))
    for name in ("_foreach_addcmul", "_foreach_addcmul_", "_foreach_addcdiv", "_foreach_addcdiv_")
}
