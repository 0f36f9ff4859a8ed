"""The two programs of ``isthmus.generate``: one for the prompt, one loop for all tokens after the first.

Both are the model's own torch code, run on tracers as ``torch_functions.py`` does, with parameters, cache and tokens as
inputs. A row's tokens lie in ``slots``: slot i holds token i of the row and, in the cache, its keys and values.

- **Prompt**: all its tokens at once; it fills the cache, chooses the first new token.
- **Loop**: ``lax.while_loop``. A turn runs the model on the newest token, writes one slot of the cache, chooses a
  token. It ends at the length asked for, or when every row has chosen an ending token.

Sizes are padded (``padded``), so that calls of similar lengths share programs. The prompt is padded on the right:
causal attention lets no token see what follows it, and a padded slot is overwritten before the loop can see it. Which
slots a token sees is one mask, made here, since transformers leaves it out where it reads values to see that it can.

What can go wrong: a model whose layers keep something else than all keys and values (a window, a state) or that takes
no positions; ``_check`` refuses them. Conditions on values (a token outside the vocabulary, a position outside the
table) come back with the result as one number and are raised then.
"""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel, StaticCache
from transformers.cache_utils import StaticLayer

from isthmus._caches import LruCache
from isthmus._device.core import generator, mode
from isthmus._interop.arrays import from_jax, to_jax
from isthmus._interop.token_choice import Chooser
from isthmus._interop.torch_functions import inside_jax
from isthmus._ops.value_checks import Checks, Error, collecting
from isthmus._runtime.compiler import Executable, build
from isthmus._runtime.host_arrays import from_numpy, to_numpy
from isthmus.errors import IsthmusError, TracedValueError

Array = jax.Array
Cache = list[tuple[Array, Array]]
"""Keys and values of every layer: ``[rows, heads, slots, width]``."""
_PROGRAMS = 32
_SMALLEST = 32


def padded(length: int) -> int:
    """Return the number of slots for a length: a power of two, or one and a half of one.

    >>> [padded(n) for n in (5, 33, 49, 192, 193)]
    [32, 48, 64, 192, 256]
    """
    size = _SMALLEST
    while size < length:
        # Sizes alternate: 32, 48, 64, 96, 128, ...
        size = size // 2 * 3 if size & (size - 1) == 0 else size // 3 * 4
    return size


@dataclass(frozen=True)
class Request:
    """One call, as transformers has prepared it."""

    tokens: Tensor
    mask: Tensor | None
    positions: Tensor | None
    length: int
    ends: list[int]
    padding: Tensor | None
    chooser: Chooser
    generator: torch.Generator | None


@dataclass(frozen=True)
class _Scalars:
    """The numbers of a run, in one array: how long the prompt is, where to stop, what to fill ended rows with."""

    array: Array

    prompt = property(lambda self: self.array[0])
    length = property(lambda self: self.array[1])
    padding = property(lambda self: self.array[2])
    ends = property(lambda self: self.array[3:])


@dataclass(frozen=True)
class _Program:
    executable: Executable
    errors: list[Error]


