"""What a function reaches that may change between its calls: modules, optimizers and tensors.

A replay runs no Python, so a recording is valid only while the function would do the same. ``Roots`` finds what the
function can get at, by way of its closure, defaults, globals, ``self`` and arguments that are no tensors, each with the
path that leads there::

    roots = Roots(step, [])
    roots.places      # {("model",): <Linear>, (("global", "optimizer"),): <SGD>}

``guards.py`` compares these places, and what the modules and optimizers there hold, before each replay. ``watching``
notes which modules and optimizers run while the function is recorded: one that no path leads to
(``unreachable_object``) might be another at the next call, and makes the recording one that is not replayed.

The search runs at every call of a jitted function. It is bounded in depth and in the number of objects, and does not
look into code of libraries, which reaches only what it was made with.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterable, Iterator
from threading import get_ident
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from isthmus import _caches
from isthmus._device.torch_glue import patches
from isthmus._device.torch_glue.private import buffers_of, parameters_of
from isthmus._runtime.user_frames import OWNERS, owner
from isthmus.errors import JitError

# How many containers deep a module may be held, and how many objects are looked at in all: a call must not
# search the whole program.
_DEPTH = 3
_MOST = 1000
Path = tuple[Any, ...]
# What cannot hold a module that changes.
_PLAIN = (bool, int, float, complex, str, bytes, type, type(None), ModuleType)


class Roots:
    """Modules, optimizers and tensors a function can get at, by the places where they are found."""

    def __init__(self, function: Any, arguments: Iterable[Any]) -> None:
        self.function, self.arguments = function, list(arguments)
        self.places: dict[Path, Any] = {}
        self._seen: set[int] = set()
        self.ran: dict[int, nn.Module | Optimizer] = {}
        self.made: dict[int, nn.Module] = {}
        self._visit(function, _DEPTH, ())
        for at, argument in enumerate(self.arguments):
            self._visit(argument, _DEPTH, (at,))
        # Identities are good only while the search keeps the objects alive.
        self._seen.clear()

    def again(self) -> Roots:
        """Return the objects that the same function reaches now."""
        return Roots(self.function, self.arguments)

    def _visit(self, value: Any, depth: int, path: Path) -> None:
        if isinstance(value, (Tensor, nn.Module, Optimizer)):
            self.places[path] = value
        # Modules of Python, numbers and the like end the search; so do cycles.
        elif isinstance(value, _PLAIN) or id(value) in self._seen or len(self._seen) > _MOST:
            return
        # A function costs no depth: decorators are layers of functions around the one that counts.
        elif isinstance(value, (FunctionType, MethodType, functools.partial)):
            self._seen.add(id(value))
            for key, item in _reached_by(value):
                self._visit(item, depth, (*path, key))
        elif depth:
            self._seen.add(id(value))
            for key, item in _held_by(value):
                self._visit(item, depth - 1, (*path, key))

    @property
    def objects(self) -> list[Any]:
        """Everything found, in the order of its places."""
        return list(self.places.values())

    @functools.cached_property
    def modules(self) -> list[nn.Module]:
        """Every module, those inside others included."""
        roots = [value for value in self.objects if isinstance(value, nn.Module)]
        return list({id(m): m for root in roots for m in root.modules()}.values())

    @property
    def optimizers(self) -> list[Optimizer]:
        """Every optimizer."""
        return [value for value in self.objects if isinstance(value, Optimizer)]

    def parameters(self) -> list[Tensor]:
        """Return every tensor that may get a gradient, once."""
        return [t for t in self.tensors() if t.is_leaf and t.requires_grad]

    def tensors(self) -> list[Tensor]:
        """Return every tensor, optimizer state included and gradients left out, once."""
        groups = [group for o in self.optimizers for group in o.param_groups]
        # Parts of modules, tensors in optimizer groups, optimizer state, then tensors of the function's own.
        known = [
            *[
                t
                for m in self.modules
                for part in (parameters_of(m), buffers_of(m), vars(m))
                for t in _tensors(part)
            ],
            *[t for group in groups for t in (*_tensors(group), *group["params"])],
            *[t for o in self.optimizers for state in o.state.values() for t in _tensors(state)],
            *[value for value in self.objects if isinstance(value, Tensor)],
        ]
        return list({id(tensor): tensor for tensor in known}.values())

    def unreachable_object(self) -> str:
        """Return the kind of an object that ran though nothing led to it, so that it may be another next time, or "".

        A module that the function made itself is made alike next time; the tensors it has are looked at elsewhere.
        """
        known = {id(value) for value in (*self.modules, *self.optimizers)} | self.made.keys()
        return next((type(value).__name__ for key, value in self.ran.items() if key not in known), "")

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Note every module that is made or runs and every optimizer that steps inside this block."""

        recorder = get_ident()  # torch's hooks are the process's: other threads train meanwhile

        def ran(module: nn.Module, _: Any) -> None:
            if get_ident() == recorder:
                self.ran[id(module)] = module

        def stepped(optimizer: Optimizer, *_: Any) -> None:
            if get_ident() == recorder:
                self.ran[id(optimizer)] = optimizer
                # A counter on the CPU would be left behind by a replay, so this is refused while recording.
                _check_counters(optimizer)

        def noting(init: Any) -> Any:
            @functools.wraps(init)
            def make(module: nn.Module, *args: Any, **kwargs: Any) -> None:
                if get_ident() == recorder:
                    self.made[id(module)] = module
                init(module, *args, **kwargs)

            return make

        # ``nn.Module.__init__`` for the length of the recording: torch has no hook for a module that is made.
        patches.replace("torch.nn.Module", "__init__", noting)
        hooks = [
            nn.modules.module.register_module_forward_pre_hook(ran),
            register_optimizer_step_pre_hook(stepped),
        ]
        try:
            yield
        finally:
            patches.restore("torch.nn.Module", "__init__")
            for hook in hooks:
                hook.remove()


