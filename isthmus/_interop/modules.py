"""Modules of Flax and Equinox as ``torch.nn.Module``s, with their parameters as ``nn.Parameter``s."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any

import jax
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from isthmus._interop.arrays import from_jax, to_jax
from isthmus._interop.functions import jax_function
from isthmus._interop.module_adapter import Source
from isthmus._runtime.compiler import has_x64
from isthmus.errors import IsthmusError


def jax_module(
    module: Any,
    variables: Any = None,
    *,
    method: Callable[..., Any] | str | None = None,
    train_arg: str | None = None,
    eval_arg: str | None = None,
    rngs: Sequence[str] = ("dropout",),
    random_in_eval: bool = False,
) -> JaxModule:
    """Return a module of ``flax.linen``, ``flax.nnx`` or Equinox as a ``torch.nn.Module`` on "jax".

    Arguments:
        module: the module.
        variables: what a linen module's ``init`` returned, or the state of an Equinox module that has one.
        method: what a call runs, a function of the module and the arguments, if not its ``__call__``.
        train_arg: a keyword argument that is true in train mode; nnx and Equinox modules are put into it as well.
        eval_arg: a keyword argument that is true in eval mode.
        rngs: linen's streams of random numbers.
        random_in_eval: whether calls in eval mode have keys too. Calls in train mode have keys drawn from torch's
            generator: linen's for the streams ``rngs`` names, an Equinox module's as ``key``.

    Returns:
        A ``torch.nn.Module`` whose parameters are the module's arrays, by name.

    Example:
        >>> import equinox, jax, torch, isthmus
        >>> layer = isthmus.jax_module(equinox.nn.Linear(3, 2, key=jax.random.key(0)))
        >>> [name for name, _ in layer.named_parameters()]
        ['weight', 'bias']
        >>> layer(torch.ones(3, device="jax")).sum().backward()
        >>> layer.bias.grad.tolist()
        [1.0, 1.0]
    """
    source = _source(module, variables, method, rngs)
    return JaxModule(source, type(module).__name__, train_arg, eval_arg, random_in_eval)


def _source(module: Any, variables: Any, method: Any, rngs: Sequence[str]) -> Source:
    """Return the module as its library has it; a library nobody imported cannot be the one."""

    def is_of(library: str) -> bool:
        found = sys.modules.get(library)
        return found is not None and isinstance(module, found.Module)

    if is_of("flax.linen"):
        from isthmus._interop.flax import Linen

        return Linen(module, variables, method, rngs)
    if isinstance(method, str):
        method = getattr(type(module), method)
    if is_of("flax.nnx") and variables is None:
        from isthmus._interop.flax import Nnx

        return Nnx(module, method)
    if is_of("equinox"):
        from isthmus._interop.equinox import Equinox

        return Equinox(module, variables, method)
    if is_of("flax.nnx"):
        raise IsthmusError("isthmus.jax_module: an nnx module has its variables in it; pass the module alone")
    raise TypeError(
        f"isthmus.jax_module takes a module of flax.linen, flax.nnx or equinox, not "
        f"{f'the class {module.__name__}' if isinstance(module, type) else type(module).__name__}"
    )


class Part(torch.nn.Module):
    """What a JAX module holds under a name."""

    def extra_repr(self) -> str:
        own = (*self.named_parameters(recurse=False), *self.named_buffers(recurse=False))
        return ", ".join(f"{name}={tuple(tensor.shape)}" for name, tensor in own)


class JaxModule(torch.nn.Module):
    """A JAX module that torch calls, moves, trains and saves; see ``isthmus.jax_module``."""

    def __init__(
        self,
        source: Source,
        name: str,
        train_arg: str | None,
        eval_arg: str | None,
        random_in_eval: bool,
    ) -> None:
        super().__init__()
        self._source, self._of = source, name
        self._train_arg, self._eval_arg, self._random_in_eval = train_arg, eval_arg, random_in_eval
        self._function = jax_function(_pure(source))
        self._slots = [_place(self, leaf.name, leaf.array, leaf.trained) for leaf in source.leaves]

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the JAX module; what it changes in itself is written to the buffers."""
        tensors = self._tensors()
        for name, value in ((self._train_arg, self.training), (self._eval_arg, not self.training)):
            if name is not None:
                kwargs.setdefault(name, value)
        given = tensors
        if torch.is_grad_enabled() and self._source.writes(self.training):
            # Backward may need what a buffer held when it was called.
            given = [t if isinstance(t, torch.nn.Parameter) else t.clone() for t in tensors]
        words = self._words(tensors)
        args, kwargs = _narrowed(given, (args, kwargs))
        found, changed = self._function(given, words, self.training, args, kwargs)
        with torch.no_grad():
            for n, value in changed.items():
                self._write(int(n), tensors[int(n)], value)
        return found

    def to_jax(self) -> Any:
        """Return what a JAX program goes on with, sharing the arrays that torch holds now.

        It is the variables of a linen module, an nnx module, or an Equinox module, with its state if it has one.
        """
        return self._source.rebuild([to_jax(t.detach()) for t in self._tensors()])

    def extra_repr(self) -> str:
        return self._of

    def _tensors(self) -> list[Tensor]:
        return [getattr(part, name) for part, name in self._slots]

    def _words(self, tensors: list[Tensor]) -> Tensor | None:
        """Return 64 random bits for the key of a call, if it is to have one."""
        if not (self._source.draws and (self.training or self._random_in_eval)):
            return None
        device = tensors[0].device if tensors else "jax"
        return torch.randint(-(2**31), 2**31, (2,), dtype=torch.int32, device=device)

    def _write(self, n: int, tensor: Tensor, value: Tensor) -> None:
        leaf = self._source.leaves[n]
        if leaf.trained:
            raise IsthmusError(
                f"isthmus.jax_module: a call wrote to the parameter {leaf.name}; only buffers may change"
            )
        if tensor.shape != value.shape:
            raise IsthmusError(
                f"isthmus.jax_module: a call changed the shape of {leaf.name} from {tuple(tensor.shape)} to "
                f"{tuple(value.shape)}"
            )
        tensor.copy_(value)


