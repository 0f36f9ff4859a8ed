"""The choice of the next token from logits, on the device, as transformers' logits processors make it.

``isthmus.generate`` gets a list of transformers' processors (temperature, top-k, ...). They are torch code, so
``Chooser`` calls them on tracers, while ``decoding.py`` traces the loop. Two kinds need care:

- A processor that looks at the tokens so far expects an array that grows; here it has a fixed size. Minimum lengths
  compare a count instead, and a repetition penalty, which is the same for tokens in any order and number, sees slots
  that are still empty as copies of the row's first token.
- A number that users vary (temperature, top-p, a minimum length) is an input of the program: ``numbers``. All others
  are part of its ``key``.

A processor that is not listed here is refused, subclasses included, and so is a stopping criterion other than a length
or a token.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers.generation import logits_process as of
from transformers.generation import stopping_criteria as stop

from isthmus.errors import IsthmusError

# These look at the logits alone.
_OF_LOGITS = (
    of.TopKLogitsWarper,
    of.MinPLogitsWarper,
    of.TypicalLogitsWarper,
    of.EpsilonLogitsWarper,
    of.EtaLogitsWarper,
    of.SuppressTokensLogitsProcessor,
    of.InfNanRemoveLogitsProcessor,
    of.LogitNormalization,
)
_BY_NUMBER = {of.TemperatureLogitsWarper: "temperature", of.TopPLogitsWarper: "top_p"}
Step = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
"""A function of logits, tokens, how many of them there are, and the chooser's numbers: the new logits."""


class Chooser:
    """Chooses the next token of every row; ``key`` says which program that is, ``numbers`` are its run-time inputs."""

    def __init__(self, processors: Sequence[Any], sample: bool) -> None:
        self.sample = sample
        self.numbers: list[float] = []
        described = [(type(processor).__name__, *_values(processor)) for processor in processors]
        self.steps = [self._step(processor) for processor in processors]
        # Values that are inputs of the program, so that another temperature compiles nothing.
        varied = {"temperature", "top_p", "min_length", "min_new_tokens", "prompt_length_to_skip"}
        self.key = (
            sample,
            *((name, *(v for v in values if v[0] not in varied)) for name, *values in described),
        )

    def _step(self, processor: Any) -> Step:
        # By exact type: a subclass may read the text so far, or values on the host.
        kind = type(processor)
        if kind in _OF_LOGITS:
            processor = _on_device(processor)
            return lambda logits, tokens, count, numbers: processor(tokens, logits)
        if kind in _BY_NUMBER:
            return self._by_number(processor, _BY_NUMBER[kind])
        if kind is of.MinLengthLogitsProcessor:
            return self._minimum(processor.min_length, processor.eos_token_id)
        if kind is of.MinNewTokensLengthLogitsProcessor:
            least = processor.prompt_length_to_skip + processor.min_new_tokens
            return self._minimum(least, processor.eos_token_id)
        if kind is of.RepetitionPenaltyLogitsProcessor and not getattr(
            processor, "prompt_ignore_length", None
        ):
            return lambda logits, tokens, count, numbers: processor(_filled(tokens, count), logits)
        raise IsthmusError(
            f"isthmus.generate has no {kind.__name__} on the device; leave out the option that asks for it, or call "
            f"model.generate"
        )

    def _number(self, value: float) -> int:
        self.numbers.append(float(value))
        return len(self.numbers) - 1

    def _by_number(self, processor: Any, name: str) -> Step:
        place = self._number(getattr(processor, name))

        def step(logits: Tensor, tokens: Tensor, count: Tensor, numbers: Tensor) -> Tensor:
            # A copy, since the processor is the user's: its number becomes an element of an input while it is traced.
            varied = copy.copy(processor)
            setattr(varied, name, numbers[place])
            return varied(tokens, logits)  # type: ignore[no-any-return]

        return step

    def _minimum(self, least: int, ends: Tensor) -> Step:
        place, ids = self._number(least), ends.tolist()

        def step(logits: Tensor, tokens: Tensor, count: Tensor, numbers: Tensor) -> Tensor:
            is_end = torch.isin(torch.arange(logits.shape[-1], device=logits.device), _ids(ids, logits))
            return logits.masked_fill(is_end & (count < numbers[place]), -torch.inf)

        return step

    def choose(self, logits: Tensor, tokens: Tensor, count: Tensor, numbers: Tensor) -> Tensor:
        """Return the next token of every row.

        Arguments:
            logits: ``[rows, vocabulary]``, of the last token.
            tokens: ``[rows, slots]``, of which the first ``count`` are filled.
            count: a number, int64.
            numbers: ``self.numbers`` as they are in this run, float64.
        """
        # As transformers' own loop does, so that the tokens are the same.
        scores = logits.to(torch.float32)
        for step in self.steps:
            scores = step(scores, tokens, count, numbers)
        if self.sample:
            return torch.multinomial(torch.softmax(scores, -1), 1).squeeze(1)
        return scores.argmax(-1)


def stops(criteria: Sequence[Any]) -> tuple[int, list[int]]:
    """Return the length at which every row stops, and the tokens after which one does."""
    lengths, ends = [], []
    for criterion in criteria:
        if type(criterion) is stop.MaxLengthCriteria:
            lengths.append(criterion.max_length)
        elif type(criterion) is stop.EosTokenCriteria:
            ends += criterion.eos_token_id.tolist()
        else:
            raise IsthmusError(
                f"isthmus.generate has no {type(criterion).__name__} on the device: rows stop at a length or a token; "
                f"call model.generate"
            )
    if not lengths:
        raise IsthmusError("isthmus.generate needs a length to stop at: pass max_new_tokens")
    return min(lengths), ends


def _values(processor: Any) -> list[tuple[str, Any]]:
    """Return the attributes of a processor, comparable."""
    return [
        (name, tuple(value.flatten().tolist()) if isinstance(value, Tensor) else repr(value))
        for name, value in sorted(vars(processor).items())
    ]


def _on_device(processor: Any) -> Any:
    """Return a processor whose tensors are on the device."""
    moved = copy.copy(processor)
    vars(moved).update({n: v.to("jax") for n, v in vars(processor).items() if isinstance(v, Tensor)})
    return moved


def _filled(tokens: Tensor, count: Tensor) -> Tensor:
    """Return the tokens with the row's first one in slots that are empty."""
    # The penalty for repetition reads all slots; the first token is one that has been there anyway.
    empty = torch.arange(tokens.shape[1], device=tokens.device) >= count
    return torch.where(empty, tokens[:, :1], tokens)


def _ids(ids: list[int], like: Tensor) -> Tensor:
    return torch.tensor(ids, device=like.device)
