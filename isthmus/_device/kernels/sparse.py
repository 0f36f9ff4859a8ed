"""Sparse tensors of the device: COO, CSR, CSC and blocks, of torch's own C++ classes, with indices and values on "jax".

torch keeps a sparse tensor as a C++ object that holds dense tensors, whatever their device::

    s = torch.sparse_coo_tensor(indices, values, (4, 4), device="jax")
    s._indices(), s._values()      # plain "jax" tensors with buffers; ``s`` itself has no storage

Every op that has a kernel for sparse CPU tensors gets one of three for the device's:

- ``TORCHS_COO``, ``TORCHS_COMPRESSED``: torch's own C++ kernel, where it only calls other ops on indices and values.
  These are kernels that torch itself uses for the CPU and for CUDA alike; what they call comes back to the device.
- ``sparse_coo.py``, ``sparse_csr.py``: kernels written in dense ops, where torch's reads memory.
- The CPU, for the rest: counted and warned about, as everywhere (``core/fallback.py``).

Lazy mode records the dense ops. A compiled graph has no sparse tensors: Dynamo breaks the graph there.

What can go wrong: a kernel of torch's reads memory, and a "jax" tensor has none. test_sparse.py runs every name.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

from isthmus._device.checks import ask_cpu
from isthmus._device.core import fallback
from isthmus._device.core.dispatch import kernel_for
from isthmus._device.kernels import sparse_coo, sparse_csr
from isthmus._device.kernels.sparse_coo import DEFER
from isthmus._device.torch_glue.private import has_kernel, names_with_kernel, redispatch
from isthmus._graph.arguments import tensors_in
from isthmus._graph.names import Missing, overload_named
from isthmus._graph.private import OpOverload
from isthmus._graph.schema import schema_of
from isthmus.errors import MissingLowering


def _names(text: str) -> tuple[str, ...]:
    return tuple(text.split())


# Functions that are 0 at 0, which keep the pattern: each with its in-place form and its ``out=``.
ZERO_AT_ZERO = _names(
    "abs asin asinh atan atanh ceil deg2rad erf erfinv expm1 floor frac log1p neg rad2deg round sgn sign sin sinh "
    "sqrt tan tanh trunc"
)
_BOTH = tuple(f"{name}{form}" for name in ZERO_AT_ZERO for form in ("", "_", ".out")) + _names(
    "add.Tensor add_.Tensor clone conj_physical.out copy_ dense_dim empty.memory_format empty_like isinf isnan "
    "isneginf isneginf.out isposinf isposinf.out is_pinned mm mm.out mul.Tensor mul_.Tensor _nnz relu relu_ "
    "resize_as_sparse_ signbit signbit.out sparse_dim sum sum.dim_IntList threshold_backward "
    "threshold_backward.grad_input _to_dense _to_sparse _to_sparse_bsc _to_sparse_bsr values zero_"
)
TORCHS_COO = _BOTH + _names(
    "any cat _coalesced_ copy_sparse_to_sparse_ _dimI _dimV div.Tensor div_.Tensor div.out div.Tensor_mode "
    "div_.Tensor_mode div.out_mode floor_divide floor_divide_.Tensor floor_divide.out indices _indices is_coalesced mv "
    "nan_to_num nan_to_num_ nan_to_num.out narrow_copy native_norm native_norm.ScalarOpt_dim_dtype norm.ScalarOpt_dim "
    "norm.ScalarOpt_dim_dtype permute pow.Tensor_Scalar pow.Tensor_Scalar_out _sparse_broadcast_to "
    "_sparse_coo_tensor_with_dims _sparse_coo_tensor_with_dims_and_tensors sparse_resize_ sparse_resize_and_clear_ "
    "sub.Tensor sub_.Tensor sub.out _to_sparse_csc _to_sparse_csr unsqueeze _values view_as_complex "
    "view_as_real zeros.out"
)
TORCHS_COMPRESSED = _BOTH + _names(
    "addmm angle angle.out ccol_indices col_indices _conj_physical conj_physical_ crow_indices fill_.Scalar mul.out "
    "mul.Scalar mul_.Scalar normal_ resize_ row_indices select.int select_copy.int sparse_mask "
    "_to_sparse.sparse_dim"
)
TORCHS_DENSE = tuple(f"_to_sparse{form}" for form in ("", ".sparse_dim", "_csr", "_csc", "_bsr", "_bsc"))


def kernels() -> Iterator[tuple[OpOverload, Callable[..., Any], str]]:
    """Return every kernel for sparse tensors, with its op and its dispatch key."""
    for theirs, ours, names, own in (
        ("SparseCPU", "SparsePrivateUse1", TORCHS_COO, sparse_coo.KERNELS),
        ("SparseCsrCPU", "SparseCsrPrivateUse1", TORCHS_COMPRESSED, sparse_csr.KERNELS),
        ("CPU", "PrivateUse1", TORCHS_DENSE, {}),
    ):
        # Names of every sparse CPU kernel that torch has: those without ours go to the CPU.
        every = names_with_kernel(theirs) if theirs != "CPU" else []
        for name in dict.fromkeys((*names, *own, *(name.removeprefix("aten::") for name in every))):
            op = overload_named(f"aten::{name}")
            # A name of another torch version is skipped.
            if not isinstance(op, Missing) and has_kernel(op, theirs):
                yield op, _kernel(op, own.get(name), theirs if name in names else None), ours


def _kernel(op: OpOverload, own: Callable[..., Any] | None, theirs: str | None) -> Callable[..., Any]:
    """Return the kernel that asks ours, then torch's, then the CPU, of those that there are."""
    schema = schema_of(op)
    tensors = [n for n, argument in enumerate(schema.arguments) if argument.kind == "tensor"]

    def run(*args: Any, **kwargs: Any) -> Any:
        # ``DEFER`` is for calls that torch's kernel does better.
        result = DEFER if own is None else own(*args, **kwargs)
        if result is DEFER and theirs is not None:
            # torch's kernels do not take a number from Python where the user gave one instead of a tensor.
            if not any(isinstance(args[n], _NUMBERS) for n in tensors if n < len(args)):
                return redispatch(op, theirs, *args, **kwargs)
        elif result is not DEFER and result is not NotImplemented:
            return result
        return _on_cpu(op, schema.ordered(args, kwargs))

    return run