def _check_counters(optimizer: Optimizer) -> None:
    """Raise if the optimizer counts its steps on the CPU, where a replay would not count."""
    # torch counts steps on the device only with ``capturable=True``, or where the optimizer is fused.
    if any(not group.get("capturable", True) and not group.get("fused") for group in optimizer.param_groups):
        raise JitError(
            f"isthmus.jit: {type(optimizer).__name__} counts its steps in a tensor on the CPU, which a replay "
            f"would not change; make it with capturable=True, which keeps the count on the device"
        )


def _reached_by(function: Any) -> Iterable[tuple[Any, Any]]:
    """Return the values that a function's object, arguments, closure and globals hold, each with its place."""
    if isinstance(function, functools.partial):
        return [("func", function.func), ("args", function.args), ("keywords", function.keywords)]
    if isinstance(function, MethodType):
        return [("func", function.__func__), ("self", function.__self__)]
    name = function.__code__.co_filename
    # Code of a library: it reaches what it was made with, never the user's model.
    if (OWNERS[name] if name in OWNERS else owner(name)) is not None:
        # torch.no_grad()(f) is torch's, and f is not.
        return [("wrapped", getattr(function, "__wrapped__", None))]
    reached: list[tuple[Any, Any]] = [
        ("defaults", function.__defaults__),
        ("kwdefaults", function.__kwdefaults__),
    ]
    for variable, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        with contextlib.suppress(ValueError):  # a cell that is still empty
            reached.append((variable, cell.cell_contents))
    scope = function.__globals__
    # Only the names that its code looks up; a module's globals are everything it has imported.
    return [*reached, *[(("global", n), scope[n]) for n in _names(function.__code__) if n in scope]]


_CODES = 4096


# An entry keeps the code object, so there is a bound: a program that makes functions by ``exec`` has ever new ones.
@functools.lru_cache(_CODES)
def _names(code: CodeType) -> tuple[str, ...]:
    """Return the names a function and those defined in it look up."""
    inner = [name for const in code.co_consts if isinstance(const, CodeType) for name in _names(const)]
    return tuple(dict.fromkeys([*code.co_names, *inner]))


_caches.register("names in code", _CODES, lambda: _names.cache_info().currsize, _names.cache_clear)


def _held_by(value: Any) -> Iterable[tuple[Any, Any]]:
    if isinstance(value, dict):
        return list(value.items())
    if isinstance(value, (list, tuple, set, frozenset)):
        return enumerate(value)
    return list(vars(value).items()) if hasattr(value, "__dict__") else ()


def _tensors(values: dict[Any, Any]) -> list[Tensor]:
    return [value for value in values.values() if isinstance(value, Tensor)]
