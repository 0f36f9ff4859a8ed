"""``isthmus.jax_module``: modules of Flax and Equinox as ``torch.nn.Module``s that torch trains and saves.

An adapter (``module_adapter.py``) gives the JAX module's arrays with names, and the module as a pure function of them.
``JaxModule`` registers the arrays as parameters and buffers under their dotted names, in submodules, so that
``state_dict`` has ``Dense_0.kernel``; its ``forward`` calls the pure function through ``jax_function``::

    out, changed = function(arrays, words, training, args, kwargs)

``changed`` are the arrays that the call replaced (batch statistics), by their number; they are copied into the buffers.
``words`` are 64 random bits from torch's generator, of which the function makes a JAX key, so ``torch.manual_seed``
governs dropout and the bits are an input of the program, not a constant in it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any

import jax
import torch
from torch import Tensor

from isthmus._device.torch_glue.pytree import tree_leaves, tree_map
from isthmus._interop.arrays import from_jax, to_jax
from isthmus._interop.functions import jax_function
from isthmus._interop.module_adapter import ModuleAdapter, NamedArray
from isthmus._runtime.compiler import has_x64
from isthmus.errors import IsthmusError

Array = jax.Array


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
        variables: the result of a linen module's ``init``, or the state of an Equinox module that has one.
        method: a function of the module and the arguments, or the name of a method, to call in place of ``__call__``.
        train_arg: a keyword argument to pass, true in train mode; nnx and Equinox modules are put into the mode too.
        eval_arg: a keyword argument to pass, true in eval mode.
        rngs: the random streams of a linen module that get a key in train mode; an Equinox module gets ``key``.
        random_in_eval: whether calls in eval mode get a key too.

    Returns:
        A ``JaxModule``, whose ``to_jax()`` gives the trained module, or its variables, back.

    Example:
        >>> import equinox as eqx, jax, isthmus
        >>> linear = isthmus.jax_module(eqx.nn.Linear(2, 3, key=jax.random.key(0)))
        >>> [name for name, _ in linear.named_parameters()]
        ['weight', 'bias']
    """
    adapter = _adapter(module, variables, method, rngs)
    return JaxModule(adapter, type(module).__name__, train_arg, eval_arg, random_in_eval)


def _adapter(module: Any, variables: Any, method: Any, rngs: Sequence[str]) -> ModuleAdapter:
    """Return the adapter for the library that a module is of."""

    def is_of(library: str) -> bool:
        # A library that is not imported has no modules, and importing it here would take seconds.
        imported = sys.modules.get(library)
        return imported is not None and isinstance(module, imported.Module)

    if is_of("flax.linen"):
        from isthmus._interop.flax import LinenAdapter

        return LinenAdapter(module, variables, method, rngs)
    if isinstance(method, str):
        method = getattr(type(module), method)
    if is_of("flax.nnx") and variables is None:
        from isthmus._interop.flax import NnxAdapter

        return NnxAdapter(module, method)
    if is_of("equinox"):
        from isthmus._interop.equinox import EquinoxAdapter

        return EquinoxAdapter(module, variables, method)
    if is_of("flax.nnx"):
        raise IsthmusError("isthmus.jax_module: an nnx module has its variables in it; pass the module alone")
    raise TypeError(
        f"isthmus.jax_module takes a module of flax.linen, flax.nnx or equinox, not "
        f"{f'the class {module.__name__}' if isinstance(module, type) else type(module).__name__}"
    )


class Submodule(torch.nn.Module):
    """The arrays of a JAX module whose names begin with this submodule's name; it is never called."""

    def extra_repr(self) -> str:
        own = (*self.named_parameters(recurse=False), *self.named_buffers(recurse=False))
        return ", ".join(f"{name}={tuple(tensor.shape)}" for name, tensor in own)