class Decoder:
    """The programs of one model."""

    def __init__(self, model: PreTrainedModel) -> None:
        _check(model)
        # Weakly: the decoder is kept for as long as the model, by a key in a weak dict.
        self._model = weakref.ref(model)
        self._programs: LruCache[Any, _Program] = LruCache("programs of isthmus.generate", _PROGRAMS)

    def run(self, request: Request) -> Tensor:
        """Return the tokens of prompt and continuation, on the CPU."""
        tokens = request.tokens.cpu().numpy()
        rows, prompt = tokens.shape
        if prompt >= request.length:
            raise ValueError(
                f"isthmus.generate: the prompt has {prompt} tokens, and the length to stop at is {request.length}"
            )
        model = self._model()
        assert model is not None  # the caller holds it
        # The loop's programs depend on the total length, the prompt's on both.
        slots, width = padded(request.length), padded(prompt)
        held = {**dict(model.named_parameters()), **dict(model.named_buffers())}
        parameters = {name: to_jax(tensor.detach()) for name, tensor in held.items()}
        step = _Step(model, request.chooser, bool(request.ends), slots)
        # Everything that the programs have compiled in.
        key = (rows, slots, len(request.ends), request.chooser.key, _state_of(model, parameters))

        padding = 0 if request.padding is None else int(request.padding.flatten()[0])
        scalars = from_numpy(np.array([prompt, request.length, padding, *request.ends], np.int64))
        numbers = from_numpy(np.array(request.chooser.numbers, np.float64))
        seed = from_numpy(
            np.asarray(
                generator.draw(request.generator) if request.chooser.sample else np.zeros(4, np.uint32)
            )
        )
        # Slots after the prompt become visible as they are filled; padding in it never does.
        visible = np.ones((rows, slots), bool)
        if request.mask is not None:
            visible[:, :prompt] = request.mask.cpu().numpy() != 0
        positions = np.arange(prompt)[None] if request.positions is None else request.positions.cpu().numpy()
        positions = np.broadcast_to(positions, (rows, prompt))

        inputs: list[Any] = [
            parameters,
            _on_device(tokens, slots),
            from_numpy(visible),
            _on_device(positions, width),
            scalars,
            numbers,
            seed,
        ]
        first = self._program(("prompt", width, *key), step.prompt, inputs, ())
        state = first.executable.call(*inputs)
        # Rows padded on the left begin at other positions.
        last = from_numpy(np.ascontiguousarray(positions[:, -1:]))
        inputs = [parameters, state, from_numpy(visible), last, scalars, numbers, seed]
        # The state is made for this call alone, so its memory is the loop's.
        loop = self._program(("loop", *key), step.loop, inputs, (1,))
        state = loop.executable.call(*inputs)
        # One wait for all three, not one each.
        for array in (state.filled, state.failed, state.tokens):
            array.copy_to_host_async()
        filled, failed, generated = (to_numpy(array) for array in (state.filled, state.failed, state.tokens))
        # A number per program: which condition on values failed first.
        for code, program in zip(failed.tolist(), (first, loop), strict=True):
            if code:
                error, message = program.errors[code - 1]
                raise error(message)
        return torch.from_numpy(generated[:, : int(filled)].copy())

    def _program(
        self,
        key: Any,
        traced: Callable[..., tuple[Any, list[Error]]],
        inputs: list[Any],
        donate: tuple[int, ...],
    ) -> _Program:
        program = self._programs.get(key)
        if program is None:
            errors: list[Error] = []

            def function(*inputs: Any) -> Any:
                state, found_errors = traced(*inputs)
                errors[:] = found_errors
                return state

            try:
                program = _Program(build(function, inputs, donate, title="generate"), errors)
            # The model branches on a value: no loop on the device can do that.
            except TracedValueError as error:
                raise IsthmusError(
                    f"isthmus.generate: the model decides by values, which a loop on the device cannot do: call "
                    f"model.generate ({error})"
                ) from error
            self._programs[key] = program
        return program


class _State(NamedTuple):
    """What a turn of the loop changes."""

    filled: Array
    """How many slots of a row have tokens."""
    tokens: Array
    ended: Array
    """Which rows have chosen an ending token."""
    cache: Cache
    failed: Array
    """For each of the two programs, the number of the first condition on values that failed; 0 is none."""


