"""``isthmus.optax.Optimizer``: a gradient transformation of optax's with the interface of ``torch.optim``.

The state of a transformation is a pytree of arrays. torch expects an optimizer's state as tensors in
``optimizer.state[parameter][name]``, and ``state_dict`` saves them from there, so each leaf of the pytree becomes a
tensor named by its path, under the first parameter of the group::

    optimizer.state[first_parameter] == {"0/count": ..., "0/mu/0": ..., "0/nu/0": ...}      # optax.adam, one parameter

A step calls the transformation's ``update`` as a ``jax_function`` on gradients, state and parameters, and copies the
results into the tensors, so it runs in every mode and is one program with the rest under ``isthmus.train_step``.

The structure of the state depends on which parameters have gradients: a parameter that gets its first gradient later
has no place in it, and is refused. ``Optimizer.start`` (called by ``train_step``) creates the state before the first
backward and assumes that every parameter that requires a gradient gets one; the first step replaces that state if
the assumption was wrong.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import jax
import optax
import torch
from jax.tree_util import PyTreeDef
from torch import Tensor

from isthmus._interop.functions import jax_function
from isthmus.errors import IsthmusError

Array = jax.Array


class Optimizer(torch.optim.Optimizer):
    """A gradient transformation of optax's that steps the parameters of torch modules.

    Arguments:
        params: parameters, or parameter groups, as for every ``torch.optim.Optimizer``. A group may have a
            transformation of its own under the name ``transformation``.
        transformation: the ``optax.GradientTransformation`` of the other groups. If it was made by
            ``optax.inject_hyperparams``, the group's ``lr`` is its learning rate, so schedulers of torch's work.

    Returns:
        A ``torch.optim.Optimizer``.

    Example:
        >>> import optax, torch, isthmus
        >>> weight = torch.ones(2, device="jax", requires_grad=True)
        >>> optimizer = isthmus.optax.Optimizer([weight], optax.sgd(0.5))
        >>> weight.sum().backward()
        >>> optimizer.step()
        >>> weight.tolist()
        [0.5, 0.5]
    """

    def __init__(self, params: Iterable[Any], transformation: optax.GradientTransformation) -> None:
        if not callable(getattr(transformation, "update", None)):
            raise TypeError(
                "isthmus.optax.Optimizer takes a transformation of optax's, such as optax.adam(1e-3), "
                f"not {type(transformation).__name__}"
            )
        self._groups: list[Group] = []
        self._default = transformation
        super().__init__(params, {})

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters, with a transformation of their own if the group has one."""
        transformation = param_group.pop("transformation", self._default)
        super().add_param_group(param_group)
        self._groups.append(Group(transformation))
        rate = _learning_rate(transformation)
        if rate is not None:
            self.param_groups[-1].setdefault("lr", rate)

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_groups": self._groups, "_default": self._default}

    @torch.no_grad()
    def start(self) -> None:
        """Create the state before the first step, as if every parameter that can have a gradient had one."""
        for settings, group in zip(self.param_groups, self._groups, strict=True):
            positions = [n for n, p in enumerate(settings["params"]) if p.requires_grad]
            if positions and group.layout is None:
                group.start(positions, settings, self.state[settings["params"][0]])
                group.is_guessed = True

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None, **extra: Any) -> Any:  # type: ignore[override]
        """Step every parameter that has a gradient; return the loss of ``closure``, if there is one.

        ``extra`` is passed to the transformation's update.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for settings, group in zip(self.param_groups, self._groups, strict=True):
            positions = [n for n, p in enumerate(settings["params"]) if p.grad is not None]
            if positions:
                state = self.state[settings["params"][0]]
                layout = group.start(positions, settings, state)
                group.step(layout, settings, state, extra)
        return loss

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Replace the state by one that ``state_dict`` returned; unlike torch's optimizers, nothing is cast."""
        expected = [len(settings["params"]) for settings in self.param_groups]
        saved_counts = [len(settings["params"]) for settings in state_dict["param_groups"]]
        if expected != saved_counts:
            raise ValueError(
                f"the state is of groups of {saved_counts} parameters, the optimizer has groups of {expected}"
            )
        for settings, saved in zip(self.param_groups, state_dict["param_groups"], strict=True):
            settings.update({name: value for name, value in saved.items() if name != "params"})
            first = settings["params"][0]
            values = state_dict["state"].get(saved["params"][0], {})
            self.state[first] = {name: _copied_to(value, first) for name, value in values.items()}
        # The layouts are computed again at the next step, which compares them with the loaded names.
        self._groups = [Group(group.transformation) for group in self._groups]


