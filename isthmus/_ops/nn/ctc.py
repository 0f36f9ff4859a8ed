"""Connectionist temporal classification: sums over alignments, in logarithms, by one scan over time."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp

from isthmus._graph.names import aten
from isthmus._ops.common import FLOAT32_OR_64, Array
from isthmus._ops.registry import lowering
from isthmus.errors import Unsupported

Lengths = Sequence[int] | Array
"""Lengths of sequences: known before the program runs, or an array."""


def _rows(targets: Array, lengths: Array, width: int) -> Array:
    """Return the targets one row a sequence, ``width`` wide; they may come one sequence after the other."""
    if not width or not targets.size:
        return jnp.zeros((lengths.shape[0], width), targets.dtype)
    place = jnp.arange(width)
    if targets.ndim == 2:
        return targets[:, jnp.minimum(place, targets.shape[1] - 1)]
    start = jnp.cumsum(lengths) - lengths
    return targets[jnp.clip(start[:, None] + place, 0, targets.shape[0] - 1)]


def _states(targets: Array, lengths: Array, width: int, blank: int) -> Array:
    """Return the class of each state: the targets, with a blank before, between and after them."""
    rows = _rows(targets, lengths, width)
    blanks = jnp.full((rows.shape[0], width + 1), blank, rows.dtype)
    pairs = jnp.stack([blanks[:, :-1], rows], 2).reshape(rows.shape[0], 2 * width)
    return jnp.concatenate([pairs, blanks[:, -1:]], 1)


def _skips(states: Array) -> Array:
    """Return whether a path may go to each state from the one before the last."""
    # A path may skip the blank between two targets that differ; two blanks are equal, so none is skipped to.
    differs = states[:, 2:] != states[:, :-2]
    return jnp.concatenate([jnp.zeros((states.shape[0], min(2, states.shape[1])), bool), differs], 1)


def _moved(x: Array, by: int, fill: float) -> Array:
    """Return ``x`` with its columns moved up by ``by`` places, or down if negative, and ``fill`` moved in."""
    edges = (max(by, 0), max(-by, 0))
    padded = jnp.pad(x, ((0, 0), edges), constant_values=fill)
    return padded[:, : x.shape[1]] if by > 0 else padded[:, -by:]


def _log_sum(*terms: Array) -> Array:
    return jax.nn.logsumexp(jnp.stack(terms), axis=0)


def _emissions(log_probs: Array, states: Array) -> Array:
    """Return the log probability of each state at each time: times, sequences, states."""
    classes = jnp.clip(states, 0, log_probs.shape[2] - 1)
    return jnp.take_along_axis(log_probs, classes[None], 2)


def _alphas(emitted: Array, skips: Array, within: Array) -> Array:
    """Return the log probability of all beginnings of an alignment that end in a state at a time."""
    # An alignment begins with a blank or with the first target.
    first = jnp.where(within & (jnp.arange(within.shape[1]) < 2), emitted[0], -jnp.inf)

    def step(before: Array, emission: Array) -> tuple[Array, Array]:
        skipped = jnp.where(skips, _moved(before, 2, -jnp.inf), -jnp.inf)
        alpha = _log_sum(before, _moved(before, 1, -jnp.inf), skipped) + emission
        alpha = jnp.where(within, alpha, -jnp.inf)
        return alpha, alpha

    _, rest = jax.lax.scan(step, first, emitted[1:])
    return jnp.concatenate([first[None], rest])


def _betas(emitted: Array, skips: Array, within: Array, last: Array, times: Array) -> Array:
    """Return the log probability of all endings of an alignment that begin in a state at a time."""
    leaving = _moved(skips, -2, False)

    def step(after: Array, now: tuple[Array, Array]) -> tuple[Array, Array]:
        emission, time = now
        skipped = jnp.where(leaving, _moved(after, -2, -jnp.inf), -jnp.inf)
        beta = _log_sum(after, _moved(after, -1, -jnp.inf), skipped) + emission
        beta = jnp.where((time == times - 1)[:, None], jnp.where(last, emission, -jnp.inf), beta)
        beta = jnp.where(within & (time < times)[:, None], beta, -jnp.inf)
        return beta, beta

    nothing = jnp.full(within.shape, -jnp.inf, emitted.dtype)
    clock = jnp.arange(emitted.shape[0])
    return jax.lax.scan(step, nothing, (emitted, clock), reverse=True)[1]


def _ends(width: int, lengths: Array) -> tuple[Array, Array]:
    """Return which states a sequence has, and which of them an alignment may end in."""
    state, count = jnp.arange(2 * width + 1), (2 * lengths + 1)[:, None]
    return state < count, (state >= count - 2) & (state < count)


def _check(log_probs: Array) -> None:
    if not log_probs.size:
        raise Unsupported("torch refuses log probabilities of nothing")


def _forward(
    log_probs: Array, targets: Array, times: Array, lengths: Array, width: int, blank: int
) -> tuple[Array, Array]:
    """Return each sequence's loss and its alphas, for targets at most ``width`` long."""
    _check(log_probs)
    # With no time there is one alignment, that of no targets.
    timeless = jnp.where(lengths == 0, jnp.zeros((), log_probs.dtype), jnp.inf)
    states = _states(targets, lengths, width, blank)
    within, last = _ends(width, lengths)
    alphas = _alphas(_emissions(log_probs, states), _skips(states), within)
    final = jnp.take_along_axis(alphas, jnp.maximum(times - 1, 0)[None, :, None], 0)[0]
    loss = -jax.nn.logsumexp(jnp.where(last, final, -jnp.inf), axis=1)
    return jnp.where(times == 0, timeless, loss), alphas.transpose(1, 0, 2)


