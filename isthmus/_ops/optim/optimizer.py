"""Fused optimizer steps: every parameter of a group in one program, the hyperparameters run-time inputs."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import jax.numpy as jnp
import numpy as np

from isthmus._graph.names import aten
from isthmus._ops.common import Array, DType, Operand, Scalar, accumulation_dtype, cast
from isthmus._ops.registry import lowering

Arrays = list[Array]


def _gradient(grad: Array, acc_dtype: DType, grad_scale: Array | None, maximize: bool) -> tuple[Array, Array]:
    """Return a gradient unscaled and turned for descent, and the unscaled one as it is written back."""
    unscaled = cast(grad, acc_dtype)
    if grad_scale is not None:
        unscaled = unscaled / cast(grad_scale, acc_dtype).reshape(())
    # torch writes the unscaled gradient back to `.grad`.
    return -unscaled if maximize else unscaled, cast(unscaled, grad.dtype)


def _unless(found_inf: Array | None, new: Sequence[Arrays], old: Sequence[Arrays]) -> list[Arrays]:
    """Return the new state, or the old one where a gradient was not finite."""
    if found_inf is None:
        return list(new)
    # A step that overflowed must leave every moment as it was, so the choice is made for all of them.
    skip = found_inf.reshape(()) != 0
    return [
        [jnp.where(skip, before, after) for after, before in zip(a, b, strict=True)]
        for a, b in zip(new, old, strict=True)
    ]


def _rest(share: Operand, acc_dtype: DType) -> Array:
    """Return one minus a number, from float64: in float32 the difference of 1 and 0.999 loses its digits."""
    return (1 - cast(share, np.float64)).astype(acc_dtype)


def _correction(base: Operand, step: Array, acc_dtype: DType) -> Array:
    """Return one minus a beta's power."""
    return _rest(jnp.power(cast(base, np.float64), cast(step, np.float64).reshape(())), acc_dtype)


_ADAM = ("lr", "beta1", "beta2", "weight_decay", "eps")


def _adam(
    decoupled: bool,
    self: Arrays,
    grads: Arrays,
    exp_avgs: Arrays,
    exp_avg_sqs: Arrays,
    max_exp_avg_sqs: Arrays,
    state_steps: Arrays,
    lr: Operand,
    beta1: Scalar,
    beta2: Scalar,
    weight_decay: Scalar,
    eps: Scalar,
    amsgrad: bool,
    maximize: bool,
    grad_scale: Array | None = None,
    found_inf: Array | None = None,
) -> list[Arrays]:
    """A step of Adam; AdamW where the weight decay is decoupled."""
    new: list[Arrays] = [[], [], [], [], []]
    for i, old in enumerate(self):
        dtype = accumulation_dtype(old.dtype)
        rate, decay, param = cast(lr, dtype), cast(weight_decay, dtype), cast(old, dtype)
        grad, unscaled = _gradient(grads[i], dtype, grad_scale, maximize)
        if decoupled:
            param = param - rate * decay * param
        else:
            grad = grad + decay * param
        average = cast(exp_avgs[i], dtype)
        average = average + _rest(beta1, dtype) * (grad - average)
        square = cast(beta2, dtype) * cast(exp_avg_sqs[i], dtype) + _rest(beta2, dtype) * grad * grad
        largest = jnp.maximum(cast(max_exp_avg_sqs[i], dtype), square) if amsgrad else square
        # The moments start at zero, so early averages are divided by the weight that their terms have.
        correction1, correction2 = (_correction(beta, state_steps[i], dtype) for beta in (beta1, beta2))
        root = jnp.sqrt(largest) / jnp.sqrt(correction2) + cast(eps, dtype)
        new[0].append(cast(param - rate / correction1 * average / root, old.dtype))
        new[1].append(unscaled)
        new[2].append(cast(average, exp_avgs[i].dtype))
        new[3].append(cast(square, exp_avg_sqs[i].dtype))
        new[4] += [cast(largest, max_exp_avg_sqs[i].dtype)] if amsgrad else []
    old_state = [self, grads, exp_avgs, exp_avg_sqs, max_exp_avg_sqs]
    return _unless(found_inf, [*new[:4], new[4] if amsgrad else max_exp_avg_sqs], old_state)


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
    weight_decay: Scalar,
    momentum: Scalar,
    lr: Operand,
    dampening: Scalar,
    nesterov: bool,
    maximize: bool,
    is_first_step: bool,
    grad_scale: Array | None = None,
    found_inf: Array | None = None,
) -> list[Arrays]:
    """A step of gradient descent with momentum where there are buffers for it."""
    params, written, buffers = [], [], []
    for index, old in enumerate(self):
        acc_dtype = accumulation_dtype(old.dtype)
        grad, unscaled = _gradient(grads[index], acc_dtype, grad_scale, maximize)
        param = cast(old, acc_dtype)
        grad = grad + cast(weight_decay, acc_dtype) * param
        if momentum_buffer_list:
            factor, buffer = cast(momentum, acc_dtype), momentum_buffer_list[index]
            moved = factor * cast(buffer, acc_dtype) + _rest(dampening, acc_dtype) * grad
            # torch starts the buffer with the first gradient, undampened.
            moved = grad if is_first_step else moved
            grad = grad + factor * moved if nesterov else moved
            buffers.append(cast(moved, buffer.dtype))
        params.append(cast(param - cast(lr, acc_dtype) * grad, old.dtype))
        written.append(unscaled)
    return _unless(found_inf, [params, written, buffers], [self, grads, momentum_buffer_list])


def _adagrad(
    with_steps: bool,
    self: Arrays,
    grads: Arrays,
    state_sums: Arrays,
    state_steps: Arrays,
    lr: Operand,
    lr_decay: Scalar,
    weight_decay: Scalar,
    eps: Scalar,
    maximize: bool,
    grad_scale: Array | None = None,
    found_inf: Array | None = None,
) -> list[Arrays]:
    """A step of Adagrad."""
    params, written, sums = [], [], []
    for index, old in enumerate(self):
        acc_dtype = accumulation_dtype(old.dtype)
        grad, unscaled = _gradient(grads[index], acc_dtype, grad_scale, maximize)
        param = cast(old, acc_dtype)
        grad = grad + cast(weight_decay, acc_dtype) * param
        total = cast(state_sums[index], acc_dtype) + grad * grad
        slower = 1 + (cast(state_steps[index], np.float64).reshape(()) - 1) * cast(lr_decay, np.float64)
        rate = cast(cast(lr, np.float64) / slower, acc_dtype)
        params.append(cast(param - rate * grad / (jnp.sqrt(total) + cast(eps, acc_dtype)), old.dtype))
        written.append(unscaled)
        sums.append(cast(total, state_sums[index].dtype))
    new = _unless(found_inf, [params, written, sums], [self, grads, state_sums])
    return [*new, state_steps] if with_steps else new


_ADAGRAD = ("lr", "lr_decay", "weight_decay", "eps")
# Of its two functional forms, only the first returns the step counts.
lowering(aten._fused_adagrad.default, dynamic=_ADAGRAD)(functools.partial(_adagrad, True))
lowering(aten._fused_adagrad.tensor_lr, dynamic=_ADAGRAD)(functools.partial(_adagrad, False))