@dataclass(frozen=True)
class StateUpdate:
    """The names of the leaves of a transformation's state, by their paths, and the update for a state like that.

    ``update(grads, leaves, params, extra)`` returns new parameters, then the leaves of the new state.
    """

    names: list[str]
    update: Callable[..., list[Tensor]]


class Group:
    """The transformation of a parameter group, and the layout of its state once that exists."""

    def __init__(self, transformation: optax.GradientTransformation) -> None:
        self.transformation = transformation
        self.layout: StateUpdate | None = None
        # Whether Optimizer.start created the state, before gradients showed which parameters step.
        self.is_guessed = False

    def __deepcopy__(self, memo: Any) -> Group:
        """Return a group without a layout, which its first step computes: traces are not shared."""
        return Group(self.transformation)

    def start(self, positions: list[int], settings: dict[str, Any], state: dict[str, Any]) -> StateUpdate:
        """Return the layout of the state; create the state at the first step, and check later that it still fits.

        ``positions`` are those of the parameters to step. Those of the first step are in ``settings["stepped"]``, among
        the group's settings, so that ``state_dict`` saves them.
        """
        if self.is_guessed and settings["stepped"] != positions:
            self.layout = None
            state.clear()
        self.is_guessed = False
        before = settings.setdefault("stepped", positions) if state else positions
        if before != positions:
            raise IsthmusError(
                f"isthmus.optax: parameters {_listed(positions)} of a group have gradients, and {_listed(before)} had "
                f"at its first step; give the others gradients of zero, or a group of their own"
            )
        if self.layout is not None:
            return self.layout
        settings["stepped"] = positions
        initial = jax_function(self.transformation.init)([settings["params"][n] for n in positions])
        leaves, tree = jax.tree.flatten_with_path(initial)
        names = [jax.tree_util.keystr(path, simple=True, separator="/") for path, _ in leaves]
        self.layout = StateUpdate(names, jax_function(_update_of(self.transformation, tree)))
        if state and set(state) != set(names):
            strange = ", ".join(sorted(set(state) ^ set(names)))
            raise IsthmusError(f"isthmus.optax: the loaded state is another transformation's: {strange}")
        if not state:
            state.update({name: leaf for name, (_, leaf) in zip(names, leaves, strict=True)})
        return self.layout

    def step(
        self, layout: StateUpdate, settings: dict[str, Any], state: dict[str, Any], extra: dict[str, Any]
    ) -> None:
        """Write new values into the parameters and the state."""
        params = [settings["params"][n] for n in settings["stepped"]]
        for name in layout.names:
            if name.endswith("hyperparams/learning_rate") and "lr" in settings:
                state[name].fill_(settings["lr"])
        tensors = [state[name] for name in layout.names]
        values = layout.update([p.grad for p in params], tensors, params, extra)
        torch._foreach_copy_([*params, *tensors], values)


def _update_of(
    transformation: optax.GradientTransformation, tree: PyTreeDef
) -> Callable[[list[Array], list[Array], list[Array], dict[str, Any]], list[Array]]:
    """Return a step as a function of arrays; ``tree`` is the structure of the transformation's state."""

    def update(
        grads: list[Array], leaves: list[Array], params: list[Array], extra: dict[str, Any]
    ) -> list[Array]:
        state = jax.tree.unflatten(tree, leaves)
        step = optax.with_extra_args_support(transformation).update
        updates, state = step(grads, state, params, **extra)
        return [*optax.apply_updates(params, updates), *jax.tree.leaves(state)]

    return update


def _learning_rate(transformation: optax.GradientTransformation) -> float | None:
    """Return the learning rate that ``optax.inject_hyperparams`` put into the state, or None without one."""
    # Its state alone has hyperparams, and creating the state of any transformation would cost a program each.
    if "inject_hyperparams" not in getattr(transformation.init, "__qualname__", ""):
        return None
    state = transformation.init([jax.numpy.zeros(1)])
    return float(state.hyperparams["learning_rate"]) if "learning_rate" in state.hyperparams else None


def _listed(positions: list[int]) -> str:
    return ", ".join(str(position) for position in positions)


def _copied_to(value: Any, parameter: Tensor) -> Any:
    return value.to(parameter.device, copy=True) if isinstance(value, Tensor) else value