@lowering(aten._ctc_loss.default, aten._ctc_loss.Tensor, dtypes=FLOAT32_OR_64)
def ctc_loss(
    log_probs: Array,
    targets: Array,
    input_lengths: Lengths,
    target_lengths: Lengths,
    blank: int = 0,
    zero_infinity: bool = False,
) -> tuple[Array, Array]:
    """The loss of each sequence and its alphas; ``zero_infinity`` concerns the gradient alone."""
    # Where lengths are known only at run time, the alphas have room for targets as long as their tensor allows.
    known = isinstance(target_lengths, Sequence)
    width = max(target_lengths, default=0) if known else targets.shape[-1]
    times, lengths = (jnp.asarray(n, jnp.int64) for n in (input_lengths, target_lengths))
    return _forward(log_probs, targets, times, lengths, width, blank)


@lowering(aten._ctc_loss_backward.default, aten._ctc_loss_backward.Tensor, dtypes=FLOAT32_OR_64)
def ctc_loss_backward(
    grad: Array,
    log_probs: Array,
    targets: Array,
    input_lengths: Lengths,
    target_lengths: Lengths,
    neg_log_likelihood: Array,
    log_alpha: Array,
    blank: int,
    zero_infinity: bool = False,
) -> Array:
    """The gradient for the log probabilities: what a class has, less what the alignments give it."""
    _check(log_probs)
    loss = neg_log_likelihood
    times, lengths = (jnp.asarray(n, jnp.int64) for n in (input_lengths, target_lengths))
    width = (log_alpha.shape[2] - 1) // 2
    states = _states(targets, lengths, width, blank)
    within, last = _ends(width, lengths)
    emitted = _emissions(log_probs, states)
    betas = _betas(emitted, _skips(states), within, last, times)
    # Both alphas and betas count the emission at their own time.
    passing = jnp.exp(log_alpha.transpose(1, 0, 2) + betas - emitted + loss[:, None])
    passing = jnp.where(within, passing, jnp.zeros((), passing.dtype))
    sequences = jnp.arange(log_probs.shape[1])[:, None]
    share = jnp.zeros_like(log_probs).at[:, sequences, states].add(passing, mode="drop")
    # An impossible class, like an impossible sequence, makes torch's gradient nan.
    share = share + 0 * log_probs + 0 * loss[:, None]
    gradient = (jnp.exp(log_probs) - share) * grad[:, None]
    live = (jnp.arange(log_probs.shape[0])[:, None] < times)[..., None]
    if zero_infinity:
        live = live & (loss != jnp.inf)[:, None]
    return jnp.where(live, gradient, jnp.zeros((), gradient.dtype))