class _Step:
    """The functions that are traced: of parameters, then tokens or state, then what stays the same in all turns."""

    def __init__(self, model: PreTrainedModel, chooser: Chooser, may_end: bool, slots: int) -> None:
        self.model, self.chooser, self.may_end, self.slots = model, chooser, may_end, slots
        self.takes_places = "logits_to_keep" in inspect.signature(model.forward).parameters

    def prompt(
        self,
        parameters: dict[str, Array],
        tokens: Array,
        visible: Array,
        positions: Array,
        scalars: Array,
        numbers: Array,
        seed: Array,
    ) -> tuple[_State, list[Error]]:
        """Run the model on the prompt and choose the first token."""
        run = _Scalars(scalars)
        width = positions.shape[1]
        # Slot and query by number: a token sees those before it, and itself.
        slot, query = jnp.arange(self.slots), jnp.arange(width)[:, None]
        # A padding token sees itself: softmax over nothing would give NaN, and NaN in its values would spread.
        mask = (slot <= query) & visible[:, None] | (slot == query)
        with collecting() as checks:
            cache = [_Layer(self.slots, None, 0) for _ in _layers(self.model)]
            logits = self._forward(parameters, tokens[:, :width], positions, mask, cache, run.prompt - 1)
            state = _State(
                run.prompt,
                tokens,
                jnp.zeros(len(tokens), bool),
                [layer.arrays() for layer in cache],
                jnp.zeros(2, jnp.int32),
            )
            state = self._choose(state, logits, run, numbers, seed)
        return _with_failures(state, checks, 0)

    def loop(
        self,
        parameters: dict[str, Array],
        state: _State,
        visible: Array,
        last: Array,
        scalars: Array,
        numbers: Array,
        seed: Array,
    ) -> tuple[_State, list[Error]]:
        """Run the model on one token after another, until every row is as long as asked for or has ended."""
        run = _Scalars(scalars)
        errors: list[Error] = []

        def goes_on(state: _State) -> Array:
            # Until every row has ended or is as long as asked for; a row that has ended is filled with padding.
            return (state.filled < run.length) & ~state.ended.all()

        def turn(state: _State) -> _State:
            newest = state.filled - 1
            mask = ((jnp.arange(self.slots) <= newest) & visible)[:, None]
            token = jax.lax.dynamic_slice_in_dim(state.tokens, newest, 1, axis=1)
            with collecting() as checks:
                cache = [_Layer(self.slots, arrays, newest) for arrays in state.cache]
                logits = self._forward(
                    parameters, token, last + (state.filled - run.prompt), mask, cache, None
                )
                state = state._replace(cache=[layer.arrays() for layer in cache])
                state = self._choose(state, logits, run, numbers, seed)
            # The first condition that failed in any turn: later ones run on what followed.
            state, errors[:] = _with_failures(state, checks, 1)
            return state

        return jax.lax.while_loop(goes_on, turn, state), errors

    def _forward(
        self,
        parameters: dict[str, Array],
        tokens: Array,
        positions: Array,
        mask: Array,
        layers: list[_Layer],
        place: Array | None,
    ) -> Array:
        """Return the logits at a place of every row, ``[rows, vocabulary]``; without one, at its only token."""
        cache = StaticCache(config=self.model.config, max_cache_len=self.slots)
        cache.layers = list(layers)
        options: dict[str, Any] = {"input_ids": from_jax(tokens), "position_ids": from_jax(positions)}
        options |= {"attention_mask": self._mask(mask), "past_key_values": cache, "use_cache": True}
        if place is not None and self.takes_places:
            options["logits_to_keep"] = from_jax(place[None])  # the others would be computed for nothing
        with _traced(None):
            logits = to_jax(torch.func.functional_call(self.model, from_jax(parameters), (), options).logits)
        if logits.shape[1] == 1:
            return logits[:, 0]
        # The prompt's last token lies at a place that is known at run time.
        return jax.lax.dynamic_index_in_dim(logits, place, axis=1, keepdims=False)

    def _mask(self, mask: Array) -> Tensor:
        """Return a mask of what is seen, ``[rows, tokens, slots]``, as the model's attention takes it."""
        if self.model.config._attn_implementation == "sdpa":
            return from_jax(mask[:, None])
        dtype = self.model.dtype
        # Eager attention adds the mask to the scores.
        return torch.where(from_jax(mask[:, None]), 0.0, torch.finfo(dtype).min).to(dtype)

    def _choose(self, state: _State, logits: Array, run: _Scalars, numbers: Array, seed: Array) -> _State:
        """Return the state with one token more."""
        key = jax.random.wrap_key_data(seed[:2])
        # Offset and position folded in: every token has its own random numbers.
        for word in (seed[2], seed[3], state.filled.astype(jnp.uint32)):
            key = jax.random.fold_in(key, word)
        with _traced(key):
            arguments = from_jax((logits, state.tokens, state.filled, numbers))
            token = to_jax(self.chooser.choose(*arguments))
        ended = state.ended
        if self.may_end:
            token = jnp.where(ended, run.padding, token)
            ended = ended | (token[:, None] == run.ends).any(1)
        tokens = jax.lax.dynamic_update_slice_in_dim(state.tokens, token[:, None], state.filled, axis=1)
        return state._replace(filled=state.filled + 1, tokens=tokens, ended=ended)


