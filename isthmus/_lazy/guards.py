"""What a recording depends on besides its arguments, as it was when the recording began."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from isthmus._lazy.roots import Roots

_PLAIN = (bool, int, float, complex, str, tuple, type(None))


class Guard:
    """Flags, settings and tensors of what a function reaches; ``holds`` says whether they are the same now."""

    def __init__(self, roots: Roots) -> None:
        self.modules = [(m, m.training, _held(m)) for m in roots.modules.values()]
        self.optimizers = [(o, _settings(o), _states(o)) for o in roots.optimizers.values()]
        ours = [t for t in roots.all_tensors() if t.device.type == "jax"]
        self.buffers = [(t, t.untyped_storage()._buffer) for t in ours]  # type: ignore[attr-defined]
        self.parameters = roots.parameters()
        self.empty = [p.grad is None for p in self.parameters]

    def holds(self) -> bool:
        """Return whether everything is as it was, gradients there or not included."""
        return [p.grad is None for p in self.parameters] == self.empty and self.unchanged() == ""

    def unchanged(self) -> str:
        """Return "" if all but the gradients is as it was, else what has changed."""
        for module, training, held in self.modules:
            if module.training is not training:
                return f"the training flag of a {type(module).__name__}"
            if _held(module) != held:
                return f"the parameters or buffers of a {type(module).__name__}"
        for optimizer, settings, states in self.optimizers:
            if _settings(optimizer) != settings:
                return f"the settings of an {type(optimizer).__name__}"
            if _states(optimizer) != states:
                return f"the state of an {type(optimizer).__name__}"
        for tensor, buffer in self.buffers:
            if tensor.untyped_storage()._buffer is not buffer:  # type: ignore[attr-defined]
                return f"the storage of a tensor of shape {tuple(tensor.shape)}"
        return ""


def _held(module: nn.Module) -> list[int]:
    return [
        *map(id, module._parameters.values()),
        *map(id, module._buffers.values()),
        *map(id, module._modules.values()),
    ]


def _settings(optimizer: Optimizer) -> list[Any]:
    return [
        [_identity(value) if name != "params" else [*map(id, value)] for name, value in group.items()]
        for group in optimizer.param_groups
    ]


def _states(optimizer: Optimizer) -> list[Any]:
    return [_identity(value) for state in optimizer.state.values() for value in state.values()]


def _identity(value: Any) -> Any:
    """Return what tells a value from another: plain ones by their text where two may be equal, others by identity."""
    if isinstance(value, Tensor):
        return id(value)
    return (type(value), value) if isinstance(value, _PLAIN) else id(value)
