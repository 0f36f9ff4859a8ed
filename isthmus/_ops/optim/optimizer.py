"""Fused optimizer steps: every parameter of a group in one program, the hyperparameters run-time inputs."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from isthmus._graph.names import aten
from isthmus._ops.common import Array, accumulation_dtype, cast
from isthmus._ops.registry import lowering

Arrays = list[Any]


def _gradient(grad: Array, wide: Any, grad_scale: Array | None, maximize: bool) -> tuple[Array, Array]:
    """Return a gradient unscaled and turned for descent, and the unscaled one as it is written back."""
    unscaled = cast(grad, wide)
    if grad_scale is not None:
        unscaled = unscaled / cast(grad_scale, wide).reshape(())
    return -unscaled if maximize else unscaled, cast(unscaled, grad.dtype)


def _unless(found_inf: Array | None, new: Sequence[Arrays], old: Sequence[Arrays]) -> list[Arrays]:
    """Return the new state, or the old one where a gradient was not finite."""
    if found_inf is None:
        return list(new)
    skip = found_inf.reshape(()) != 0
    return [
        [jnp.where(skip, before, after) for after, before in zip(a, b, strict=True)]
        for a, b in zip(new, old, strict=True)
    ]


def _wide(param: Array) -> np.dtype[Any]:
    return accumulation_dtype(param.dtype)


def _adam_step(
    index: int,
    lists: tuple[Arrays, Arrays, Arrays, Arrays, Arrays, Arrays],
    numbers: dict[str, Any],
    decoupled: bool,
) -> tuple[Array, Array, Array, Array, Array | None]:
    """One parameter's step: parameter, gradient, moments, and the largest second moment if asked."""
    params, grads, averages, squares, largest, steps = lists
    wide = _wide(params[index])
    lr, beta2, decay, eps = (cast(numbers[n], wide) for n in ("lr", "beta2", "weight_decay", "eps"))
    grad, unscaled = _gradient(grads[index], wide, numbers["grad_scale"], numbers["maximize"])
    param = cast(params[index], wide)
    if decoupled:
        param = param - lr * decay * param
    else:
        grad = grad + decay * param
    average = cast(averages[index], wide)
    average = average + _rest(numbers["beta1"], wide) * (grad - average)
    square = beta2 * cast(squares[index], wide) + _rest(numbers["beta2"], wide) * grad * grad
    correction1, correction2 = (_correction(numbers[n], steps[index], wide) for n in ("beta1", "beta2"))
    peak = jnp.maximum(cast(largest[index], wide), square) if numbers["amsgrad"] else None
    root = jnp.sqrt(square if peak is None else peak) / jnp.sqrt(correction2) + eps
    param = param - lr / correction1 * average / root
    moments = cast(average, averages[index].dtype), cast(square, squares[index].dtype)
    kept = None if peak is None else cast(peak, largest[index].dtype)
    return cast(param, params[index].dtype), unscaled, *moments, kept


def _rest(share: Any, wide: Any) -> Array:
    """Return one minus a number, from float64: in float32 the difference of 1 and 0.999 loses its digits."""
    return (1 - cast(share, np.float64)).astype(wide)


def _correction(base: Any, step: Array, wide: Any) -> Array:
    """Return one minus a beta's power."""
    return _rest(jnp.power(cast(base, np.float64), cast(step, np.float64).reshape(())), wide)


_ADAM = ("lr", "beta1", "beta2", "weight_decay", "eps")