def _pure(source: Source) -> Callable[..., Any]:
    """Return a call as a function of arrays, whose second result is the arrays that change, by their number."""

    def call(arrays: Any, words: Any, training: bool, args: Any, kwargs: Any) -> Any:
        key = None
        if words is not None:
            first, second = jax.lax.bitcast_convert_type(words, "uint32")
            key = jax.random.fold_in(jax.random.key(first), second)
        found, after = source.call(arrays, key, training, args, kwargs)
        return found, {
            str(n): jax.lax.stop_gradient(new)
            for n, (old, new) in enumerate(zip(arrays, after, strict=True))
            if new is not old
        }

    return call


def _place(module: torch.nn.Module, name: str, array: Any, trained: bool) -> tuple[torch.nn.Module, str]:
    """Register an array under its dotted name and return where it is; a name torch uses gets an underscore."""
    *parts, last = name.split(".")
    for part in parts:
        part = _free(module, part, Part)
        if not hasattr(module, part):
            module.add_module(part, Part())
        module = getattr(module, part)
    last = _free(module, last)
    tensor = from_jax(array)
    if trained:
        module.register_parameter(last, torch.nn.Parameter(tensor))
    else:
        module.register_buffer(last, tensor)
    return module, last


def _free(module: torch.nn.Module, name: str, or_a: type | tuple[()] = ()) -> str:
    """Return a name that the module has nothing under, or nothing but what may be there."""
    while hasattr(module, name) and not isinstance(getattr(module, name), or_a):
        name += "_"
    return name


def _narrowed(tensors: list[Tensor], arguments: Any) -> Any:
    """Return arguments with integers of 32 bits, as JAX would take them: 64-bit ones would make it compute in float64.

    They stay where the user turned JAX's 64-bit types on, and beside numbers of 64 bits.
    """
    wide = (torch.float64, torch.complex128)
    leaves = [*tensors, *tree_leaves(arguments)]
    if _x64() or any(isinstance(t, Tensor) and t.dtype in wide for t in leaves):
        return arguments
    narrow = {torch.int64: torch.int32, torch.uint64: torch.uint32}
    return tree_map(lambda v: v.to(narrow.get(v.dtype, v.dtype)) if isinstance(v, Tensor) else v, arguments)


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _x64() -> bool:
    return has_x64()
