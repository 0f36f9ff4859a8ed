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

    The transformation's state is in ``state``, under the first parameter of the group, by its place in optax's own
    state. If it was made by ``optax.inject_hyperparams``, the group's ``lr`` is its learning rate, so schedulers of
    torch's work.

    Arguments:
        params: parameters or parameter groups; a group may have its own ``transformation``.
        transformation: of optax's, such as ``optax.adamw(1e-3)``.

    Returns:
        A ``torch.optim.Optimizer``.

    Example:
        >>> import optax, torch, isthmus
        >>> weight = torch.zeros(2, device="jax", requires_grad=True)
        >>> optimizer = isthmus.optax.Optimizer([weight], optax.sgd(0.5))
        >>> weight.sum().backward()
        >>> optimizer.step()
        >>> weight.tolist()
        [-0.5, -0.5]
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
        rate = _learning_rate(own)
        if rate is not None:
            self.param_groups[-1].setdefault("lr", rate)

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_groups": self._groups, "_default": self._default}

    @torch.no_grad()
    def start(self) -> None:
        """Make the state that the first step would make, if every parameter that can have a gradient gets one."""
        for settings, group in zip(self.param_groups, self._groups, strict=True):
            trained = [n for n, p in enumerate(settings["params"]) if p.requires_grad]
            if trained and not group.names:
                group.start(trained, settings, self.state[settings["params"][0]])
                group.is_guessed = True

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None, **extra: Any) -> Any:  # type: ignore[override]
        """Step every parameter that has a gradient; ``extra`` is passed to the transformation's update."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for settings, group in zip(self.param_groups, self._groups, strict=True):
            trained = [n for n, p in enumerate(settings["params"]) if p.grad is not None]
            if trained:
                state = self.state[settings["params"][0]]
                group.start(trained, settings, state)
                group.step(settings, state, extra)
        return loss

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from a state that ``state_dict`` returned; nothing is cast."""
        ours = [len(settings["params"]) for settings in self.param_groups]
        saved_sizes = [len(settings["params"]) for settings in state_dict["param_groups"]]
        if ours != saved_sizes:
            raise ValueError(
                f"the state is of groups of {saved_sizes} parameters, the optimizer has groups of {ours}"
            )
        for settings, saved in zip(self.param_groups, state_dict["param_groups"], strict=True):
            settings.update({name: value for name, value in saved.items() if name != "params"})
            first = settings["params"][0]
            state = state_dict["state"].get(saved["params"][0], {})
            self.state[first] = {name: _like(value, first) for name, value in state.items()}
        self._groups = [Group(group.transformation) for group in self._groups]


class Group:
    """A transformation and the structure of its state."""

    def __init__(self, transformation: optax.GradientTransformation) -> None:
        self.transformation = transformation
        self.is_guessed = False
        self.names: list[str] = []
        self.spec: Any = None
        self._update = jax_function(self._updated)

    def __deepcopy__(self, memo: Any) -> Group:
        """Return a group of its own; it finds the structure of its state again."""
        return Group(self.transformation)

    def start(self, trained: list[int], settings: dict[str, Any], state: dict[str, Any]) -> None:
        """Make the state at the first step, or check that the state there is fits.

        Arguments:
            trained: which parameters of the group, by number, have a gradient.
            settings: the parameter group; ``settings["stepped"]`` are the numbers the state was made for.
            state: the group's state, filled here.
        """
        # ``Optimizer.start`` made the state before the first backward, for every parameter that requires grad.
        if self.is_guessed and settings["stepped"] != trained:
            self.names = []
            state.clear()
        self.is_guessed = False
        before = settings.setdefault("stepped", trained) if state else trained
        if before != trained:
            raise IsthmusError(
                f"isthmus.optax: parameters {_listed(trained)} of a group have gradients, and {_listed(before)} had at "
                f"its first step; give the others gradients of zero, or a group of their own"
            )
        if self.names:
            return
        settings["stepped"] = trained
        fresh = jax_function(self.transformation.init)([settings["params"][n] for n in trained])
        leaves, self.spec = jax.tree.flatten_with_path(fresh)
        self.names = [jax.tree_util.keystr(path, simple=True, separator="/") for path, _ in leaves]
        if state and set(state) != set(self.names):
            strange = ", ".join(sorted(set(state) ^ set(self.names)))
            raise IsthmusError(f"isthmus.optax: the loaded state is another transformation's: {strange}")
        if not state:
            state.update({name: leaf for name, (_, leaf) in zip(self.names, leaves, strict=True)})

    def step(self, settings: dict[str, Any], state: dict[str, Any], extra: Any) -> None:
        """Write new values into the parameters and the state."""
        params = [settings["params"][n] for n in settings["stepped"]]
        for name in self.names:
            if name.endswith("hyperparams/learning_rate") and "lr" in settings:
                state[name].fill_(settings["lr"])
        leaves = [state[name] for name in self.names]
        updated = self._update([p.grad for p in params], leaves, params, extra)
        torch._foreach_copy_([*params, *leaves], updated)

    def _updated(self, grads: Any, leaves: Any, params: Any, extra: Any) -> Any:
        state = jax.tree.unflatten(self.spec, leaves)
        update = optax.with_extra_args_support(self.transformation).update
        updates, state = update(grads, state, params, **extra)
        return [*optax.apply_updates(params, updates), *jax.tree.leaves(state)]


def _learning_rate(transformation: optax.GradientTransformation) -> float | None:
    """Return the learning rate that ``optax.inject_hyperparams`` put into the state, if it did."""
    if "inject_hyperparams" not in getattr(transformation.init, "__qualname__", ""):
        return None
    state = transformation.init([jax.numpy.zeros(1)])
    return float(state.hyperparams["learning_rate"]) if "learning_rate" in state.hyperparams else None


def _listed(places: list[int]) -> str:
    return ", ".join(str(place) for place in places)


def _like(value: Any, parameter: Tensor) -> Any:
    return value.to(parameter.device, copy=True) if isinstance(value, Tensor) else value
