"""What a function reaches that may change between its calls: modules, optimizers, tensors; and what of them it saw."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterable, Iterator
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from isthmus.errors import JitError


class Roots:
    """Modules, optimizers and tensors a function was found to use; it grows while the function is watched."""

    def __init__(self) -> None:
        self.modules: dict[int, nn.Module] = {}
        self.optimizers: dict[int, Optimizer] = {}
        self.tensors: dict[int, Tensor] = {}

    def __len__(self) -> int:
        return len(self.modules) + len(self.optimizers) + len(self.tensors)

    def add(self, value: Any, depth: int = 2) -> None:
        """Add what ``value`` is, or holds one or two levels down."""
        if isinstance(value, Tensor):
            self.tensors[id(value)] = value
        elif isinstance(value, nn.Module):
            self.modules |= {id(m): m for m in value.modules()}
        elif isinstance(value, Optimizer):
            self.optimizers[id(value)] = value
        elif depth:
            for item in _held_by(value):
                self.add(item, depth - 1)

    def add_function(self, function: Any) -> None:
        """Add what a function's arguments, closure, object and globals hold."""
        while isinstance(function, functools.partial):
            self.add([function.args, function.keywords])
            function = function.func
        self.add(function if isinstance(function, nn.Module) else getattr(function, "__self__", None))
        code, names = getattr(function, "__code__", None), getattr(function, "__globals__", {})
        for name in code.co_names if code is not None else ():
            self.add(names.get(name), depth=1)
        for cell in getattr(function, "__closure__", None) or ():
            with contextlib.suppress(ValueError):  # a cell that is still empty
                self.add(cell.cell_contents)

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Add every module that runs and every optimizer that steps inside this block."""

        def ran(module: nn.Module, _: Any) -> None:
            self.modules.setdefault(id(module), module)

        def stepped(optimizer: Optimizer, *_: Any) -> None:
            self.optimizers.setdefault(id(optimizer), optimizer)
            _check_counters(optimizer)

        hooks = [
            nn.modules.module.register_module_forward_pre_hook(ran),
            register_optimizer_step_pre_hook(stepped),
        ]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def parameters(self) -> list[Tensor]:
        """Return every tensor that may get a gradient, once."""
        found: dict[int, Tensor] = {}
        for tensor in (*self._in_modules(), *self._in_optimizers(), *self.tensors.values()):
            if tensor.is_leaf and tensor.requires_grad:
                found.setdefault(id(tensor), tensor)
        return list(found.values())

    def all_tensors(self) -> list[Tensor]:
        """Return every tensor known, optimizer state included and gradients left out, once."""
        states = [t for o in self.optimizers.values() for s in o.state.values() for t in tensors_in(s)]
        known = [*self._in_modules(), *self._in_optimizers(), *states, *self.tensors.values()]
        return list({id(tensor): tensor for tensor in known}.values())

    def _in_modules(self) -> Iterator[Tensor]:
        for module in self.modules.values():
            for tensor in (*module._parameters.values(), *module._buffers.values()):
                if tensor is not None:
                    yield tensor

    def _in_optimizers(self) -> Iterator[Tensor]:
        for optimizer in self.optimizers.values():
            for group in optimizer.param_groups:
                yield from tensors_in(group)
                yield from group["params"]


def _check_counters(optimizer: Optimizer) -> None:
    """Raise if the optimizer counts its steps on the CPU, where a replay would not count."""
    if any(not group.get("capturable", True) and not group.get("fused") for group in optimizer.param_groups):
        raise JitError(
            f"isthmus.jit: {type(optimizer).__name__} counts its steps in a tensor on the CPU, which a replay "
            f"would not change; make it with capturable=True, which keeps the count on the device"
        )


def _held_by(value: Any) -> Iterable[Any]:
    if isinstance(value, dict):
        return value.values()
    if isinstance(value, (list, tuple, set)):
        return value
    plain = type(value).__module__ not in ("builtins", "types")
    return list(vars(value).values()) if plain and hasattr(value, "__dict__") else ()


def tensors_in(values: Any) -> list[Tensor]:
    """Return the tensors among a dict's values."""
    return [value for value in values.values() if isinstance(value, Tensor)]
