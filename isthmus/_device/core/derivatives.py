"""Derivatives of ops inside JAX's transformations, where JAX would differentiate their lowerings otherwise than torch.

JAX differentiates a lowering primitive by primitive. At kinks, at zero, and for symmetric matrices the result differs
from torch's choice; some lowerings have no derivative at all. For these ops (``BY_TORCH``) the derivative is torch's
own backward formula: it is linear in the incoming gradient, so JAX transposes it for forward mode. ``plan.Builder``
wraps a tier in ``differentiable`` where buffers hold tracers::

    jax.grad(lambda x: functional_relu(x).sum())(0.)       # 0.0, torch's choice; JAX's own for max(x, 0) is 0.5

``Call`` is one such call as a ``custom_jvp`` (or ``custom_vjp``, for formulas that JAX cannot transpose): its rule runs
the op once more on tensors that hold the tracers, and asks torch's autograd for the gradient.

A new op belongs into ``BY_TORCH`` if tests/interop/test_gradients_in_jax.py finds another gradient than torch's.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch

from isthmus._device.core.buffer import wrap
from isthmus._device.core.decompose import to_arrays
from isthmus._device.torch_glue.private import above_autograd
from isthmus._graph.arguments import flatten
from isthmus._graph.names import aten
from isthmus._graph.private import OpOverload
from isthmus._graph.schema import schema_of
from isthmus._ops.common import Number, linear
from isthmus._ops.value_checks import Checks, collecting, require
from isthmus._runtime.dtypes import to_torch_dtype
from isthmus._runtime.mesh_axes import varying_alike

Array = Any
Tier = Callable[[dict[str, Any]], Any]
BY_TORCH = {
    # JAX splits the gradient where two sides meet, or gives it to one of them.
    aten.abs.default, aten.clamp.default, aten.clamp.Tensor, aten.clamp_max.default, aten.clamp_max.Tensor,
    aten.clamp_min.default, aten.clamp_min.Tensor, aten.hardsigmoid.default, aten.hardswish.default,
    aten.hardtanh.default, aten.relu.default, aten.relu6.default, aten.div.Tensor_mode, aten.div.Scalar_mode,
    aten.copysign.Tensor, aten.copysign.Scalar, aten.fmax.default, aten.fmin.default,
    aten.log_sigmoid_forward.default,
    # At zero, one or infinity JAX finds nan, torch a limit or zero.
    aten._cdist_forward.default, aten._linalg_det.default, aten.atan2.default,
    aten.binary_cross_entropy.default, aten.binary_cross_entropy_with_logits.default, aten.digamma.default,
    aten.hypot.default, aten.i0.default, aten.lgamma.default, aten.linalg_lu.default, aten.linalg_vector_norm.default,
    aten.logit.default, aten.polygamma.default, aten.pow.Scalar, aten.pow.Tensor_Scalar, aten.pow.Tensor_Tensor,
    aten.special_entr.default, aten.special_ndtri.default, aten.std.correction, aten.std_mean.correction,
    # A symmetric matrix has its gradient in one triangle, or in both.
    aten.cholesky.default, aten.linalg_cholesky_ex.default, aten._linalg_eigh.default, aten.linalg_eig.default,
    # Indices inside: what they are does not change with the values, which JAX does not know.
    aten._ctc_loss.default, aten._ctc_loss.Tensor, aten.adaptive_max_pool2d.default,
    aten.adaptive_max_pool3d.default, aten.fractional_max_pool2d.default, aten.fractional_max_pool3d.default,
    aten.max_pool2d_with_indices.default, aten.max_pool3d_with_indices.default, aten.max_unpool2d.default,
    aten.max_unpool3d.default,
    # JAX has no derivative for them.
    aten.linalg_householder_product.default, aten.nextafter.default, aten.ormqr.default,
}  # fmt: skip

# Formulas that JAX cannot transpose: forward mode is refused.
REVERSE_ONLY = {
    aten._pdist_forward.default, aten.index_reduce.default, aten.scatter_reduce.two, aten.segment_reduce.default,
    aten.special_xlog1py.default, aten.special_xlog1py.other_scalar, aten.special_xlog1py.self_scalar,
    aten.xlogy.Scalar_Other, aten.xlogy.Scalar_Self, aten.xlogy.Tensor,
}  # fmt: skip
# What torch computes only where autograd is going to need it.
_NEEDED = {aten._linalg_eigh.default: {"compute_v": True}}


def differentiable(op: OpOverload, tier: Tier) -> Tier:
    """Return a function that computes an op on tracers, with torch's derivative where JAX's would differ."""
    if op not in BY_TORCH and op not in REVERSE_ONLY:
        return tier

    def run(arguments: dict[str, Any]) -> Any:
        call = Call(op, tier, arguments)
        # A sum of scattered values has the derivative that JAX finds, in both modes.
        return tier(arguments) if call.is_fixed or arguments.get("reduce") == "sum" else call.run()

    return run


class Call:
    """One call of an op: its arrays are arguments of a function with a derivative of its own."""

    def __init__(self, op: OpOverload, tier: Tier, arguments: dict[str, Any]) -> None:
        self.op, self.tier = op, tier
        self.leaves, self.spec = jax.tree.flatten(arguments)
        self.array_places = [n for n, leaf in enumerate(self.leaves) if isinstance(leaf, jax.Array)]
        numbers = [leaf.value for leaf in self.leaves if isinstance(leaf, Number)]
        # A program of our own, whose numbers are inputs: it is not differentiated.
        self.is_fixed = any(isinstance(value, jax.core.Tracer) for value in numbers)

    def run(self) -> list[Array]:
        """Return the results."""
        # Inside ``shard_map`` some arrays vary over the mesh and some do not; a custom derivative takes one
        # kind.
        arrays = varying_alike([self.leaves[n] for n in self.array_places])
        results, checks = self._differentiable()(*arrays)
        # The flags left the inner function as results, so they are required again out here.
        for flag, error in zip(checks.flags, checks.errors, strict=True):
            require(flag, *error)
        return results

    def _differentiable(self) -> Callable[..., tuple[list[Array], Checks]]:
        if self.op in REVERSE_ONLY:
            # ``custom_vjp`` where the formula cannot be transposed: JAX then refuses forward mode by itself.
            pulled = jax.custom_vjp(self._compute)
            pulled.defvjp(lambda *arrays: (self._compute(*arrays), arrays), self._vjp)
            return pulled
        # ``custom_jvp`` serves both modes, since JAX transposes the linear map for reverse mode.
        moved = jax.custom_jvp(self._compute)
        moved.defjvp(lambda primals, tangents: self._jvp(moved, primals, tangents))
        return moved

    def _compute(self, *arrays: Array) -> tuple[list[Array], Checks]:
        """Return the results and what the op requires; JAX traces this apart, so nothing may leave it otherwise."""
        with collecting() as checks:
            results = flatten(self.tier(self._arguments(arrays)))
        return results, checks

    def _arguments(
        self, values: Sequence[Any], leaf: Callable[[Any], Any] = lambda value: value
    ) -> dict[str, Any]:
        """Return the arguments with other values for the arrays, and what a function makes of the rest."""
        leaves = [leaf(value) for value in self.leaves]
        for n, value in zip(self.array_places, values, strict=True):
            leaves[n] = value
        return jax.tree.unflatten(self.spec, leaves)

    def _jvp(self, compute: Any, primals: Sequence[Array], tangents: Sequence[Array]) -> Any:
        results, checks = compute(*primals)
        varying = [n for n, primal in enumerate(primals) if _varies(primal)]
        outs = [
            n for n, result in enumerate(results) if result is not None and _varies(result) and result.size
        ]
        # torch gives the map from gradients of results to gradients of inputs; forward mode wants the other way
        # round, and the transpose of a linear map is exactly that.
        pull = jax.linear_transpose(
            lambda *gradients: self._pull(primals, varying, outs, gradients), *[results[n] for n in outs]
        )
        moved = dict(zip(outs, pull([tangents[n] for n in varying]), strict=True))
        # Integers and booleans have tangents of the empty dtype float0, here as everywhere in JAX.
        still = Checks([_still(flag) for flag in checks.flags], checks.errors)
        return (results, checks), (
            [moved.get(n, _still(result)) for n, result in enumerate(results)],
            still,
        )

    def _vjp(
        self, primals: Sequence[Array], cotangents: tuple[Sequence[Array], Checks]
    ) -> tuple[Array | None, ...]:
        incoming, _ = cotangents
        varying = [n for n, primal in enumerate(primals) if _varies(primal)]
        outs = [n for n, g in enumerate(incoming) if g is not None and g.dtype != jax.dtypes.float0]
        gradients = dict(
            zip(varying, self._pull(primals, varying, outs, [incoming[n] for n in outs]), strict=True)
        )
        return tuple([gradients.get(n) for n in range(len(primals))])

    def _pull(
        self, primals: Sequence[Array], varying: list[int], outs: list[int], given: Sequence[Array]
    ) -> list[Array]:
        """Return the gradients of arrays by torch's formula, given those of results."""
        tensors = [wrap(primal) for primal in primals]
        inputs = [tensors[n].requires_grad_() for n in varying]
        # The same call once more, on tensors that require gradients: autograd then holds torch's formula.
        arguments = self._arguments(tensors, _for_torch) | _NEEDED.get(self.op, {})
        args, kwargs = schema_of(self.op).split(schema_of(self.op).ordered((), arguments))
        with _recording(), linear(), collecting():  # what the op requires has been checked
            results = flatten(self.op(*args, **kwargs))
            pairs = [
                (results[n], wrap(conjugated(g)))
                for n, g in zip(outs, given, strict=True)
                if results[n].requires_grad
            ]
            if not pairs:
                # Nothing that was asked for depends on the inputs: the gradient is zero, which
                # ``autograd.grad`` refuses.
                return [jnp.zeros_like(primals[n]) for n in varying]
            ends, gradients = zip(*pairs, strict=True)
            pulled = torch.autograd.grad(ends, inputs, gradients, allow_unused=True)
        return [
            jnp.zeros_like(primals[n]) if g is None else conjugated(to_arrays(g))
            for n, g in zip(varying, pulled, strict=True)
        ]


@contextlib.contextmanager
def _recording() -> Iterator[None]:
    """Let autograd record what a kernel calls, on this thread."""
    # Backward on this thread: torch's own threads would not be inside JAX's trace.
    with above_autograd(), torch.enable_grad(), torch.autograd.set_multithreading_enabled(False):
        yield


def _still(result: Array | None) -> Any:
    if result is None or _varies(result):
        return result
    # JAX insists on float0 as the tangent of a value that has no derivative.
    return np.zeros(result.shape, jax.dtypes.float0)


def conjugated(array: Array) -> Array:
    """Return a gradient in the other library's convention: torch's is the conjugate of JAX's."""
    return array.conj() if jnp.issubdtype(array.dtype, jnp.complexfloating) else array


def _varies(array: Array) -> bool:
    return bool(jnp.issubdtype(array.dtype, jnp.inexact))


def _for_torch(value: Any) -> Any:
    """Return an argument of a lowering as torch has it."""
    if isinstance(value, Number):
        return value.kind(np.asarray(value.value).item())
    return to_torch_dtype(value) if isinstance(value, np.dtype) else value
