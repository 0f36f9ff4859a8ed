"""Every private API of JAX that Isthmus uses; checked on JAX 0.10 and 0.11 by tests/test_private.py."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax._src.core import trace_state_clean as trace_state_clean  # false while JAX traces on this thread
from jax._src.interpreters import partial_eval

# JAX keeps the code of all callers with what it makes, to tell where that came from; under this guard it does not.
# Dynamo frees a compiled function when the code it made for it dies, so the function's own arrays must not keep it.
forgetting_callers = getattr(partial_eval, "TracebackScope", contextlib.nullcontext)


def fast_call(compiled: jax.stages.Compiled) -> Callable[..., Any]:
    """Return the cheapest way to call ``compiled``: JAX's C++ path where it has one."""
    executable, params = getattr(compiled, "_executable", None), getattr(compiled, "_params", None)
    create = getattr(executable, "create_cpp_call", None)
    call = create(params) if create is not None and params is not None else None
    return call if call is not None else compiled


def is_traced(values: Sequence[Any]) -> bool:
    """Return whether any of ``values`` is a JAX tracer."""
    return any(isinstance(value, jax.core.Tracer) for value in values)


def without_dead_code(jaxpr: Any) -> Any:
    """Return a jaxpr without the equations that no result needs, and with all its arguments."""
    return partial_eval.dce_jaxpr(jaxpr, [True] * len(jaxpr.outvars), instantiate=True)[0]


def prunes(primitive: Any) -> None:
    """Let JAX drop results of a primitive that nothing needs; its one parameter is the jaxpr it computes."""

    def prune(used: list[bool], equation: Any) -> Any:
        if not any(used):
            return [False] * len(equation.invars), None
        whole = equation.params["jaxpr"]
        jaxpr, needed = partial_eval.dce_jaxpr(whole.jaxpr, used)
        left = equation.replace(
            invars=[v for v, need in zip(equation.invars, needed, strict=True) if need],
            outvars=[v for v, need in zip(equation.outvars, used, strict=True) if need],
            params={"jaxpr": whole.replace(jaxpr=jaxpr)},
        )
        return needed, left

    partial_eval.dce_rules[primitive] = prune


def is_tracing() -> bool:
    """Return whether JAX is tracing on this thread."""
    return not trace_state_clean()


def cudnn_attention(query: Any, key: Any, value: Any, is_causal: bool, scale: float) -> tuple[Any, Any]:
    """Return attention by cuDNN's kernel and the logarithms of its sums; lengths come before heads.

    JAX's public function rounds those sums to the dtype of the result, which is too coarse for the gradients.
    """
    from jax._src.cudnn import fused_attention_stablehlo as cudnn

    mask = cudnn.MaskType.CAUSAL if is_causal else cudnn.MaskType.NO_MASK
    out, sums = cudnn.dot_product_attention(
        query, key, value, scale=scale, mask_type=mask, return_residual=True
    )
    return out, sums


def cudnn_attention_gradients(
    grad: Any, query: Any, key: Any, value: Any, out: Any, sums: Any, is_causal: bool, scale: float
) -> tuple[Any, Any, Any]:
    """Return the gradients of ``cudnn_attention`` for query, key and value, given what it returned."""
    from jax._src.cudnn import fused_attention_stablehlo as cudnn

    nothing = jax.numpy.zeros(0, query.dtype)
    found = cudnn._dot_product_attention_bwd_p_wrapper.bind(
        query,
        key,
        value,
        *[nothing] * 7,
        sums,
        out,
        grad,
        scale=scale,
        seed=42,
        dropout_rate=0.0,
        variadic_args=(False, False),
        mask_type=cudnn.MaskType.CAUSAL if is_causal else cudnn.MaskType.NO_MASK,
        layout=cudnn.AttentionLayout.BTNH.value,
        sliding_window_length=None,
    )
    return tuple(found[:3])
