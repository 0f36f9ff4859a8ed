"""What a recording depends on besides its arguments, as it was when the recording began."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from isthmus._lazy.roots import Roots

_PLAIN = (bool, int, float, complex, str, tuple, type(None))
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_STEP_HOOKS = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")
_TENSOR_HOOKS = ("_backward_hooks", "_post_accumulate_grad_hooks")


class Guard:
    """Flags, settings and tensors of what a function reaches; ``holds`` says whether they are the same now."""

    def __init__(self, roots: Roots) -> None:
        self.places = dict(roots.places)
        self.modules = [(m, dict(vars(m)), _held(m)) for m in roots.modules]
        self.optimizers = [(o, _settings(o), _states(o)) for o in roots.optimizers]
        alone = {id(value) for value in self.places.values() if isinstance(value, Tensor)}
        tensors = roots.tensors()
        self.belonging = {id(t) for t in tensors if id(t) not in alone}
        self.buffers = [(t, _buffer(t), _layout(t)) for t in tensors if _is_ours(t)]
        self.parameters = roots.parameters()
        self.empty = [p.grad is None for p in self.parameters]
        self.hooks = [_hooks(p, _TENSOR_HOOKS) for p in self.parameters]

    def narrow(self, used: set[int]) -> None:
        """Forget the tensors, in places of their own, whose buffers were not used: others may take their places."""
        for path, value in list(self.places.items()):
            if isinstance(value, Tensor) and not (_is_ours(value) and id(_buffer(value)) in used):
                del self.places[path]
        alone = {id(value) for value in self.places.values()} | self.belonging
        self.buffers = [row for row in self.buffers if id(row[0]) in alone]

    def holds(self, roots: Roots) -> bool:
        """Return whether everything is as it was, gradients there or not included."""
        if [p.grad is None for p in self.parameters] != self.empty:
            return False
        if [_hooks(p, _TENSOR_HOOKS) for p in self.parameters] != self.hooks:
            return False
        return self.changed(roots) == ""

    def changed(self, roots: Roots) -> str:
        """Return what is not as it was, the gradients left out, or ""."""
        now = roots.places
        for path, value in self.places.items():
            if now.get(path) is not value:
                return f"which {type(value).__name__} is at {'.'.join(str(key) for key in path)}"
        for module, settings, held in self.modules:
            if not _same(vars(module), settings) or _held(module) != held:
                return f"the settings, parameters or hooks of {type(module).__name__}"
        for optimizer, groups, states in self.optimizers:
            if _settings(optimizer) != groups:
                return f"the settings of {type(optimizer).__name__}"
            if _states(optimizer) != states:
                return f"the state of {type(optimizer).__name__}"
        for tensor, buffer, (requires_grad, size, stride) in self.buffers:
            # Written out: a step has hundreds of these.
            if (
                tensor.untyped_storage()._buffer is not buffer  # type: ignore[attr-defined]
                or tensor.stride() != stride
                or tensor.shape != size
                or tensor.requires_grad is not requires_grad
            ):
                return f"the storage, layout or requires_grad of a tensor of shape {tuple(tensor.shape)}"
        return ""


def _same(now: dict[str, Any], before: dict[str, Any]) -> bool:
    try:
        return bool(now == before)  # objects that are the same are not compared any further
    except Exception:
        return False  # a tensor took the place of another, and they were compared by their elements


def _held(module: nn.Module) -> list[Any]:
    parts = (module._parameters, module._buffers, module._modules)
    return [*[id(v) for part in parts for v in part.values()], *_hooks(module, _HOOKS)]


def _hooks(owner: Any, names: tuple[str, ...]) -> list[Any]:
    return [hook for name in names for hook in (getattr(owner, name) or {}).values()]


def _settings(optimizer: Optimizer) -> list[Any]:
    return [
        _hooks(optimizer, _STEP_HOOKS),
        *[
            [_identity(value) if name != "params" else [*map(id, value)] for name, value in group.items()]
            for group in optimizer.param_groups
        ],
    ]


def _states(optimizer: Optimizer) -> list[Any]:
    return [_identity(value) for state in optimizer.state.values() for value in state.values()]


def _identity(value: Any) -> Any:
    """Return what tells a value from another: plain ones by type and value, others by identity."""
    return (type(value), value) if isinstance(value, _PLAIN) else id(value)


def _is_ours(tensor: Tensor) -> bool:
    return tensor.device.type == "jax"


def _buffer(tensor: Tensor) -> Any:
    return tensor.untyped_storage()._buffer  # type: ignore[attr-defined]


def _layout(tensor: Tensor) -> tuple[Any, ...]:
    # Where a tensor starts in its storage changes with nothing that leaves the rest as it is.
    return (tensor.requires_grad, tensor.shape, tensor.stride())
