"""``torch.autograd.Function`` inside JAX's transformations: ``jax.grad`` uses the ``backward`` it defines.

Torch code that JAX traces runs without torch's autograd: JAX differentiates the ops. A custom function would lose its
gradient that way (a straight-through estimator would have none), so while torch code runs inside JAX
(``torch_functions.inside_jax``) ``Function.apply`` is replaced by one that makes the call a ``jax.custom_vjp``::

    class Round(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x): return x.round()
        @staticmethod
        def backward(ctx, g): return g          # jax.grad uses this

JAX calls forward and backward in traces of their own, perhaps at different times and more than once. Whatever one of
them leaves for another is therefore returned through JAX: the results as arrays beside a ``ResultLayout``, from which
torch's results are rebuilt, and the context as a pytree of residuals.

The replacement is per process, and a call on a thread outside JAX, or of tensors that torch's autograd records, goes to
torch's own ``apply``. JAX's forward mode raises an error, as it does for every ``custom_vjp``.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import torch
from torch import Tensor
from torch.autograd import Function

from isthmus._device.core.buffer import buffer_of
from isthmus._device.core.derivatives import conjugated
from isthmus._device.torch_glue import patches
from isthmus._interop.arrays import from_jax, to_jax
from isthmus._interop.pytrees import Static, without_static
from isthmus.errors import IsthmusError

Array = jax.Array
_original = Function.__dict__["apply"]
_thread = threading.local()
_lock = threading.Lock()
_users = 0


@contextlib.contextmanager
def differentiated_by_jax() -> Iterator[None]:
    """Make calls of ``Function.apply`` on this thread differentiable by JAX, through their ``backward``."""
    # Contexts nest: a function inside JAX may call another.
    depth = getattr(_thread, "depth", 0)
    _thread.depth = depth + 1
    _count_users(1)
    try:
        yield
    finally:
        _thread.depth = depth
        _count_users(-1)


def _count_users(change: int) -> None:
    """Replace ``Function.apply`` for the first user of any thread, and restore it after the last."""
    global _users
    with _lock:
        _users += change
        if _users:
            patches.replace("torch.autograd.Function", "apply", lambda theirs: classmethod(_apply))
        else:
            patches.restore("torch.autograd.Function", "apply")


def _apply(cls: type[Function], *args: Any, **kwargs: Any) -> Any:
    tensors = [arg for arg in args if isinstance(arg, Tensor)]
    by_torch = torch.is_grad_enabled() and any(t.requires_grad for t in tensors)
    # torch's autograd where it records, or outside of JAX: the replacement is in force for all threads.
    if not getattr(_thread, "depth", 0) or by_torch or any(t.device.type != "jax" for t in tensors):
        return _original.__get__(None, cls)(*args, **kwargs)
    return FunctionCall(cls, args, kwargs).run()


class Context:
    """The ``ctx`` that ``forward`` and ``backward`` get; they may set further attributes."""

    def __init__(self, needs_input_grad: Sequence[bool]) -> None:
        self.needs_input_grad = tuple(needs_input_grad)
        self.saved_tensors: tuple[Any, ...] = ()
        self.nondifferentiable: tuple[int, ...] = ()
        self.materializes = True

    def save_for_backward(self, *tensors: Any) -> None:
        """Save tensors for ``backward``."""
        self.saved_tensors = tensors

    def save_for_forward(self, *tensors: Any) -> None:
        """Do nothing: JAX's forward mode does not use a function with its own ``backward``."""

    def mark_dirty(self, *tensors: Any) -> None:
        """Refuse: the arrays JAX differentiates cannot change."""
        raise IsthmusError(
            "an autograd.Function that writes to its arguments (mark_dirty) cannot run inside JAX"
        )

    def mark_non_differentiable(self, *tensors: Any) -> None:
        """Say which results have no gradient."""
        # By identity, as torch does: == on tensors compares elements.
        self.nondifferentiable = tuple([id(t) for t in tensors])

    def set_materialize_grads(self, value: bool) -> None:
        """Say whether the gradient of a result nothing uses is zeros, or None."""
        self.materializes = value


def _to_residuals(context: Context) -> dict[str, Any]:
    """Return the attributes of a context with tensors as arrays; the rest becomes structure, which JAX passes on."""
    return jax.tree.map(
        lambda leaf: to_jax(leaf) if isinstance(leaf, Tensor) else Static(leaf), dict(vars(context))
    )


def _from_residuals(residuals: dict[str, Any]) -> Context:
    context = Context(())
    # from_jax first: an array that was an attribute's own value is in a Static, and stays an array.
    vars(context).update(without_static(from_jax(residuals)))
    return context


