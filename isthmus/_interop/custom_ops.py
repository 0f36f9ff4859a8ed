"""JAX functions as implementations of torch ops: kernels, shapes and gradients for ``torch.library``."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import jax
import torch
from torch import Tensor
from torch._ops import OpOverload

from isthmus._graph.schema import schema_of
from isthmus._interop.arrays import to_jax
from isthmus._interop.functions import Calls, jax_function
from isthmus._ops.registry import user_lowering
from isthmus.errors import SchemaError

Function = Callable[..., Any]


def custom_op(name: str, function: Function | None = None, *, schema: str | None = None) -> Any:
    """Define the torch op ``name``, such as ``"library::op"``, by a JAX function; usable as a decorator.

    Shapes are those of ``jax.eval_shape``, the gradient that of ``jax.vjp``.

    Arguments:
        name: the namespace and the name of the op.
        function: a function of arrays; without one, ``custom_op`` returns a decorator.
        schema: torch's schema, such as ``"(Tensor x, float limit) -> Tensor"``; by default it is read from the
            function's annotations, in torch's types as for ``torch.library.custom_op``.

    Returns:
        The op, to be called with tensors on "jax" or on the CPU, eagerly, in lazy mode and under ``torch.compile``.

    Example:
        >>> import jax.numpy as jnp, torch, isthmus
        >>> @isthmus.custom_op("isthmus_docs::soft_clip")
        ... def soft_clip(x: torch.Tensor, limit: float) -> torch.Tensor:
        ...     return limit * jnp.tanh(x / limit)
        >>> x = torch.zeros(2, device="jax", requires_grad=True)
        >>> soft_clip(x, 2.0).sum().backward()
        >>> x.grad.tolist()
        [1.0, 1.0]
    """
    if function is None:
        return lambda decorated: custom_op(name, decorated, schema=schema)
    schema = schema or torch.library.infer_schema(function, mutates_args=())
    if "*" in schema.split("->")[0]:
        raise SchemaError(
            f"isthmus.custom_op: {name} has arguments by keyword alone, which have no gradients; drop the *"
        )
    op = torch.library.custom_op(name, jax_function(function), mutates_args=(), schema=schema)
    namespace, short = name.split("::")
    definition = Definition(function, getattr(getattr(torch.ops, namespace), short).default)
    op.register_fake(definition.shapes)
    op.register_autograd(definition.backward, setup_context=definition.keep)
    return op


class Definition:
    """What an op is besides its kernel on the CPU."""

    def __init__(self, function: Function, op: OpOverload) -> None:
        self.calls, self.op = Calls(function), op
        names = [argument.name for argument in schema_of(op).arguments]
        parameters = [inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD) for name in names]

        def lowered(**arguments: Any) -> Any:
            return self._lowered([arguments[name] for name in names])

        lowered.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        tensors = {a.name for a in schema_of(op).arguments if a.kind in ("tensor", "tensors")}
        user_lowering(op, static=set(names) - tensors)(lowered)

    def _lowered(self, args: list[Any]) -> Any:
        border, tensors = self.calls.of(tuple(args), {})
        body = border.body(tensors)
        return jax.tree.unflatten(body.spec, body.run(*to_jax(tensors)))

    def shapes(self, *args: Any) -> Any:
        """Return empty tensors of the shapes and dtypes that the function returns."""
        border, tensors = self.calls.of(args, {})
        body = border.body(tensors)
        found = [tensors[0].new_empty(shape, dtype=dtype) for shape, dtype in body.results]
        return jax.tree.unflatten(body.spec, found)

    def keep(self, ctx: Any, inputs: Any, output: Any) -> None:
        """Keep the arguments for the gradient."""
        ctx.border, tensors = self.calls.of(inputs, {})
        ctx.save_for_backward(*tensors)
        ctx.structure = jax.tree.map(lambda value: isinstance(value, Tensor), inputs)
        ctx.varies = [t.is_floating_point() or t.is_complex() for t in jax.tree.leaves(output)]

    def backward(self, ctx: Any, *given: Any) -> Any:
        """Return the gradient of each argument."""
        tensors = ctx.saved_tensors
        wanted = tuple([n for n, tensor in enumerate(tensors) if tensor.requires_grad])
        varying = [g for g, v in zip(jax.tree.leaves(list(given)), ctx.varies, strict=True) if v]
        pulled = dict(
            zip(wanted, ctx.border.gradient(wanted, len(tensors))([*tensors, *varying]), strict=True)
        )
        at = iter(range(len(tensors)))
        found = jax.tree.map(lambda is_tensor: pulled.get(next(at)) if is_tensor else None, ctx.structure)
        return found[: len(ctx.needs_input_grad)]  # arguments left at their defaults have no place
