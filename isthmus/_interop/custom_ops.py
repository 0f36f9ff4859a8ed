"""``isthmus.custom_op``: a torch op whose kernel, shapes and gradient all come from one JAX function.

``torch.library.custom_op`` gets, from the function ``f`` that the user wrote with JAX::

    kernel on CPU and CUDA   jax_function(f)
    lowering on "jax"        f traced for the arguments' types, inlined into the program around it
    fake (shapes)            the types of the traced function's results
    backward                 TracedCall.gradient, which goes through jax.vjp

Unlike a call of ``jax_function``, which every graph shows as ``isthmus::jax``, the op keeps its own name in graphs.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import jax
import torch
from torch import Tensor

from isthmus._graph.private import OpOverload
from isthmus._graph.schema import schema_of
from isthmus._interop.arrays import to_jax
from isthmus._interop.functions import TracedCalls, jax_function
from isthmus._ops.registry import user_lowering
from isthmus.errors import SchemaError

Function = Callable[..., Any]


def custom_op(name: str, function: Function | None = None, *, schema: str | None = None) -> Any:
    """Define a torch op by a JAX function.

    Arguments:
        name: the op's qualified name, such as ``"library::op"``.
        function: a function of arrays. Left out, ``custom_op`` is a decorator.
        schema: torch's schema, such as ``"(Tensor x, float scale) -> Tensor"``. Left out, it is read from the
            function's annotations, in torch's types as for ``torch.library.custom_op``.

    Returns:
        The op, as ``torch.library.custom_op`` returns it; ``torch.ops.library.op`` is the same op.

    Example:
        >>> import jax.numpy as jnp, torch, isthmus
        >>> square = isthmus.custom_op("docs::square", lambda x: jnp.square(x), schema="(Tensor x) -> Tensor")
        >>> square(torch.tensor([3.0], device="jax")).item()
        9.0
    """
    # As a decorator with arguments.
    if function is None:
        return lambda decorated: custom_op(name, decorated, schema=schema)
    schema = schema or torch.library.infer_schema(function, mutates_args=())
    if "*" in schema.split("->")[0]:
        raise SchemaError(
            f"isthmus.custom_op: {name} has arguments by keyword alone, which have no gradients; drop the *"
        )
    op = torch.library.custom_op(name, jax_function(function), mutates_args=(), schema=schema)
    namespace, short = name.split("::")
    definition = OpDefinition(function, getattr(getattr(torch.ops, namespace), short).default)
    # The device runs the lowering; the kernel of ``torch.library`` is for the CPU and CUDA.
    definition.register_lowering()
    op.register_fake(definition.fake)
    op.register_autograd(definition.backward, setup_context=definition.setup_context)
    return op


class OpDefinition:
    """The functions that torch and the device register for one op."""

    def __init__(self, function: Function, op: OpOverload) -> None:
        self.calls, self.op = TracedCalls(function), op

    def register_lowering(self) -> None:
        """Register the function as the op's lowering; arguments that are no tensors are part of a program's key."""
        arguments = schema_of(self.op).arguments
        names = [argument.name for argument in arguments]

        def lowered(**values: Any) -> Any:
            traced_call, tensors = self.calls.bind(tuple([values[name] for name in names]), {})
            traced = traced_call.traced(tensors)
            return jax.tree.unflatten(traced.out_tree, traced.run(*to_jax(tensors)))

        # Lowerings are checked against their op's schema by their parameters' names.
        parameters = [inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD) for name in names]
        lowered.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        tensors = {argument.name for argument in arguments if argument.kind in ("tensor", "tensors")}
        user_lowering(self.op, static=set(names) - tensors)(lowered)

    def fake(self, *args: Any) -> Any:
        """Return empty tensors of the shapes and dtypes that the function returns."""
        traced_call, tensors = self.calls.bind(args, {})
        traced = traced_call.traced(tensors)
        results = [tensors[0].new_empty(size, dtype=dtype) for size, dtype in traced.results]
        return jax.tree.unflatten(traced.out_tree, results)

    def setup_context(self, ctx: Any, inputs: Any, output: Any) -> None:
        """Save the operands for backward, and where in the arguments they are."""
        ctx.traced_call, tensors = self.calls.bind(inputs, {})
        ctx.save_for_backward(*tensors)
        ctx.is_tensor = jax.tree.map(lambda value: isinstance(value, Tensor), inputs)
        ctx.is_differentiable = [t.is_floating_point() or t.is_complex() for t in jax.tree.leaves(output)]

    def backward(self, ctx: Any, *gradients: Any) -> Any:
        """Return the gradient of each argument."""
        tensors = ctx.saved_tensors
        with_gradient = tuple([n for n, tensor in enumerate(tensors) if tensor.requires_grad])
        leaves = jax.tree.leaves(list(gradients))
        cotangents = [g for g, has in zip(leaves, ctx.is_differentiable, strict=True) if has]
        pulled = ctx.traced_call.gradient(with_gradient, len(tensors))([*tensors, *cotangents])
        # Back from operands to arguments: others have no gradient.
        by_operand = dict(zip(with_gradient, pulled, strict=True))
        position = iter(range(len(tensors)))
        by_argument = jax.tree.map(
            lambda is_tensor: by_operand.get(next(position)) if is_tensor else None, ctx.is_tensor
        )
        # Arguments left at their defaults are among the inputs here, and torch expects no gradients for them.
        return by_argument[: len(ctx.needs_input_grad)]
