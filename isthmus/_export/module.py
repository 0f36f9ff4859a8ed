"""Exported programs as torch modules: what ``isthmus.load`` and ``Artifact.module()`` return.

Inputs may be on "jax" or on the CPU, and results are on the device of the first input. The weights are parameters and
buffers of the module, under the names they had in the model; the program takes them as arguments at every call, so
``load_state_dict`` and ``.to()`` work. State that the model changes is written back into its buffers.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import torch
from jax import export
from torch import Tensor, nn

from isthmus._device.checks import value_checks
from isthmus._export import loader, signature_trees
from isthmus._interop.arrays import from_jax, to_jax
from isthmus._runtime.compiler import scoped_x64
from isthmus.errors import ExportError

_ERRORS: dict[str, type[Exception]] = {"IndexError": IndexError, "ValueError": ValueError}


class ProgramModule(nn.Module):
    """An exported program; its parameters and buffers have the names they had in the model.

    ``program.exported`` is for ``jax.export``: a function of a dict of weights and a dict of inputs.
    """

    def __init__(self, program: loader.Program) -> None:
        super().__init__()
        self.program = program
        kinds = program.spec["kinds"]
        self._places = {
            name: _place(self, name, from_jax(array), kinds[name]) for name, array in program.weights.items()
        }
        for name, owner in program.spec["tied"].items():
            _place(self, name, getattr(*self._places[owner]), kinds[name])
        self._checks = value_checks.Conditions()
        self._checks.errors = [
            (_ERRORS.get(name, RuntimeError), message) for name, message in program.spec["conditions"]
        ]
        program.weights = {}  # the module owns them now: a second copy would double the memory

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the program; whether the module trains or not was decided when it was exported."""
        device = _device_of((args, kwargs))
        weights = {name: to_jax(getattr(*place)) for name, place in self._places.items()}
        inputs = self.program.accept(to_jax(self._tensors(args)), to_jax(self._tensors(kwargs)))
        with scoped_x64():
            outputs, state, code = self.program.run(weights, inputs)
            if self._checks.errors:
                self._checks.settle(_first_failed(self._checks.before(), code), auto=value_checks.auto())
        with torch.no_grad():
            for name, value in state.items():
                getattr(*self._places[name]).copy_(from_jax(value))
        return _to(
            signature_trees.ordered(self.program.spec["results"]["tuple"][0], from_jax(outputs)), device
        )

    def _tensors(self, arguments: Any) -> Any:
        """Return arguments with None for those that are no tensors; their values must be those of the export."""
        if isinstance(arguments, tuple):
            return (
                *self._tensors(dict(zip(self.program.inputs, arguments, strict=False))).values(),
                *arguments[len(self.program.inputs) :],
            )
        fixed = self.program.spec["fixed"]
        for name, value in arguments.items():
            if name in fixed and value is not None and repr(value) != fixed[name]:
                raise ValueError(
                    f"{name} is {fixed[name]} in this program, which was exported so; it got {value!r}"
                )
        return {name: None if name in fixed else value for name, value in arguments.items()}


class ExportedModule(nn.Module):
    """A program that JAX exported, as a module without parameters."""

    def __init__(self, exported: export.Exported) -> None:
        super().__init__()
        self.exported = exported
        self._run = jax.jit(exported.call)

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the program on tensors in the containers it was exported with."""
        device = _device_of((args, kwargs))
        with scoped_x64():
            return _to(from_jax(self._run(*to_jax(args), **to_jax(kwargs))), device)


def _place(root: nn.Module, name: str, tensor: Tensor, kind: str) -> tuple[nn.Module, str]:
    """Put a tensor where its dotted name says, and return the module it is in and its name there."""
    *path, last = name.split(".")
    if name.split(".")[0] == "program":
        raise ExportError(f'isthmus.load: the model has a {name}, and "program" is the loaded module\'s own')
    for part in path:
        if part not in dict(root.named_children()):
            root.add_module(part, nn.Module())
        root = root.get_submodule(part)
    if kind == "parameter":
        # A tied tensor is a parameter already, and must stay the same object.
        if not isinstance(tensor, nn.Parameter):
            tensor = nn.Parameter(tensor, requires_grad=False)
        root.register_parameter(last, tensor)
    else:
        root.register_buffer(last, tensor, persistent=kind == "buffer")
    return root, last


def _device_of(tree: Any) -> torch.device:
    """Return the device of the first tensor; raise where one requires grad, since a program has no gradient."""
    tensors = [leaf for leaf in jax.tree.leaves(tree, is_leaf=_is_tensor) if isinstance(leaf, Tensor)]
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors):
        raise ExportError(
            "an exported program has no gradients, and an input requires them\n"
            "  to go on     call it under torch.no_grad(), or detach the input"
        )
    return tensors[0].device if tensors else torch.device("jax")


def _is_tensor(value: Any) -> bool:
    return isinstance(value, Tensor)


def _to(tree: Any, device: torch.device) -> Any:
    """Return tensors in containers on a device; a dict keeps its order, which JAX would not."""
    if isinstance(tree, dict):
        return {name: _to(part, device) for name, part in tree.items()}
    if isinstance(tree, (list, tuple)) and not hasattr(tree, "_fields"):
        return type(tree)(_to(part, device) for part in tree)
    return jax.tree.map(lambda t: t.to(device) if _is_tensor(t) else t, tree, is_leaf=_is_tensor)


@jax.jit
def _first_failed(before: jax.Array, code: jax.Array) -> jax.Array:
    """Return the code of a run, unless one that was not read yet says that a check failed before."""
    if code.ndim:  # a program of format 2 returns a flag for each check
        code = jnp.append(True, code).argmin().astype(before.dtype)
    return jnp.where(before != 0, before, code)
