"""``isthmus.functional``: an ``nn.Module`` as a pure function, for JAX training loops.

Parameters are a dict of arrays, the first argument, so that ``jax.grad`` gives gradients in the same dict; buffers are
the ``state``, a second dict that goes in and comes out::

    params, apply = isthmus.functional(nn.BatchNorm1d(4))
    out, state = apply(params, x, state=apply.state, train=True)

A call replaces the module's tensors by tensors on these arrays (``torch.func.functional_call``) and runs the module as
torch code on tracers (``torch_functions.py``). While it runs the module is changed: its tensors, and its train mode if
``train`` is passed. So calls of all threads take turns, and both are restored at the end.

A write to a parameter, or to a buffer without a ``state``, would be lost, so it is an error. Writes are detected
by identity: an in-place op rebinds the tensor's buffer to another array.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import torch
from torch import Tensor, nn

from isthmus._device.core.buffer import buffer_of
from isthmus._graph.nodes import Type
from isthmus._interop.arrays import from_jax, to_jax
from isthmus._interop.torch_functions import NARROW, inside_jax, on_arrays
from isthmus._runtime.compiler import has_x64
from isthmus._runtime.dtypes import to_jax_dtype
from isthmus.errors import IsthmusError

Array = jax.Array
Arrays = Mapping[str, Array]
# Reentrant: a module may call another one's apply.
_one_at_a_time = threading.RLock()


def functional(module: nn.Module) -> tuple[dict[str, Array], Apply]:
    """Return the parameters of a module as arrays by name, and the module as a pure function of them.

    Arguments:
        module: a module on any device; it is not changed. Tied parameters are one entry.

    Returns:
        ``params``, and ``apply(params, *args, state=None, train=None, rng=None, **kwargs)``, which runs under any
        transformation of JAX's. With a ``state`` (``apply.state`` holds the module's buffers) it returns the result and
        the new state; ``train`` is the mode to run in, by default the module's own; ``rng`` is the key random numbers
        come from.

    Example:
        >>> import jax, jax.numpy as jnp, isthmus, torch
        >>> params, apply = isthmus.functional(torch.nn.Linear(2, 1, bias=False))
        >>> jax.grad(lambda p: apply(p, jnp.ones((3, 2))).sum())(params)["weight"].tolist()
        [[3.0, 3.0]]
    """
    if not isinstance(module, nn.Module):
        raise TypeError(
            f"isthmus.functional takes a module, not {type(module).__name__}; for a function of tensors there is "
            "isthmus.torch_function"
        )
    apply = Apply(module)
    return apply.to_arrays(dict(module.named_parameters())), apply


class Apply:
    """A module as a pure function; ``state`` are its buffers as arrays, at the time ``functional`` was called."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        tensors = {**dict(module.named_parameters()), **dict(module.named_buffers())}
        self.types = {name: Type(tuple(t.shape), t.dtype) for name, t in tensors.items()}
        self.state = self.to_arrays(dict(module.named_buffers()))
        # A module of the CPU makes tensors on the CPU in its forward, and its parameters will be on "jax" there.
        on_jax = all(t.device.type == "jax" for t in tensors.values())
        self._default_device = contextlib.nullcontext if on_jax and tensors else lambda: torch.device("jax")

    def to_arrays(self, tensors: dict[str, Tensor]) -> dict[str, Array]:
        """Return tensors as arrays of dtypes that the user's JAX has."""
        return {name: self._to_array(name, tensor) for name, tensor in tensors.items()}

    def _to_array(self, name: str, tensor: Tensor) -> Array:
        array: Array = to_jax(tensor.detach())
        if has_x64() or array.dtype not in NARROW:
            return array
        if tensor.is_floating_point() or tensor.is_complex():
            raise IsthmusError(
                f"isthmus.functional: {name} is {tensor.dtype}, and JAX's 64-bit types are off: switch them on, with "
                f'jax.config.update("jax_enable_x64", True), or make the module float32'
            )
        # Integers, such as num_batches_tracked, become int32 if their values allow it.
        narrow = tensor.detach().to(torch.int32)
        if not torch.equal(narrow.to(tensor.dtype), tensor):
            raise IsthmusError(
                f"isthmus.functional: {name} holds integers of more than 32 bits, and JAX's 64-bit types are off: "
                f'switch them on, with jax.config.update("jax_enable_x64", True)'
            )
        return to_jax(narrow)  # type: ignore[no-any-return]

    def __call__(
        self,
        params: Arrays,
        *args: Any,
        state: Arrays | None = None,
        train: bool | None = None,
        rng: Any = None,
        **kwargs: Any,
    ) -> Any:
        """Return the module's result; with a state, the result and the new state."""
        if not isinstance(train, (bool, type(None))):
            raise TypeError(
                f"isthmus.functional: train is {train!r}, not True or False; under jax.jit name it in static_argnames"
            )
        _check_names("params", params, dict(self.module.named_parameters()))
        if state is not None:
            _check_names("state", state, dict(self.module.named_buffers()))

        def run(params: Any, state: Any, rng: Any, args: Any, kwargs: Any) -> Any:
            with _one_at_a_time, inside_jax(rng), self._default_device(), _train_mode(self.module, train):
                return self._run(params, state, from_jax(args), from_jax(kwargs))

        return on_arrays(run, params, state, rng, args, kwargs)

    def _run(self, params: Arrays, state: Arrays | None, args: Any, kwargs: Any) -> Any:
        buffers = self.state if state is None else state
        tensors = {name: self._to_tensor(name, array) for name, array in {**params, **buffers}.items()}
        before = {name: buffer_of(tensor).held for name, tensor in tensors.items()}
        # A buffer that the module replaces by assignment is replaced in this dict too: functional_call puts it there.
        result = torch.func.functional_call(self.module, tensors, args, kwargs)
        written = [name for name in before if buffer_of(tensors[name]).held is not before[name]]
        written_params = [name for name in written if name in params]
        if written_params:
            raise IsthmusError(
                f"isthmus.functional: the module writes to its parameters ({', '.join(written_params)}), which are "
                f"arguments here and cannot change; make them buffers, or return what is to be written"
            )
        if state is not None:
            return result, {name: tensors[name] for name in buffers}
        if written:
            raise IsthmusError(
                f"isthmus.functional: the module writes to its buffers ({', '.join(written)}), and they are not kept: "
                f"call apply(..., state=state), which returns the result and the new state, or apply(..., train=False)"
            )
        return result

    def _to_tensor(self, name: str, array: Array) -> Tensor:
        """Return an array as the tensor that the module has under a name."""
        size, dtype = self.types[name]
        if tuple(array.shape) != size:
            raise IsthmusError(
                f"isthmus.functional: {name} is {list(array.shape)}, the module has {list(size)}"
            )
        tensor: Tensor = from_jax(array)
        # Only what _to_array narrowed is widened again: parameters cast to bfloat16 stay bfloat16.
        return tensor.to(dtype) if NARROW.get(to_jax_dtype(dtype)) == array.dtype else tensor


def _check_names(argument: str, arrays: Arrays, tensors: dict[str, Tensor]) -> None:
    """Raise unless a dict of arrays has the module's names."""
    if not isinstance(arrays, Mapping):
        raise TypeError(
            f"isthmus.functional: {argument} is a {type(arrays).__name__}, not a dictionary of arrays by name"
        )
    missing, unknown = sorted(tensors.keys() - arrays.keys()), sorted(arrays.keys() - tensors.keys())
    if missing or unknown:
        raise IsthmusError(
            f"isthmus.functional: {argument} does not fit the module: missing {missing}, not known {unknown}"
        )


@contextlib.contextmanager
def _train_mode(module: nn.Module, train: bool | None) -> Iterator[None]:
    """Put a module into train or eval mode inside this block, unless ``train`` is None."""
    flags = [(part, part.training) for part in module.modules()]
    if train is not None:
        module.train(train)
    try:
        yield
    finally:
        for part, flag in flags:
            part.training = flag
