"""A user's assertions on values: raised at the call on the CPU, at the next host read elsewhere."""

from __future__ import annotations

from torch import Tensor

from isthmus._device import checks
from isthmus._device.transfer import array_of


def assert_async(
    self: Tensor, assert_msg: str = "Expected Tensor with single nonzero value, but got zero"
) -> None:
    """Raise unless the one element of ``self`` is true."""
    if self.numel() != 1:
        raise RuntimeError("Boolean value of Tensor with more than one value is ambiguous")
    checks.demand(array_of(self), RuntimeError, assert_msg)


KERNELS = {"_assert_async": assert_async, "_assert_async.msg": assert_async}
