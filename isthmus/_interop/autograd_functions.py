"""Torch's custom autograd functions inside JAX's transformations: ``jax.grad`` uses the gradient they define."""

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
from isthmus.errors import IsthmusError

_original = Function.__dict__["apply"]
_here = threading.local()
_lock = threading.Lock()
_users = 0


@contextlib.contextmanager
def respected() -> Iterator[None]:
    """Make ``Function.apply`` on this thread a function whose gradient JAX takes from its ``backward``."""
    before = getattr(_here, "depth", 0)
    _here.depth = before + 1
    _install(1)
    try:
        yield
    finally:
        _here.depth = before
        _install(-1)


def _install(change: int) -> None:
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
    if not getattr(_here, "depth", 0) or by_torch or any(t.device.type != "jax" for t in tensors):
        return _original.__get__(None, cls)(*args, **kwargs)
    return Application(cls, args, kwargs).run()


class Context:
    """What ``forward`` and ``backward`` see as ``ctx``."""

    def __init__(self, needs: Sequence[bool]) -> None:
        self.needs_input_grad = tuple(needs)
        self.saved_tensors: tuple[Any, ...] = ()
        self.still: tuple[int, ...] = ()
        self.materializes = True

    def save_for_backward(self, *tensors: Any) -> None:
        """Keep tensors for ``backward``."""
        self.saved_tensors = tensors

    def save_for_forward(self, *tensors: Any) -> None:
        """Do nothing: JAX's forward mode does not ask a function with its own ``backward``."""

    def mark_dirty(self, *tensors: Any) -> None:
        """Refuse: the arrays JAX differentiates cannot change."""
        raise IsthmusError(
            "an autograd.Function that writes to its arguments (mark_dirty) cannot run inside JAX"
        )

    def mark_non_differentiable(self, *tensors: Any) -> None:
        """Say which results have no gradient."""
        self.still = tuple([id(t) for t in tensors])

    def set_materialize_grads(self, value: bool) -> None:
        """Say whether results without a gradient get one of zeros, or None."""
        self.materializes = value


@jax.tree_util.register_pytree_node_class
class Kept:
    """A context between forward and backward: its tensors are arrays of JAX's, the rest stays as it is."""

    def __init__(self, arrays: Any, rest: Any) -> None:
        self.arrays, self.rest = arrays, rest

    @classmethod
    def of(cls, context: Context) -> Kept:
        """Take a context apart."""
        leaves, spec = jax.tree.flatten(vars(context))
        arrays = [to_jax(leaf) if isinstance(leaf, Tensor) else None for leaf in leaves]
        return cls(arrays, Rest(spec, [None if isinstance(leaf, Tensor) else leaf for leaf in leaves]))

    def context(self) -> Context:
        """Put the context together again."""
        found = Context(())
        pairs = zip(self.arrays, self.rest.leaves, strict=True)
        leaves = [leaf if array is None else from_jax(array) for array, leaf in pairs]
        vars(found).update(jax.tree.unflatten(self.rest.spec, leaves))
        return found

    def tree_flatten(self) -> tuple[Any, Any]:
        """Return the arrays and the rest."""
        return (self.arrays,), self.rest

    @classmethod
    def tree_unflatten(cls, rest: Any, children: Any) -> Kept:
        """Put arrays and rest together."""
        return cls(children[0], rest)


class Rest:
    """What is not an array in a context; one of a kind."""

    def __init__(self, spec: Any, leaves: list[Any]) -> None:
        self.spec, self.leaves = spec, leaves


class Application:
    """One call of a custom function."""

    def __init__(self, cls: type[Function], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.cls, self.args, self.kwargs = cls, args, kwargs
        self.places = [n for n, arg in enumerate(args) if isinstance(arg, Tensor)]
        self.results: list[Any] = []
        self.still: list[int] = []
        self.is_tuple = False

    def run(self) -> Any:
        """Return the results as tensors."""
        primal = jax.custom_vjp(lambda *arrays: self.forward(arrays)[0])
        primal.defvjp(self._forward_saving, self.backward, symbolic_zeros=True)
        found = primal(*[to_jax(self.args[n]) for n in self.places])
        arrays = iter([jax.lax.stop_gradient(a) if n in self.still else a for n, a in enumerate(found)])
        results = tuple([from_jax(next(arrays)) if r is None else r.value for r in self.results])
        return results if self.is_tuple else results[0]

    def _forward_saving(self, *primals: Any) -> Any:
        return self.forward([p.value for p in primals], [p.perturbed for p in primals])

    def forward(self, arrays: Sequence[Any], moving: Sequence[bool] = ()) -> tuple[list[Any], Kept]:
        """Return the results that are arrays, and what backward needs."""
        args, needs = list(self.args), [False] * len(self.args)
        for place, n in enumerate(self.places):
            args[n], needs[n] = from_jax(arrays[place]), bool(moving) and moving[place]
        context = Context(needs)
        before = [buffer_of(args[n]).held for n in self.places]
        with torch.no_grad():
            found = self._call(context, args)
        if any(buffer_of(args[n]).held is not held for n, held in zip(self.places, before, strict=True)):
            context.mark_dirty()
        self.is_tuple = isinstance(found, tuple)
        results = found if self.is_tuple else (found,)
        tensors = [r for r in results if isinstance(r, Tensor)]
        self.still = [n for n, tensor in enumerate(tensors) if id(tensor) in context.still]
        self.results = [None if isinstance(r, Tensor) else Other(r) for r in results]
        return [to_jax(tensor) for tensor in tensors], Kept.of(context)

    def _call(self, context: Context, args: list[Any]) -> Any:
        if self.cls.setup_context is Function.setup_context:
            return self.cls.forward(context, *args, **self.kwargs)
        found = self.cls.forward(*args, **self.kwargs)
        self.cls.setup_context(context, tuple(args), found)
        return found

    def backward(self, kept: Kept, given: list[Any]) -> tuple[Any, ...]:
        """Return the gradients of the arrays."""
        arrays, context = iter(given), kept.context()
        gradients = [_gradient(next(arrays), context) if r is None else None for r in self.results]
        with torch.no_grad():
            found = self.cls.backward(context, *gradients)  # type: ignore[arg-type]
        found = found if isinstance(found, tuple) else (found,)
        return tuple([_pulled(found[n], self.args[n]) for n in self.places])


class Other:
    """A result that is not a tensor."""

    def __init__(self, value: Any) -> None:
        self.value = value


def _gradient(array: Any, context: Context) -> Tensor | None:
    if isinstance(array, jax.custom_derivatives.SymbolicZero):
        if not context.materializes or array.dtype == jax.dtypes.float0:
            return None
        array = jax.numpy.zeros(array.shape, array.dtype)
    return None if array.dtype == jax.dtypes.float0 else from_jax(conjugated(array))


def _pulled(gradient: Tensor | None, argument: Tensor) -> Any:
    return None if gradient is None else conjugated(to_jax(gradient.to(argument.dtype)))