def _adam(
    decoupled: bool,
    self: Arrays,
    grads: Arrays,
    exp_avgs: Arrays,
    exp_avg_sqs: Arrays,
    max_exp_avg_sqs: Arrays,
    state_steps: Arrays,
    lr: Any,
    beta1: Any,
    beta2: Any,
    weight_decay: Any,
    eps: Any,
    amsgrad: bool,
    maximize: bool,
    grad_scale: Array | None = None,
    found_inf: Array | None = None,
) -> list[Arrays]:
    """A step of Adam; AdamW where the weight decay is decoupled."""
    lists = (self, grads, exp_avgs, exp_avg_sqs, max_exp_avg_sqs, state_steps)
    numbers = {
        "lr": lr,
        "beta1": beta1,
        "beta2": beta2,
        "weight_decay": weight_decay,
        "eps": eps,
        "amsgrad": amsgrad,
        "maximize": maximize,
        "grad_scale": grad_scale,
    }
    columns = list(zip(*[_adam_step(i, lists, numbers, decoupled) for i in range(len(self))], strict=True))
    new = [list(column) for column in columns]
    if not amsgrad:
        new[4] = max_exp_avg_sqs
    return _unless(found_inf, new, lists[:5])


for _packet, _decoupled in ((aten._fused_adam, False), (aten._fused_adamw, True)):
    lowering(_packet.default, _packet.tensor_lr, dynamic=_ADAM)(functools.partial(_adam, _decoupled))


@lowering(
    aten._fused_sgd.default,
    aten._fused_sgd.tensor_lr,
    dynamic=("lr", "weight_decay", "momentum", "dampening"),
)
def sgd(
    self: Arrays,
    grads: Arrays,
    momentum_buffer_list: Arrays,
    weight_decay: Any,
    momentum: Any,
    lr: Any,
    dampening: Any,
    nesterov: bool,
    maximize: bool,
    is_first_step: bool,
    grad_scale: Array | None = None,
    found_inf: Array | None = None,
) -> list[Arrays]:
    """A step of gradient descent with momentum where there are buffers for it."""
    params, written, buffers = [], [], []
    for index, old in enumerate(self):
        wide = _wide(old)
        grad, unscaled = _gradient(grads[index], wide, grad_scale, maximize)
        param = cast(old, wide)
        grad = grad + cast(weight_decay, wide) * param
        if momentum_buffer_list:
            factor, buffer = cast(momentum, wide), momentum_buffer_list[index]
            moved = factor * cast(buffer, wide) + _rest(dampening, wide) * grad
            moved = grad if is_first_step else moved
            grad = grad + factor * moved if nesterov else moved
            buffers.append(cast(moved, buffer.dtype))
        params.append(cast(param - cast(lr, wide) * grad, old.dtype))
        written.append(unscaled)
    return _unless(found_inf, [params, written, buffers], [self, grads, momentum_buffer_list])


def _adagrad(
    with_steps: bool,
    self: Arrays,
    grads: Arrays,
    state_sums: Arrays,
    state_steps: Arrays,
    lr: Any,
    lr_decay: Any,
    weight_decay: Any,
    eps: Any,
    maximize: bool,
    grad_scale: Array | None = None,
    found_inf: Array | None = None,
) -> list[Arrays]:
    """A step of Adagrad."""
    params, written, sums = [], [], []
    for index, old in enumerate(self):
        wide = _wide(old)
        grad, unscaled = _gradient(grads[index], wide, grad_scale, maximize)
        param = cast(old, wide)
        grad = grad + cast(weight_decay, wide) * param
        total = cast(state_sums[index], wide) + grad * grad
        slower = 1 + (cast(state_steps[index], np.float64).reshape(()) - 1) * cast(lr_decay, np.float64)
        rate = cast(cast(lr, np.float64) / slower, wide)
        params.append(cast(param - rate * grad / (jnp.sqrt(total) + cast(eps, wide)), old.dtype))
        written.append(unscaled)
        sums.append(cast(total, state_sums[index].dtype))
    found = _unless(found_inf, [params, written, sums], [self, grads, state_sums])
    return [*found, state_steps] if with_steps else found


_ADAGRAD = ("lr", "lr_decay", "weight_decay", "eps")
# Of its two functional forms, only the first returns the step counts.
lowering(aten._fused_adagrad.default, dynamic=_ADAGRAD)(functools.partial(_adagrad, True))
lowering(aten._fused_adagrad.tensor_lr, dynamic=_ADAGRAD)(functools.partial(_adagrad, False))
