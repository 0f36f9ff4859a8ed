"""The guard of a recording: everything it depends on besides its arguments, as it was when the recording began.

``jit.py`` asks ``Replay.holds`` before each replay, and that asks ``Guard.holds``: the same modules, optimizers and
tensors in the same places; the same settings, parameters and hooks in them; the same buffers behind the tensors, with
the same layouts; gradients there or not, as they were. If it does not hold, the function is recorded again, and the old
recording stays for the state that it was made for: before its first step an optimizer has no moments, after it it has.

A training step has hundreds of tensors and dicts, so there are two checks. ``FastGuard`` compares identities in loops
that run in C. Where it fails, because a list was rebuilt, say, the slow comparison decides whether things are equal
all the same.

What can go wrong: state that is in neither a module, an optimizer nor a tensor (a number in a global list, an attribute
of a settings object that a module holds) is not seen. docs/lazy.md says so to users.
"""

from __future__ import annotations

from itertools import chain
from operator import attrgetter
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from isthmus._device.core.buffer import buffer_of
from isthmus._device.torch_glue.private import (
    MODULE_HOOKS,
    MODULE_PARTS,
    STEP_HOOKS,
    TENSOR_HOOKS,
    likeness,
)
from isthmus._lazy.captured_objects import Roots

_PLAIN = (bool, int, float, complex, str, tuple, type(None))
# Hooks of a tensor, read by C functions: there may be thousands of parameters.
_BACKWARD_HOOKS, _GRADIENT_HOOKS = (attrgetter(name) for name in TENSOR_HOOKS)
_BUFFER = attrgetter("_buffer")
_DICTS = (*MODULE_PARTS, *MODULE_HOOKS)
# What every module has, hooks among it, is compared apart or changes nothing.
_OF_ANY_MODULE = frozenset(vars(nn.Module()))
# Larger containers (a vocabulary) are compared by identity alone: they are looked at before every replay.
_SMALL, _NESTED = 64, 3


class Guard:
    """Flags, settings and tensors of what a function reaches; ``holds`` says whether they are the same now."""

    def __init__(self, roots: Roots) -> None:
        # A copy: the roots of the next call are compared with it.
        self.places = dict(roots.places)
        self.modules = [(m, _settings_of_module(m), _held(m)) for m in roots.modules]
        self.optimizers = [(o, _settings(o), _states(o)) for o in roots.optimizers]
        # Tensors that a variable or an argument holds itself, and not by way of a module or an optimizer.
        alone = {id(value) for value in self.places.values() if isinstance(value, Tensor)}
        tensors = roots.tensors()
        self.belonging = {id(t) for t in tensors if id(t) not in alone}
        # The tensor, the buffer it had and its layout: a replay reads the buffer, so it must be the same one.
        self.buffers = [(t, buffer_of(t), _layout(t)) for t in tensors if _is_ours(t)]
        self.parameters = roots.parameters()
        # Whether gradients are there decides which ops backward records: adding, or setting.
        self.empty = [p.grad is None for p in self.parameters]
        self.hooks = [_hooks(p, TENSOR_HOOKS) for p in self.parameters]
        self.fast = FastGuard(self)

    def narrow(self, used: set[int]) -> None:
        """Forget the tensors, in places of their own, whose buffers were not used: others may take their places."""
        for path, value in list(self.places.items()):
            if isinstance(value, Tensor) and not (_is_ours(value) and id(buffer_of(value)) in used):
                del self.places[path]
        alone = {id(value) for value in self.places.values()} | self.belonging
        self.buffers = [row for row in self.buffers if id(row[0]) in alone]
        self.fast = FastGuard(self)

    def holds(self, roots: Roots) -> bool:
        """Return whether everything is as it was, gradients there or not included."""
        if [p.grad is None for p in self.parameters] != self.empty:
            return False
        # The fast check first: it says yes to nearly every call of a training loop.
        if self._replaced(roots) == "" and self.fast.holds():
            return True
        if [_hooks(p, TENSOR_HOOKS) for p in self.parameters] != self.hooks or self.changed(roots):
            return False
        # Equal though not identical (a list that was rebuilt, say): from now on the new objects are expected.
        self.fast = FastGuard(self)
        return True

    def changed(self, roots: Roots) -> str:
        """Return the name of something that has changed, gradients left out, or ""."""
        replaced = self._replaced(roots)
        if replaced:
            return replaced
        for module, settings, held in self.modules:
            if not _same(vars(module), settings) or _held(module) != held:
                return f"the settings, parameters or hooks of {type(module).__name__}"
        for optimizer, groups, states in self.optimizers:
            if _settings(optimizer) != groups:
                return f"the settings of {type(optimizer).__name__}"
            if _states(optimizer) != states:
                return f"the state of {type(optimizer).__name__}"
        for tensor, buffer, layout in self.buffers:
            if not _is_ours(tensor) or buffer_of(tensor) is not buffer or _layout(tensor) != layout:
                return f"the storage, layout or requires_grad of a tensor of shape {tuple(tensor.shape)}"
        return ""

    def _replaced(self, roots: Roots) -> str:
        """Return the name of something that was elsewhere when the recording began, or ""."""
        now = roots.places
        for path, value in self.places.items():
            if now.get(path) is not value:
                return f"which {type(value).__name__} is at {'.'.join(str(key) for key in path)}"
        return ""