_NUMBERS = (bool, int, float, complex)


def _on_cpu(op: OpOverload, values: tuple[Any, ...]) -> Any:
    for tensor in tensors_in(values):
        if tensor.device.type != "jax" and tensor.dim():
            raise RuntimeError(
                f"Expected all tensors to be on the same device, but found at least two devices, jax:0 and "
                f"{tensor.device}!"
            )
    try:
        return fallback.run(op, values, "nothing lowers it for sparse tensors")
    except MissingLowering:
        ask_cpu.raise_cpu_error(op, values)  # what the CPU refuses as well is refused in its words
        raise


def _embedding_bag_backward(*args: Any, **kwargs: Any) -> Any:
    """Return the gradient of a table of embeddings; a sparse one has torch's composite of other ops."""
    arguments = schema_of(_bag_backward).bind(args, kwargs)
    if not arguments["sparse"]:
        return _dense_bag_backward(*args, **kwargs)
    names = [argument.name for argument in schema_of(_aten._embedding_bag_sparse_backward.default).arguments]
    return _aten._embedding_bag_sparse_backward(*(arguments[name] for name in names))


_aten = torch.ops.aten
_bag_backward = _aten._embedding_bag_backward.default
_dense_bag_backward = kernel_for(_bag_backward)
KERNELS = {"_embedding_bag_backward": _embedding_bag_backward}
"""Kernels of dense tensors."""