class _Layer(StaticLayer):  # type: ignore[misc]
    """A layer's cache whose arrays are tracers: the keys and values of new tokens go into slots from ``start`` on."""

    def __init__(self, slots: int, arrays: tuple[Array, Array] | None, start: Array | int) -> None:
        super().__init__(max_cache_len=slots)
        self.is_initialized = True
        self.start = start
        if arrays is not None:
            self.keys, self.values = from_jax(arrays)

    def update(self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """Write the new keys and values, and return all."""
        self.keys = self._written(self.keys, key_states)
        self.values = self._written(self.values, value_states)
        return self.keys, self.values

    def _written(self, held: Tensor | None, new: Tensor) -> Tensor:
        array = to_jax(new)
        if held is None:  # the prompt's, from slot 0 on
            return from_jax(
                jnp.pad(array, ((0, 0), (0, 0), (0, self.max_cache_len - array.shape[2]), (0, 0)))
            )
        return from_jax(jax.lax.dynamic_update_slice_in_dim(to_jax(held), array, self.start, axis=2))

    def get_seq_length(self) -> Any:
        """Return how many tokens came before: a tensor in the loop, whose value is not known while it is traced."""
        return self.start if isinstance(self.start, int) else from_jax(self.start)

    def arrays(self) -> tuple[Array, Array]:
        """Return keys and values."""
        return to_jax((self.keys, self.values))  # type: ignore[no-any-return]


_decoders: weakref.WeakKeyDictionary[PreTrainedModel, Decoder] = weakref.WeakKeyDictionary()


def decoder_of(model: PreTrainedModel) -> Decoder:
    """Return the programs of a model, which are kept as long as it is."""
    decoder = _decoders.get(model)
    if decoder is None:
        decoder = _decoders[model] = Decoder(model)
    return decoder


@contextmanager
def _traced(key: Array | None) -> Iterator[None]:
    """Run torch code on tracers, op by op also where this thread is lazy."""
    lazy = mode.current.lazy
    mode.current.lazy = False
    try:
        with inside_jax(key), torch.no_grad():
            yield
    finally:
        mode.current.lazy = lazy


def _with_failures(state: _State, checks: Checks, program: int) -> tuple[_State, list[Error]]:
    """Return the state with the number of the first condition that failed, and what to raise for each number."""
    if not checks.flags:
        return state, []
    code = checks.first_failed(state.failed[program])
    return state._replace(failed=state.failed.at[program].set(code)), checks.errors


def _on_device(numbers: np.ndarray[Any, Any], width: int) -> Array:
    """Return rows of integers on the device, padded on the right with the last of each."""
    return from_numpy(np.pad(numbers.astype(np.int64), ((0, 0), (0, width - numbers.shape[1])), mode="edge"))


def _state_of(model: PreTrainedModel, parameters: dict[str, Array]) -> Any:
    """Return the key of a program of the model: all it depends on beside its inputs' values."""
    arrays = tuple((name, array.shape, array.dtype) for name, array in parameters.items())
    modules = tuple((name, type(module), _plain_state(module)) for name, module in model.named_modules())
    cast = torch.get_autocast_dtype("jax") if torch.is_autocast_enabled("jax") else None
    # Its forward may read any setting; the text has them all.
    return (
        arrays,
        modules,
        model.config.to_json_string(use_diff=False),
        model.config._attn_implementation,
        cast,
    )


def _plain_state(module: nn.Module) -> tuple[Any, ...]:
    """Return what a module's forward may read and is no tensor: numbers, names of adapters, a forward of its own."""
    values = vars(module)
    texts = [f"{name}={values[name]!r}" for name in sorted(values) if _is_plain(values[name])]
    return (values.get("forward"), *texts)


def _is_plain(value: Any) -> bool:
    if isinstance(value, dict):
        return all(_is_plain(item) for pair in value.items() for item in pair)
    if isinstance(value, (list, tuple, set)):
        return all(map(_is_plain, value))
    return value is None or isinstance(value, (bool, int, float, str, torch.dtype))


def _layers(model: PreTrainedModel) -> list[Any]:
    """Return transformers' own cache layers for a model."""
    return StaticCache(config=model.config, max_cache_len=1).layers


def _check(model: PreTrainedModel) -> None:
    """Raise for a model that the loop would run otherwise than transformers does."""
    name, config = type(model).__name__, model.config
    parameters = inspect.signature(model.forward).parameters
    if getattr(config, "is_encoder_decoder", False):
        raise IsthmusError(
            f"isthmus.generate is for decoders alone; {name} has an encoder: call model.generate"
        )
    if not {"past_key_values", "position_ids", "attention_mask"} <= parameters.keys() or getattr(
        config, "alibi", False
    ):
        raise IsthmusError(
            f"isthmus.generate needs a model that takes a cache, positions and a mask; {name} makes its own: call "
            f"model.generate"
        )
    others = sorted({type(layer).__name__ for layer in _layers(model) if type(layer) is not StaticLayer})
    if others:
        raise IsthmusError(
            f"isthmus.generate keeps every token's keys and values; {name} has layers with {', '.join(others)}: call "
            f"model.generate"
        )
    if config._attn_implementation not in ("sdpa", "eager"):
        raise IsthmusError(
            f'isthmus.generate runs attention "sdpa" or "eager", not {config._attn_implementation!r}; call '
            f'model.set_attn_implementation("sdpa")'
        )