@jax.tree_util.register_static
class ResultLayout:
    """How to rebuild the results of a ``forward`` from arrays: their order, and the values that are not tensors.

    ``values`` has None for each tensor and a ``Static`` for any other result; ``nondifferentiable`` are positions among
    the tensors. JAX refuses a ``custom_vjp`` whose two forwards return different structures. Values may be objects
    without equality, and each forward has returned its own, so they are left out of the comparison.
    """

    def __init__(
        self, is_tuple: bool, values: tuple[Static | None, ...], nondifferentiable: tuple[int, ...]
    ) -> None:
        self.is_tuple, self.values, self.nondifferentiable = is_tuple, values, nondifferentiable
        self._key = (is_tuple, tuple([value is None for value in values]), nondifferentiable)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ResultLayout) and self._key == other._key

    def __hash__(self) -> int:
        return hash(self._key)

    def results(self, arrays: Sequence[Array]) -> Any:
        """Return the results of ``forward``, with tensors on these arrays."""
        rest = iter(arrays)
        results = tuple([from_jax(next(rest)) if value is None else value.value for value in self.values])
        return results if self.is_tuple else results[0]


class FunctionCall:
    """One call of an ``autograd.Function``, as a ``jax.custom_vjp`` of the arrays behind its tensor arguments."""

    def __init__(self, cls: type[Function], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.cls, self.args, self.kwargs = cls, args, kwargs
        self.positions = [n for n, arg in enumerate(args) if isinstance(arg, Tensor)]

    def run(self) -> Any:
        """Return the results as tensors."""
        # ``forward`` alone, where nothing is differentiated: its residuals are left out.
        function = jax.custom_vjp(lambda *arrays: self._forward(arrays, [False] * len(arrays))[0])
        function.defvjp(self._forward_with_residuals, self._backward, symbolic_zeros=True)
        arrays, layout = function(*[to_jax(self.args[n]) for n in self.positions])
        for n in layout.nondifferentiable:
            # JAX differentiates every result; the user has marked these as without gradient.
            arrays[n] = jax.lax.stop_gradient(arrays[n])
        return layout.results(arrays)

    def _forward_with_residuals(self, *primals: Any) -> Any:
        # With symbolic_zeros JAX says of each argument whether it is differentiated.
        return self._forward([p.value for p in primals], [p.perturbed for p in primals])

    def _forward(
        self, arrays: Sequence[Array], perturbed: Sequence[bool]
    ) -> tuple[tuple[list[Array], ResultLayout], dict[str, Any]]:
        """Return the results that are tensors as arrays, the layout of all results, and the residuals."""
        args, needs = list(self.args), [False] * len(self.args)
        for n, array, is_perturbed in zip(self.positions, arrays, perturbed, strict=True):
            args[n], needs[n] = from_jax(array), is_perturbed
        context = Context(needs)
        # Arrays never change, so a write shows as another array in the buffer.
        before = [buffer_of(args[n]).held for n in self.positions]
        with torch.no_grad():
            out = self._call_forward(context, args)
        # A write rebinds the buffer to another array, so identity shows it even without mark_dirty.
        if any(buffer_of(args[n]).held is not held for n, held in zip(self.positions, before, strict=True)):
            context.mark_dirty()
        results = out if isinstance(out, tuple) else (out,)
        tensors = [result for result in results if isinstance(result, Tensor)]
        layout = ResultLayout(
            isinstance(out, tuple),
            tuple([None if isinstance(result, Tensor) else Static(result) for result in results]),
            tuple([n for n, tensor in enumerate(tensors) if id(tensor) in context.nondifferentiable]),
        )
        return ([to_jax(tensor) for tensor in tensors], layout), _to_residuals(context)

    def _call_forward(self, context: Context, args: list[Any]) -> Any:
        if self.cls.setup_context is Function.setup_context:  # the older style: forward(ctx, ...)
            return self.cls.forward(context, *args, **self.kwargs)
        out = self.cls.forward(*args, **self.kwargs)
        self.cls.setup_context(context, tuple(args), out)
        return out

    def _backward(self, residuals: dict[str, Any], cotangents: tuple[list[Any], ResultLayout]) -> Any:
        """Return the gradients of the arrays; cotangents have the structure of the results."""
        # One gradient per result of the forward, None in the place of what is no tensor.
        arrays, layout = iter(cotangents[0]), cotangents[1]
        context = _from_residuals(residuals)
        gradients = [_gradient(next(arrays), context) if v is None else None for v in layout.values]
        with torch.no_grad():
            pulled = self.cls.backward(context, *gradients)  # type: ignore[arg-type]
        # A single gradient may be returned bare, as torch allows.
        pulled = pulled if isinstance(pulled, tuple) else (pulled,)
        return tuple([_cotangent(pulled[n], self.args[n]) for n in self.positions])


def _gradient(cotangent: Any, context: Context) -> Tensor | None:
    """Return JAX's cotangent of a result as the gradient that ``backward`` gets."""
    if isinstance(cotangent, jax.custom_derivatives.SymbolicZero):
        # float0 is JAX's gradient of an integer.
        if not context.materializes or cotangent.dtype == jax.dtypes.float0:
            return None
        cotangent = jax.numpy.zeros(cotangent.shape, cotangent.dtype)
    return None if cotangent.dtype == jax.dtypes.float0 else from_jax(conjugated(cotangent))


def _cotangent(gradient: Tensor | None, argument: Tensor) -> Array | None:
    return None if gradient is None else conjugated(to_jax(gradient.to(argument.dtype)))