class JaxModule(torch.nn.Module):
    """A JAX module that torch calls, moves, trains and saves; see ``isthmus.jax_module``."""

    def __init__(
        self,
        adapter: ModuleAdapter,
        name: str,
        train_arg: str | None,
        eval_arg: str | None,
        random_in_eval: bool,
    ) -> None:
        super().__init__()
        self._adapter, self._class_name = adapter, name
        self._train_arg, self._eval_arg, self._random_in_eval = train_arg, eval_arg, random_in_eval
        self._function = jax_function(_pure(adapter))
        # By owner and attribute, not by tensor: torch's module.to() and load_state_dict(assign=True) replace tensors.
        self._attributes = [_register(self, named) for named in adapter.named_arrays]

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the JAX module, and write the arrays that the call changed to the buffers."""
        tensors = self._tensors()
        for name, value in ((self._train_arg, self.training), (self._eval_arg, not self.training)):
            if name is not None:
                kwargs.setdefault(name, value)
        operands = tensors
        if torch.is_grad_enabled() and self._adapter.writes(self.training):
            # Autograd may save a buffer for backward, and would refuse after the write to it below: a copy is saved.
            operands = [t if isinstance(t, torch.nn.Parameter) else t.clone() for t in tensors]
        words = self._words(tensors)
        args, kwargs = _narrowed(operands, (args, kwargs))
        out, changed = self._function(operands, words, self.training, args, kwargs)
        with torch.no_grad():
            for n, value in changed.items():
                self._write(int(n), tensors[int(n)], value)
        return out

    def to_jax(self) -> Any:
        """Return the module for a JAX program, sharing the arrays that torch holds now; later writes do not change it.

        For linen that is the variables, for nnx the module, for Equinox the module, with its state if it has one.
        """
        return self._adapter.rebuild([to_jax(t.detach()) for t in self._tensors()])

    def extra_repr(self) -> str:
        return self._class_name

    def _tensors(self) -> list[Tensor]:
        return [getattr(module, name) for module, name in self._attributes]

    def _words(self, tensors: list[Tensor]) -> Tensor | None:
        """Return 64 random bits for the key of a call, or None for a call without one."""
        if not (self._adapter.draws and (self.training or self._random_in_eval)):
            return None
        device = tensors[0].device if tensors else "jax"
        return torch.randint(-(2**31), 2**31, (2,), dtype=torch.int32, device=device)

    def _write(self, n: int, tensor: Tensor, value: Tensor) -> None:
        named = self._adapter.named_arrays[n]
        if named.trained:
            raise IsthmusError(
                f"isthmus.jax_module: a call wrote to the parameter {named.name}; only buffers may change"
            )
        if tensor.shape != value.shape:
            raise IsthmusError(
                f"isthmus.jax_module: a call changed the shape of {named.name} from {tuple(tensor.shape)} to "
                f"{tuple(value.shape)}"
            )
        tensor.copy_(value)


def _pure(adapter: ModuleAdapter) -> Callable[..., Any]:
    """Return a call as a function of arrays, whose second result is the arrays that changed, by their number."""

    def call(
        arrays: list[Array],
        words: Array | None,
        training: bool,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> tuple[Any, dict[str, Array]]:
        key = None
        if words is not None:
            first, second = jax.lax.bitcast_convert_type(words, "uint32")
            key = jax.random.fold_in(jax.random.key(first), second)
        out, after = adapter.call(arrays, key, training, args, kwargs)
        # An adapter returns the same tracer for an array that did not change.
        return out, {
            str(n): jax.lax.stop_gradient(new)
            for n, (old, new) in enumerate(zip(arrays, after, strict=True))
            if new is not old
        }

    return call


def _register(module: torch.nn.Module, named: NamedArray) -> tuple[torch.nn.Module, str]:
    """Register an array under its dotted name; return the submodule that owns it, and its attribute there."""
    *parts, last = named.name.split(".")
    for part in parts:
        part = _free_name(module, part, Submodule)
        if not hasattr(module, part):
            module.add_module(part, Submodule())
        module = getattr(module, part)
    last = _free_name(module, last)
    tensor = from_jax(named.array)
    if named.trained:
        module.register_parameter(last, torch.nn.Parameter(tensor))
    else:
        module.register_buffer(last, tensor)
    return module, last


def _free_name(module: torch.nn.Module, name: str, allowed: type | tuple[()] = ()) -> str:
    """Return a name, with underscores if need be, under which the module has nothing but an ``allowed`` instance."""
    # nn.Module has attributes such as `train` and `type`, which a JAX module may use as names.
    while hasattr(module, name) and not isinstance(getattr(module, name), allowed):
        name += "_"
    return name


def _narrowed(tensors: list[Tensor], arguments: Any) -> Any:
    """Return arguments with 64-bit integers as 32-bit ones, as JAX itself takes them.

    A function is traced with 64-bit types on if an operand has 64 bits, and token ids in int64 would make a float32
    module compute in float64. They stay where the user turned JAX's 64-bit types on, and beside float64 operands.
    """
    double = (torch.float64, torch.complex128)
    leaves = [*tensors, *tree_leaves(arguments)]
    if _x64() or any(isinstance(t, Tensor) and t.dtype in double for t in leaves):
        return arguments
    narrow = {torch.int64: torch.int32, torch.uint64: torch.uint32}
    return tree_map(lambda v: v.to(narrow.get(v.dtype, v.dtype)) if isinstance(v, Tensor) else v, arguments)


# Dynamo cannot trace JAX's configuration; it compiles the answer in.
@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _x64() -> bool:
    return has_x64()
