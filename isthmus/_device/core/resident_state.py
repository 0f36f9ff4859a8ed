"""State that stays with a program between its runs: parameters, moments, counters that a step reads and writes.

The arrays go from the results of one run to the inputs of the next without passing through the buffers they belong
to; a buffer takes its array back when somebody reads or writes it. Every array costs microseconds on its way into
and out of a program, so small ones travel as parts of one.
"""

from __future__ import annotations

import functools
import math
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar
from weakref import ref

import jax
import jax.numpy as jnp

from isthmus._device.core import donation
from isthmus._device.core.buffer import Buffer, Lost
from isthmus._runtime import compiler

T = TypeVar("T")
Array = Any
Shape = tuple[int, ...]
Kind = tuple[Shape, Any]
Pair = tuple[int, int]
# Fewer arrays than this are not worth a bundle.
_FEW = 4
# Arrays of at most so many elements are small. XLA compiles code for bundles slowly on the CPU.
_SMALL = {"cpu": 1}
_SMALL_ELSEWHERE = 2**14
# Runs between two reads of the state that pay for a bundle, and how often in a row there may be fewer.
_RUNS, _TRIES = 3, 3
_slot: Any = vars(Buffer)["held"]  # where a buffer has its array


def join(arrays: Sequence[Array]) -> Array:
    """Return arrays as one."""
    return jnp.concatenate([array.reshape(-1) for array in arrays])


def part(bundle: Array, shapes: Sequence[Shape]) -> list[Array]:
    """Return the arrays that were made one."""
    found, start = [], 0
    for shape in shapes:
        end = start + math.prod(shape)
        found.append(jax.lax.slice(bundle, (start,), (end,)).reshape(shape))
        start = end
    return found


class Packing:
    """How the state of a program travels: whole arrays first, then bundles of small ones.

    ``pairs`` are an input and the output that takes its place, by number; ``kinds`` are shapes and dtypes of inputs.
    """

    def __init__(self, pairs: Sequence[Pair], kinds: Mapping[int, Kind], together: bool = True) -> None:
        self.kinds = kinds
        self.bundles = _bundles(pairs, kinds) if together else []
        bundled = {pair for bundle in self.bundles for pair in bundle}
        self.whole = [pair for pair in pairs if pair not in bundled]
        self.inputs = {at for at, _ in pairs}

    def __len__(self) -> int:
        return len(self.whole) + len(self.bundles)

    def examples(self) -> list[Kind]:
        """Return the shape and dtype of each array."""
        found = [self.kinds[at] for at, _ in self.whole]
        for bundle in self.bundles:
            size = sum(math.prod(shape) for shape in self._shapes(bundle))
            found.append(((size,), self.kinds[bundle[0][0]][1]))
        return found

    def unpack(self, arrays: Iterator[Array]) -> dict[int, Array]:
        """Return what a program computes with, by input, taking the arrays it was given."""
        found = {at: next(arrays) for at, _ in self.whole}
        for bundle in self.bundles:
            parts = part(next(arrays), self._shapes(bundle))
            found |= {at: array for (at, _), array in zip(bundle, parts, strict=True)}
        return found

    def pack(self, outputs: Sequence[Array]) -> list[Array]:
        """Return the arrays to keep, of all outputs."""
        whole = [outputs[at] for _, at in self.whole]
        return [*whole, *[join([outputs[at] for _, at in bundle]) for bundle in self.bundles]]

    def pick(self, values: Callable[[int], Any]) -> tuple[list[Any], list[list[Any]]]:
        """Return something of each input: of whole arrays, and of those in bundles."""
        return [values(at) for at, _ in self.whole], [
            [values(at) for at, _ in bundle] for bundle in self.bundles
        ]

    def _shapes(self, bundle: Sequence[Pair]) -> list[Shape]:
        return [self.kinds[at][0] for at, _ in bundle]


def _bundles(pairs: Sequence[Pair], kinds: Mapping[int, Kind]) -> list[list[Pair]]:
    limit = _SMALL.get(compiler.platform(), _SMALL_ELSEWHERE)
    groups: dict[Any, list[Pair]] = {}
    for pair in pairs:
        shape, dtype = kinds[pair[0]]
        if math.prod(shape) <= limit:
            groups.setdefault(dtype, []).append(pair)
    return [group for group in groups.values() if len(group) >= _FEW]


