"""``torch.autocast("jax")``: which ops run in the low precision, which in float32, which in the widest given.

The lists are torch's for CUDA (docs: "Automatic Mixed Precision package", Autocast Op Reference).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from isthmus._device.torch_glue.private import without_autocast
from isthmus._graph.arguments import tensors_in
from isthmus._graph.private import OpOverload
from isthmus._graph.schema import schema_of

LOW_PRECISION = (
    "_convolution", "_convolution.deprecated", "conv1d", "conv2d", "conv3d", "conv_tbc",
    "conv_transpose1d", "conv_transpose2d.input", "conv_transpose3d.input", "convolution", "prelu",
    "addmm", "addmv", "addr", "matmul", "einsum", "mm", "mv", "linalg_vecdot", "linear", "addbmm",
    "baddbmm", "bmm", "chain_matmul", "linalg_multi_dot", "_thnn_fused_lstm_cell", "_thnn_fused_gru_cell",
    "lstm_cell", "gru_cell", "rnn_tanh_cell", "rnn_relu_cell", "scaled_dot_product_attention",
    "lstm.input", "gru.input", "rnn_tanh.input", "rnn_relu.input",
)  # fmt: skip
FLOAT32 = (
    "acos", "asin", "cosh", "erfinv", "exp", "expm1", "log", "log10", "log2", "log1p", "reciprocal",
    "rsqrt", "sinh", "tan", "pow.Tensor_Scalar", "pow.Tensor_Tensor", "pow.Scalar", "softplus",
    "layer_norm", "native_layer_norm", "rms_norm", "group_norm", "norm.Scalar", "norm.ScalarOpt_dim",
    "frobenius_norm.dim", "nuclear_norm", "nuclear_norm.dim", "cosine_similarity", "poisson_nll_loss",
    "cosine_embedding_loss", "nll_loss", "nll_loss2d", "hinge_embedding_loss", "kl_div", "l1_loss",
    "smooth_l1_loss", "huber_loss", "mse_loss", "margin_ranking_loss", "multilabel_margin_loss",
    "soft_margin_loss", "triplet_margin_loss", "multi_margin_loss", "binary_cross_entropy_with_logits",
    "dist", "pdist", "cdist", "renorm", "logsumexp", "upsample_nearest1d", "_upsample_nearest_exact1d",
    "upsample_nearest2d", "_upsample_nearest_exact2d", "upsample_nearest3d", "_upsample_nearest_exact3d",
    "upsample_linear1d", "upsample_bilinear2d", "_upsample_bilinear2d_aa", "upsample_trilinear3d",
    "upsample_bicubic2d", "_upsample_bicubic2d_aa",
)  # fmt: skip
FLOAT32_UNLESS_GIVEN = (
    "prod", "prod.dim_int", "softmax.int", "log_softmax.int", "cumprod", "cumsum", "linalg_vector_norm",
    "linalg_matrix_norm", "linalg_matrix_norm.str_ord", "sum", "sum.dim_IntList",
)  # fmt: skip
WIDEST = (
    "addcdiv", "addcmul", "atan2", "bilinear", "cross", "dot", "vdot", "grid_sampler", "index_put",
    "tensordot", "scatter_add", "cat", "stack",
)  # fmt: skip


def allow() -> torch.library.Library:
    """Let every op pass through autocast; torch itself refuses what has no policy on this device."""
    library = torch.library.Library("_", "IMPL")
    # ``fallthrough``: ops without a policy run in the dtypes that they are called with.
    library.fallback(torch.library.fallthrough_kernel, "AutocastPrivateUse1")
    return library


def install() -> torch.library.Library:
    """Register every policy with torch and return the library that holds the registrations."""
    library = torch.library.Library("aten", "IMPL")
    for names, policy in (
        (LOW_PRECISION, _low_precision),
        (FLOAT32, _float32),
        (FLOAT32_UNLESS_GIVEN, _float32_unless_given),
        (WIDEST, _widest),
        (("binary_cross_entropy",), _refuse),
    ):
        for name in names:
            op = _find(name)
            if op is not None:
                library.impl(name, policy(op), "AutocastPrivateUse1")
    return library


def _find(name: str) -> OpOverload | None:
    packet, _, overload = name.partition(".")
    return getattr(getattr(torch.ops.aten, packet, None), overload or "default", None)


def _low_precision(op: OpOverload) -> Callable[..., Any]:
    return _casting(op, lambda args: torch.get_autocast_dtype("jax"))


def _float32(op: OpOverload) -> Callable[..., Any]:
    return _casting(op, lambda args: torch.float32)


def _widest(op: OpOverload) -> Callable[..., Any]:
    def widest(values: Any) -> torch.dtype:
        # One float32 argument makes the op run in float32.
        has_float32 = any(t.dtype == torch.float32 for t in _eligible(values))
        return torch.float32 if has_float32 else torch.get_autocast_dtype("jax")

    return _casting(op, widest)


def _casting(op: OpOverload, choose: Callable[[Any], torch.dtype]) -> Callable[..., Any]:
    def kernel(*args: Any, **kwargs: Any) -> Any:
        dtype = choose((*args, *kwargs.values()))
        # Without autocast, or the call would come here again.
        with without_autocast():
            return op(*[_cast(a, dtype) for a in args], **{k: _cast(v, dtype) for k, v in kwargs.items()})

    return kernel


def _float32_unless_given(op: OpOverload) -> Callable[..., Any]:
    index = next(a.position for a in schema_of(op).arguments if a.name == "dtype")

    def kernel(*args: Any, **kwargs: Any) -> Any:
        dtype = kwargs.get("dtype") or (args[index] if index < len(args) else None)
        # A given dtype is the user's word, which autocast does not overrule.
        if dtype is None and _eligible(args[:1]):
            args, kwargs = args[:index], {**kwargs, "dtype": torch.float32}
        with without_autocast():
            return op(*args, **kwargs)

    return kernel


def _refuse(op: OpOverload) -> Callable[..., Any]:
    def kernel(*args: Any, **kwargs: Any) -> Any:
        raise RuntimeError(
            "torch.nn.functional.binary_cross_entropy and torch.nn.BCELoss are unsafe to autocast.\n"
            "Many models use a sigmoid layer right before the binary cross entropy layer.\n"
            "In this case, combine the two layers using "
            "torch.nn.functional.binary_cross_entropy_with_logits\n"
            "or torch.nn.BCEWithLogitsLoss.  binary_cross_entropy_with_logits and BCEWithLogits are\n"
            "safe to autocast."
        )

    return kernel


def _takes_part(value: Any) -> bool:
    if not isinstance(value, torch.Tensor) or value.device.type != "jax":
        # Other devices have autocasts of their own, and float64 and integers are never cast.
        return False
    return value.is_floating_point() and value.dtype != torch.float64


def _eligible(values: Any) -> list[torch.Tensor]:
    return [tensor for tensor in tensors_in(values) if _takes_part(tensor)]


def _cast(value: Any, dtype: torch.dtype) -> Any:
    if isinstance(value, (list, tuple)):
        return [_cast(item, dtype) for item in value]
    return value.to(dtype) if _takes_part(value) else value