class FastGuard:
    """The same by identities, in loops that Python does not run: if it holds, nothing has changed.

    A step has hundreds of tensors and dicts, and is looked over before every replay. Objects are kept with their
    identities, so that no other can get them.
    """

    def __init__(self, guard: Guard) -> None:
        self.modules = [(module, settings) for module, settings, _ in guard.modules]
        dicts = [getattr(m, name) for m, _ in self.modules for name in _DICTS]
        # Empty dicts (modules without hooks) are checked by one ``any`` over all of them.
        self.full, self.bare = [d for d in dicts if d], [d for d in dicts if not d]
        self.optimizers = [(o, o.state, settings) for o, settings, _ in guard.optimizers]
        self.parameters, self.tensors = guard.parameters, [row[0] for row in guard.buffers]
        self.hooks = guard.hooks
        # Alive with their ids: an object that died could have passed its id on to another.
        self.kept = [value for d in self._dicts() for value in d.values()]
        self.identities = [id(value) for value in self.kept]
        self.buffers = [buffer for _, buffer, _ in guard.buffers]
        # One C call for sizes, strides, dtypes and ``requires_grad`` of all tensors.
        self.alike = likeness(self.tensors)

    def _dicts(self) -> list[dict[Any, Any]]:
        return [*self.full, *[state for _, states, _ in self.optimizers for state in states.values()]]

    def holds(self) -> bool:
        """Return whether everything is what it was; if not, it may still be equal."""
        for module, settings in self.modules:
            if not _same(vars(module), settings):
                return False
        # A dict that was empty and is not any more: a hook or parameter was added.
        if any(self.bare) or not self._same_hooks():
            return False
        for optimizer, states, groups in self.optimizers:
            if optimizer.state is not states or _settings(optimizer) != groups:
                return False
        # Identities of everything that modules and optimizer states hold, compared as one list of integers.
        if [*map(id, chain.from_iterable(map(dict.values, self._dicts())))] != self.identities:
            return False
        return self._same_tensors()

    def _same_hooks(self) -> bool:
        tensors = self.parameters
        if not (any(self.hooks) or any(map(_BACKWARD_HOOKS, tensors)) or any(map(_GRADIENT_HOOKS, tensors))):
            return True
        return [_hooks(tensor, TENSOR_HOOKS) for tensor in tensors] == self.hooks

    def _same_tensors(self) -> bool:
        try:
            buffers = [*map(_BUFFER, map(Tensor.untyped_storage, self.tensors))]
        except AttributeError:
            return False  # one has gone to another device
        return buffers == self.buffers and self.alike(*self.tensors)


def _same(now: dict[str, Any], before: dict[str, Any]) -> bool:
    try:
        return bool(now == before)  # objects that are the same are not compared any further
    except Exception:
        return False  # a tensor took the place of another, and they were compared by their elements


def _settings_of_module(module: nn.Module) -> dict[str, Any]:
    """Return the attributes of a module; lists and dicts of its own as copies, since they may change in place."""
    own = vars(module)
    return {name: value if name in _OF_ANY_MODULE else _copied(value, _NESTED) for name, value in own.items()}


def _copied(value: Any, depth: int) -> Any:
    """Return a copy of a small container and of those in it, and anything else as it is."""
    if type(value) not in (list, dict, set) or len(value) > _SMALL or not depth:
        return value
    if isinstance(value, dict):
        return {key: _copied(item, depth - 1) for key, item in value.items()}
    return type(value)(_copied(item, depth - 1) for item in value)


def _held(module: nn.Module) -> list[Any]:
    parts = [getattr(module, name) for name in MODULE_PARTS]
    return [*[id(v) for part in parts for v in part.values()], *_hooks(module, MODULE_HOOKS)]


def _hooks(owner: Any, names: tuple[str, ...]) -> list[Any]:
    return [hook for name in names for hook in (getattr(owner, name) or {}).values()]


def _settings(optimizer: Optimizer) -> list[Any]:
    return [
        _hooks(optimizer, STEP_HOOKS),
        *[
            # Parameters by identity, hyperparameters by value: a new learning rate is another recording.
            [_identity(value) if name != "params" else [*map(id, value)] for name, value in group.items()]
            for group in optimizer.param_groups
        ],
    ]


def _states(optimizer: Optimizer) -> list[Any]:
    return [_identity(value) for state in optimizer.state.values() for value in state.values()]


def _identity(value: Any) -> Any:
    """Return a key that tells a value from others: plain ones by type and value, the rest by identity."""
    return (type(value), value) if isinstance(value, _PLAIN) else id(value)


def _is_ours(tensor: Tensor) -> bool:
    return tensor.device.type == "jax"


def _layout(tensor: Tensor) -> tuple[Any, ...]:
    # Where a tensor starts in its storage changes with nothing that leaves the rest as it is.
    return (tensor.requires_grad, tensor.shape, tensor.stride())
