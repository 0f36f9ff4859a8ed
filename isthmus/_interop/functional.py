"""An ``nn.Module`` as a pure function: parameters are a pytree of arrays, buffers a state that goes in and out."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from isthmus._device.core.buffer import buffer_of
from isthmus._interop.arrays import from_jax, to_jax
from isthmus._interop.torch_functions import NARROW, inside_jax, on_arrays
from isthmus._runtime.compiler import has_x64
from isthmus._runtime.dtypes import to_jax_dtype
from isthmus.errors import IsthmusError

Arrays = Mapping[str, Any]
_one_at_a_time = threading.RLock()


def functional(module: nn.Module) -> tuple[dict[str, Any], Apply]:
    """Return the parameters of a module as arrays by name, and the module as a pure function of them.

    Arguments:
        module: a ``torch.nn.Module`` on "jax" or on the CPU. It is not changed.

    Returns:
        ``params``, a dict of arrays, and ``apply(params, *args, state=None, train=None, rng=None, **kwargs)``, which
        runs under any transformation of JAX's. With a ``state`` (``apply.state`` holds the module's buffers) it returns
        the result and the new state. ``train`` is the mode to run in, by default the module's own; ``rng`` is the key
        that random numbers come from.

    Example:
        >>> import jax, jax.numpy as jnp, torch, isthmus
        >>> params, apply = isthmus.functional(torch.nn.Linear(3, 2))
        >>> loss = lambda params, x: apply(params, x).sum()
        >>> jax.jit(jax.grad(loss))(params, jnp.ones((4, 3)))["bias"].tolist()
        [4.0, 4.0]
    """
    apply = Apply(module)
    return apply.arrays(dict(module.named_parameters())), apply


class Apply:
    """A module as a pure function."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.kinds = {name: (tuple(t.shape), t.dtype) for name, t in _tensors(module).items()}
        self.state = self.arrays(dict(module.named_buffers()))
        # A module of the CPU makes its own tensors there too: here they must be where its parameters are.
        on_jax = all(t.device.type == "jax" for t in _tensors(module).values())
        self.place = contextlib.nullcontext if on_jax and self.kinds else lambda: torch.device("jax")

    def arrays(self, tensors: dict[str, Tensor]) -> dict[str, Any]:
        """Return tensors as arrays of the dtypes that the user's JAX has."""
        return {name: self._array(name, tensor) for name, tensor in tensors.items()}

    def _array(self, name: str, tensor: Tensor) -> Any:
        array = to_jax(tensor.detach())
        if has_x64() or array.dtype not in NARROW:
            return array
        if tensor.is_floating_point() or tensor.is_complex():
            raise IsthmusError(
                f"isthmus.functional: {name} is {tensor.dtype}, and JAX's 64-bit types are off: switch them on, with "
                f'jax.config.update("jax_enable_x64", True), or make the module float32'
            )
        narrow = tensor.detach().to(torch.int32)
        if not torch.equal(narrow.to(tensor.dtype), tensor):
            raise IsthmusError(
                f"isthmus.functional: {name} holds integers of more than 32 bits, and JAX's 64-bit types are off: "
                f'switch them on, with jax.config.update("jax_enable_x64", True)'
            )
        return to_jax(narrow)

    def __call__(
        self,
        params: Arrays,
        *args: Any,
        state: Arrays | None = None,
        train: bool | None = None,
        rng: Any = None,
        **kwargs: Any,
    ) -> Any:
        """Return what the module computes; with a state, also the state after it."""
        if not isinstance(train, (bool, type(None))):
            raise TypeError(
                f"isthmus.functional: train is {train!r}, not True or False; under jax.jit name it in static_argnames"
            )
        self._check("params", params, dict(self.module.named_parameters()))
        if state is not None:
            self._check("state", state, dict(self.module.named_buffers()))

        def run(params: Any, state: Any, rng: Any, args: Any, kwargs: Any) -> Any:
            # The module has its tensors exchanged while it runs, and other threads may want it too.
            with _one_at_a_time, inside_jax(rng), self.place(), _mode(self.module, train):
                return self._run(params, state, from_jax(args), from_jax(kwargs))

        return on_arrays(run, params, state, rng, args, kwargs)

    def _run(self, params: Arrays, state: Arrays | None, args: Any, kwargs: Any) -> Any:
        held = self.state if state is None else state
        tensors = {name: self._tensor(name, array) for name, array in {**params, **held}.items()}
        before = {name: buffer_of(tensor).held for name, tensor in tensors.items()}
        # It puts buffers that the module replaces into the dictionary.
        result = torch.func.functional_call(self.module, tensors, args, kwargs)
        written = [name for name in before if buffer_of(tensors[name]).held is not before[name]]
        lost = [name for name in written if name in params]
        if lost:
            raise IsthmusError(
                f"isthmus.functional: the module writes to its parameters ({', '.join(lost)}), which are arguments "
                f"here and cannot change; make them buffers, or return what is to be written"
            )
        if state is not None:
            return result, {name: tensors[name] for name in held}
        if written:
            raise IsthmusError(
                f"isthmus.functional: the module writes to its buffers ({', '.join(written)}), and they are not kept: "
                f"call apply(..., state=state), which returns the result and the new state, or apply(..., train=False)"
            )
        return result

    def _tensor(self, name: str, array: Any) -> Tensor:
        """Return an array as the tensor the module has under a name."""
        shape, dtype = self.kinds[name]
        if tuple(array.shape) != shape:
            raise IsthmusError(
                f"isthmus.functional: {name} is {list(array.shape)}, the module has {list(shape)}"
            )
        tensor = from_jax(array)
        return tensor.to(dtype) if NARROW.get(to_jax_dtype(dtype)) == array.dtype else tensor

    def _check(self, what: str, given: Arrays, wanted: dict[str, Any]) -> None:
        if not isinstance(given, Mapping):
            raise TypeError(
                f"isthmus.functional: {what} is a {type(given).__name__}, not a dictionary of arrays by name"
            )
        missing, strange = sorted(wanted.keys() - given.keys()), sorted(given.keys() - wanted.keys())
        if missing or strange:
            raise IsthmusError(
                f"isthmus.functional: {what} does not fit the module: missing {missing}, not known {strange}"
            )


def _tensors(module: nn.Module) -> dict[str, Tensor]:
    return {**dict(module.named_parameters()), **dict(module.named_buffers())}


@contextlib.contextmanager
def _mode(module: nn.Module, train: bool | None) -> Iterator[None]:
    """Put a module into training mode, or take it out, for a while."""
    flags = [(part, part.training) for part in module.modules()]
    if train is not None:
        module.train(train)
    try:
        yield
    finally:
        for part, flag in flags:
            part.training = flag
