"""Parameters shown otherwise while a module's forward runs: gathered, or with a constraint on their gradient.

A tensor in a module's ``__dict__`` is found before the ``Parameter`` of that name, which stays where it was for
everything outside of forward. Dynamo traces this, and since it is undone there is no side effect in the graph; up to
torch 2.12 it calls the hooks between two graphs. The hooks are objects and no closures, so that a deep copy of the
module gets hooks for its own submodules.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor, nn

from isthmus._device.torch_glue.private import parameters_of
from isthmus._distributed.tensors import constrain

Part = tuple[nn.Module, str, str, str]
"""A module, the name of a parameter of it, how forward sees the parameter, and how its gradient is split."""
GROUPED = "_isthmus_grouped"
"""In a module's ``__dict__``: the names of its parameters that ``fully_shard`` shows."""


class Shown:
    """Shows parameters while the forward of one module runs."""

    again = False
    """Whether what is shown is not kept for backward, which makes it again."""

    def __init__(self, group: list[Part]) -> None:
        self.group = group

    def install(self, module: nn.Module) -> None:
        """Begin to show the parameters of the group when this module runs."""
        _keep_from_dynamo()
        module.register_forward_pre_hook(_Show(self), prepend=True)
        module.register_forward_hook(_Hide(self), always_call=True)

    def is_mine(self, module: nn.Module, name: str) -> bool:
        """Return whether a parameter is shown by this object: ``fully_shard`` goes first."""
        return name not in module.__dict__.get(GROUPED, ())

    def before(self, shown: Tensor, parameter: Tensor) -> None:
        """Note what is shown in the place of a parameter."""

    def hidden(self, shown: Tensor) -> None:
        """Note that a tensor is not shown any more."""

    def after(self, output: Any) -> Any:
        """Return what becomes of the module's output."""
        return output


@functools.cache
def _keep_from_dynamo() -> None:
    """Let Dynamo call the hooks and not trace them, where it would undo their work by deleting the parameters.

    For what was put into a module's ``__dict__`` and taken out again, Dynamo up to torch 2.12 writes ``del
    module.weight``, which removes the ``Parameter``.
    """
    if torch.__version__ < "2.13":  # a TorchVersion, which compares numbers
        for hook in (_Show, _Hide):
            hook.__call__ = torch.compiler.disable(hook.__call__)  # type: ignore[method-assign]


class _Show:
    def __init__(self, shown: Shown) -> None:
        self.shown = shown

    def __call__(self, module: nn.Module, args: Any) -> None:
        for sub, name, forward, gradient in self.shown.group:
            # Gone where a parametrization, such as weight_norm, has taken its place since.
            parameter = parameters_of(sub).get(name)
            if parameter is not None and self.shown.is_mine(sub, name):
                shown = constrain(parameter, forward, gradient, self.shown.again)
                self.shown.before(shown, parameter)
                sub.__dict__[name] = shown


class _Hide:
    def __init__(self, shown: Shown) -> None:
        self.shown = shown

    def __call__(self, module: nn.Module, args: Any, output: Any) -> Any:
        for sub, name, _, _ in self.shown.group:
            if self.shown.is_mine(sub, name):
                shown = sub.__dict__.pop(name, None)
                if shown is not None:
                    self.shown.hidden(shown)
        return self.shown.after(output)
