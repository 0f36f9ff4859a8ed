"""Optimizers of optax's with the interface of ``torch.optim``: ``isthmus.optax.Optimizer(model.parameters(), ...)``."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import jax
import optax
import torch
from torch import Tensor

from isthmus._interop.functions import jax_function
from isthmus.errors import IsthmusError


class Optimizer(torch.optim.Optimizer):
    """A gradient transformation of optax's that steps the parameters of torch modules.

    A parameter group may have its own under the name ``transformation``. What the transformation keeps is in ``state``,
    under the first parameter of the group, by its place in optax's own state. If it was made by
    ``optax.inject_hyperparams``, the group's ``lr`` is its learning rate, so schedulers of torch's work.
    """

    def __init__(self, params: Iterable[Any], transformation: optax.GradientTransformation) -> None:
        self._groups: list[Group] = []
        self._default = transformation
        super().__init__(params, {})

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters, with a transformation of their own if the group has one."""
        own = param_group.pop("transformation", self._default)
        super().add_param_group(param_group)
        self._groups.append(Group(own))

    @torch.no_grad()
    def start(self) -> None:
        """Make the state that the first step would make, if every parameter that can have a gradient gets one."""
        for settings, group in zip(self.param_groups, self._groups, strict=True):
            params = [p for p in settings["params"] if p.requires_grad]
            if params and not group.count:
                group.start(params, settings, self.state[settings["params"][0]])
                group.is_guessed = True

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None, **extra: Any) -> Any:  # type: ignore[override]
        """Step every parameter that has a gradient; ``extra`` is passed to the transformation's update."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for settings, group in zip(self.param_groups, self._groups, strict=True):
            params = [p for p in settings["params"] if p.grad is not None]
            if params:
                state = self.state[settings["params"][0]]
                group.start(params, settings, state)
                group.step(params, settings, state, extra)
        return loss

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from a state that ``state_dict`` returned; nothing is cast."""
        wanted = [len(settings["params"]) for settings in self.param_groups]
        found = [len(settings["params"]) for settings in state_dict["param_groups"]]
        if wanted != found:
            raise ValueError(
                f"the state is of groups of {found} parameters, the optimizer has groups of {wanted}"
            )
        for settings, saved in zip(self.param_groups, state_dict["param_groups"], strict=True):
            settings.update({name: value for name, value in saved.items() if name != "params"})
            first = settings["params"][0]
            kept = state_dict["state"].get(saved["params"][0], {})
            self.state[first] = {name: _like(value, first) for name, value in kept.items()}
        self._groups = [Group(group.transformation) for group in self._groups]


class Group:
    """A transformation and the structure of its state."""

    def __init__(self, transformation: optax.GradientTransformation) -> None:
        self.transformation = transformation
        self.count = 0
        self.is_guessed = False
        self.names: list[str] = []
        self.spec: Any = None
        self._update = jax_function(self._updated)

    def start(self, params: list[Tensor], settings: dict[str, Any], state: dict[str, Any]) -> None:
        """Make the state at the first step, or see that what was loaded fits."""
        if self.is_guessed and self.count != len(params):
            self.count = 0
            state.clear()
        self.is_guessed = False
        if self.count:
            if self.count != len(params):
                raise IsthmusError(
                    f"isthmus.optax: {len(params)} parameters of a group have gradients, and {self.count} had at its "
                    f"first step; give the others gradients of zero, or a group of their own"
                )
            return
        found = jax_function(self.transformation.init)(params)
        leaves, self.spec = jax.tree.flatten_with_path(found)
        self.names = [jax.tree_util.keystr(path) for path, _ in leaves]
        if state and set(state) != set(self.names):
            strange = sorted(set(state) ^ set(self.names))
            raise IsthmusError(
                f"isthmus.optax: the loaded state is another transformation's: {', '.join(strange)}"
            )
        if not state:
            state.update({name: leaf for name, (_, leaf) in zip(self.names, leaves, strict=True)})
        self.count = len(params)
        rate = self._rate()
        if rate is not None:
            settings.setdefault("lr", state[rate].item())

    def _rate(self) -> str | None:
        """Return the name of the learning rate in the state, if it is there."""
        return next((name for name in self.names if name.endswith("hyperparams['learning_rate']")), None)

    def step(self, params: list[Tensor], settings: dict[str, Any], state: dict[str, Any], extra: Any) -> None:
        """Write new values into the parameters and the state."""
        rate = self._rate()
        if rate is not None:
            state[rate].fill_(settings["lr"])
        kept = [state[name] for name in self.names]
        found = self._update([p.grad for p in params], kept, params, extra)
        torch._foreach_copy_([*params, *kept], found)

    def _updated(self, grads: Any, kept: Any, params: Any, extra: Any) -> Any:
        state = jax.tree.unflatten(self.spec, kept)
        update = optax.with_extra_args_support(self.transformation).update
        updates, state = update(grads, state, params, **extra)
        return [*optax.apply_updates(params, updates), *jax.tree.leaves(state)]


def _like(value: Any, parameter: Tensor) -> Any:
    return value.to(parameter.device, copy=True) if isinstance(value, Tensor) else value
