"""A user's assertions on values: raised at the call on the CPU, at the next host read elsewhere.

``torch._assert_async`` and the checks of ``torch.linalg`` would otherwise wait for the device at every call.
"""

from __future__ import annotations

import torch
from torch import Tensor

from isthmus._device.checks import value_checks
from isthmus._device.core.buffer import buffer_of
from isthmus._device.core.transfers import array_of


def assert_async(
    self: Tensor, assert_msg: str = "Expected Tensor with single nonzero value, but got zero"
) -> None:
    """Raise unless the one element of ``self`` is true."""
    if self.numel() != 1:
        raise RuntimeError("Boolean value of Tensor with more than one value is ambiguous")
    # On accelerators the code is read with the next value, not here.
    failed = self.detach().logical_not().reshape(())
    value_checks.demand(array_of(failed), RuntimeError, assert_msg)


def linalg_check_errors(info: Tensor, api_name: str, *, is_matrix: bool) -> None:
    """Raise if LAPACK's word on any matrix is not success; while JAX traces, what it computed is the answer."""
    # A tracer has no value to read, and JAX's own results are what torch's formula goes on with.
    if not buffer_of(info).signature.traced:
        torch.ops.aten._linalg_check_errors(info.cpu(), api_name, is_matrix=is_matrix)


KERNELS = {
    "_assert_async": assert_async,
    "_assert_async.msg": assert_async,
    "_linalg_check_errors": linalg_check_errors,
}