@functools.lru_cache(64)
def _programs(shapes: tuple[Shape, ...], dtype: Any) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Return ``join`` and ``part`` for arrays of these shapes, compiled."""
    examples = [jax.ShapeDtypeStruct(shape, dtype) for shape in shapes]
    whole = jax.ShapeDtypeStruct((sum(math.prod(shape) for shape in shapes),), dtype)
    return compiler.compile(lambda *a: join(a), examples), compiler.compile(
        lambda b: part(b, shapes), [whole]
    )


class Resident(Buffer):
    """A buffer whose array is with a program; ``held`` takes it back."""

    __slots__ = ()

    @property
    def held(self) -> Any:  # type: ignore[override]
        """Take the array back and return it."""
        _take_back(self)
        return self.held

    @held.setter
    def held(self, value: Any) -> None:
        _take_back(self)
        self.held = value


# A buffer changes hands in two steps. Between them, where an exception may strike, it is a Resident that holds its own
# array: ``_take_back`` understands that, while a Buffer that held a Residence would pass it on as an array.


def _take_back(buffer: Buffer) -> None:
    with donation.lock:
        if type(buffer) is Resident:
            held = _slot.__get__(buffer)
            if isinstance(held, Residence):
                held.give_back()
            else:
                buffer.__class__ = Buffer  # type: ignore[assignment]


def _hand_over(buffer: Buffer, residence: Residence) -> None:
    buffer.__class__ = Resident
    _slot.__set__(buffer, residence)


def _restore(buffer: Buffer | None, residence: Residence, held: Any) -> None:
    """Give a buffer its array back, unless it has left the residence already."""
    if buffer is not None and type(buffer) is Resident and _slot.__get__(buffer) is residence:
        _slot.__set__(buffer, held)
        buffer.__class__ = Buffer  # type: ignore[assignment]


class Residence:
    """The state of one program, given the buffers it belongs to: whole arrays first, then bundles."""

    def __init__(self, whole: Sequence[Buffer], bundles: Sequence[Sequence[Buffer]]) -> None:
        # The buffers know where their arrays are, so to know the buffers as well would keep both for ever.
        died = functools.partial(_died, ref(self))
        self.whole = [ref(b, died) for b in whole]
        self.bundles = [[ref(b, died) for b in group] for group in bundles]
        self.programs = [
            _programs(tuple([b.signature.shape for b in group]), group[0].signature.dtype)
            for group in bundles
        ]
        self.arrays: list[Array] | None = None
        self.runs = self.short = 0
        self.dead = False  # whether a buffer is gone
        # Whether buffers are changing hands: if an exception strikes meanwhile, some are here and some are not.
        self.moving = False

    @property
    def wears(self) -> bool:
        """Whether the state is read so often that its bundles cost more than they save."""
        return bool(self.bundles) and self.short >= _TRIES

    def run(
        self,
        program: Callable[..., Sequence[Array]],
        inputs: Sequence[Any],
        commit: Callable[[Sequence[Array]], T],
        undo: Callable[[], None] | None = None,
    ) -> T:
        """Run a program on the state and other inputs; its first results are the new state, all go to ``commit``."""
        with donation.lock:
            state = self._take()

            def keep(outputs: Sequence[Array]) -> T:
                self.arrays = list(outputs[: len(state)])
                return commit(outputs)

            try:
                return donation.run(program, [*state, *inputs], keep, undo)
            except Exception as error:
                if self.arrays is state:
                    self._lose_deleted(error)
                raise

    def _lose_deleted(self, error: Exception) -> None:
        """Let the buffers say why their arrays are gone, where a run failed after it was given their memory."""
        assert self.arrays is not None
        if any([array.is_deleted() for array in self.arrays]):
            self.arrays = [Lost(error) if array.is_deleted() else array for array in self.arrays]
            self._give_back()

    def _take(self) -> list[Array]:
        if self.moving:
            self._give_back()
        if self.arrays is None and not self._adopt():
            whole = donation.own([_alive(b).held for b in self.whole])
            groups = [[_alive(b).held for b in group] for group in self.bundles]
            self.begin(whole, groups)
        self.runs += 1
        assert self.arrays is not None
        return self.arrays

    def begin(self, whole: list[Array], groups: Sequence[Sequence[Array]]) -> None:
        """Become the place of these arrays."""
        pairs = zip(self.programs, groups, strict=True)
        self._become_place_of([*whole, *[joined(*group) for (joined, _), group in pairs]])

    def _adopt(self) -> bool:
        """Take the arrays over from a residence of the same buffers, as a step for another batch size has it."""
        buffers = self._buffers()
        other = _slot.__get__(_alive(buffers[0])) if buffers else None
        if not isinstance(other, Residence) or (other.whole, other.bundles) != (self.whole, self.bundles):
            return False
        if other.arrays is None or other.moving:
            return False
        # Both have the arrays until all buffers have changed hands, so that none is lost on the way.
        self._become_place_of(other.arrays)
        other.arrays = None
        return True

    def _buffers(self) -> list[ref[Buffer]]:
        return [*self.whole, *[b for group in self.bundles for b in group]]

    def _become_place_of(self, arrays: list[Array]) -> None:
        self.moving = True
        self.arrays, self.runs = arrays, 0
        for reference in self._buffers():
            _hand_over(_alive(reference), self)
        self.moving = False

    def give_back(self) -> None:
        """Give every buffer its array."""
        with donation.lock:
            self._give_back()

    def _give_back(self) -> None:
        arrays = self.arrays
        if arrays is None:
            return
        if not self.moving:  # else this goes on where it was interrupted
            self.short = self.short + 1 if self.runs < _RUNS else 0
        self.moving = True
        for reference, array in zip(self.whole, arrays, strict=False):
            _restore(reference(), self, array)
        rest = arrays[len(self.whole) :]
        for group, (_, parted), bundle in zip(self.bundles, self.programs, rest, strict=True):
            for reference, array in zip(group, _parts(parted, bundle, len(group)), strict=True):
                _restore(reference(), self, array)
        self.arrays = None
        self.moving = False


def _parts(parted: Callable[..., Any], bundle: Any, count: int) -> Sequence[Any]:
    if isinstance(bundle, Lost):
        return [bundle] * count
    try:
        return parted(bundle)  # type: ignore[no-any-return]
    except Exception as error:
        return [Lost(error)] * count


def _died(residence: ref[Residence], _: Any) -> None:
    """Let go of the state of a buffer nobody has any more."""
    found = residence()
    if found is None or sys.is_finalizing():
        return
    found.dead = True
    # Buffers die in the middle of anything, of a compilation too: to wait here for another thread might be for ever.
    if donation.lock.acquire(blocking=False):
        try:
            found.give_back()
        finally:
            donation.lock.release()


def _alive(reference: ref[Buffer]) -> Buffer:
    buffer = reference()
    assert buffer is not None  # whoever runs the program holds it
    return buffer
