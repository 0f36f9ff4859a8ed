"""State that stays with a program between its runs: parameters, moments, counters that a step reads and writes.

A training step as one program reads and writes hundreds of arrays. Each costs microseconds on its way from a buffer
into the program and back, so between runs they stay here: the results of one run are the inputs of the next, and
small arrays travel as parts of one *bundle*, which the program takes apart. ``_lazy/capture.py`` (isthmus.jit) and
``_dynamo/running.py`` (torch.compile) run their programs through a ``Residence``::

    residence = Residence(whole=[weight, moment], bundles=[[step_1, step_2, step_3, step_4]])
    residence.run(program, [batch], commit)  # program(weight, moment, bundle, batch) -> (weight, moment, bundle, ...)

Meanwhile each of the buffers holds the residence's ``donation.Resident``, a marker that no program takes for an array:
a read or write of the buffer (``Buffer.value``, ``Buffer.bind``, an eager op whose call fails for the marker)
makes the residence give all arrays back, and the next run takes them again. State that is read after nearly every run
is therefore not bundled (``is_read_too_often``): bundles would be taken apart each time.

What can go wrong, and what prevents it:

- *An exception while buffers change hands* (Ctrl-C): a buffer changes in one assignment, and ``moving`` says that some
  have changed and some have not; the next use finishes the move. No array is dropped before all buffers have theirs.
- *A buffer is written behind our back*: the old array would be used in the next run. ``Buffer.bind`` exists for that.
- *A reference cycle*: buffers refer to the residence, so the residence refers to them weakly.
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

from isthmus._caches import LruCache
from isthmus._device.core import donation
from isthmus._device.core.buffer import Buffer, Lost
from isthmus._runtime import compiler, placement

T = TypeVar("T")
Array = Any
Shape = tuple[int, ...]
Kind = tuple[Shape, Any, Any]
Pair = tuple[int, int]
# Fewer arrays than this are not worth a bundle.
# A bundle saves a few microseconds per array and costs a program to join and part.
_FEW = 4
# Arrays of at most so many elements are small. XLA compiles code for bundles slowly on the CPU.
_SMALL = {"cpu": 1}
_SMALL_ELSEWHERE = 2**14
# Runs between two reads of the state that pay for a bundle, and how often in a row there may be fewer.
_RUNS, _TRIES = 3, 3


def join(arrays: Sequence[Array]) -> Array:
    """Return arrays as one."""
    return jnp.concatenate([array.reshape(-1) for array in arrays])


def part(bundle: Array, shapes: Sequence[Shape]) -> list[Array]:
    """Return the arrays that were made one."""
    arrays, start = [], 0
    for shape in shapes:
        end = start + math.prod(shape)
        arrays.append(jax.lax.slice(bundle, (start,), (end,)).reshape(shape))
        start = end
    return arrays


class Packing:
    """How the state of a program travels: whole arrays first, then bundles of small ones.

    ``pairs`` are an input and the output that takes its place, by number; ``kinds`` are shapes, dtypes and
    shardings of inputs.
    """

    def __init__(self, pairs: Sequence[Pair], kinds: Mapping[int, Kind], together: bool = True) -> None:
        self.kinds = kinds
        self.bundles = _bundles(pairs, kinds) if together else []
        bundled = {pair for bundle in self.bundles for pair in bundle}
        self.whole = [pair for pair in pairs if pair not in bundled]
        self.inputs = {index for index, _ in pairs}

    # How many arguments the state is on its way into a program and out again.
    def __len__(self) -> int:
        return len(self.whole) + len(self.bundles)

    def examples(self) -> list[Kind]:
        """Return the shape, dtype and sharding of each array."""
        kinds = [self.kinds[index] for index, _ in self.whole]
        for bundle in self.bundles:
            size = sum(math.prod(shape) for shape in self._shapes(bundle))
            kinds.append(((size,), self.kinds[bundle[0][0]][1], None))
        return kinds

    def unpack(self, arrays: Iterator[Array]) -> dict[int, Array]:
        """Return the state by number of input, read from the arrays that a program is called with."""
        values = {index: next(arrays) for index, _ in self.whole}
        for bundle in self.bundles:
            parts = part(next(arrays), self._shapes(bundle))
            values |= {index: array for (index, _), array in zip(bundle, parts, strict=True)}
        return values

    def pack(self, outputs: Sequence[Array]) -> list[Array]:
        """Return the arrays to keep, of all outputs."""
        whole = [outputs[index] for _, index in self.whole]
        # Bundles live on the default device, unsplit.
        bundles = [join([outputs[index] for _, index in bundle]) for bundle in self.bundles]
        return [*whole, *[placement.constrain(bundle, None) for bundle in bundles]]

    def pick(self, values: Callable[[int], Any]) -> tuple[list[Any], list[list[Any]]]:
        """Return something of each input: of whole arrays, and of those in bundles."""
        return [values(index) for index, _ in self.whole], [
            [values(index) for index, _ in bundle] for bundle in self.bundles
        ]

    def _shapes(self, bundle: Sequence[Pair]) -> list[Shape]:
        return [self.kinds[index][0] for index, _ in bundle]


def _bundles(pairs: Sequence[Pair], kinds: Mapping[int, Kind]) -> list[list[Pair]]:
    if not pairs:
        return []  # without asking for the platform: that starts JAX, which nothing may do while modules are imported
    limit = _SMALL.get(compiler.platform(), _SMALL_ELSEWHERE)
    groups: dict[Any, list[Pair]] = {}
    for pair in pairs:
        shape, dtype, sharding = kinds[pair[0]]
        # What is split stays on its own: parts of a bundle would travel between devices.
        if math.prod(shape) <= limit and sharding is None:
            # Arrays of one dtype can be concatenated; a bundle of three would not pay.
            groups.setdefault(dtype, []).append(pair)
    return [group for group in groups.values() if len(group) >= _FEW]


_bundle_programs: LruCache[Any, tuple[Callable[..., Any], Callable[..., Any]]] = LruCache(
    "programs that bundle state", 64
)


def _programs(shapes: tuple[Shape, ...], dtype: Any) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Return ``join`` and ``part`` for arrays of these shapes, compiled."""
    programs = _bundle_programs.get((shapes, dtype))
    if programs is None:
        examples = [jax.ShapeDtypeStruct(shape, dtype) for shape in shapes]
        bundle = jax.ShapeDtypeStruct((sum(math.prod(shape) for shape in shapes),), dtype)
        programs = _bundle_programs[shapes, dtype] = (
            compiler.compile(lambda *arrays: join(arrays), examples),
            compiler.compile(lambda bundle: part(bundle, shapes), [bundle]),
        )
    return programs


class Residence:
    """The state of one program, given the buffers it belongs to: whole arrays first, then bundles.

    ``arrays`` is None while every buffer has its own.
    """

    def __init__(self, whole: Sequence[Buffer], bundles: Sequence[Sequence[Buffer]]) -> None:
        # Buffers refer to this object while it has their arrays: strong references back would keep both alive for ever.
        died = functools.partial(_died, ref(self))
        self.whole = [ref(b, died) for b in whole]
        self.bundles = [[ref(b, died) for b in group] for group in bundles]
        self.programs = [
            # Compiled here and not at the first read, which may come in the middle of anything.
            _programs(tuple([b.signature.shape for b in group]), group[0].signature.dtype)
            for group in bundles
        ]
        self.arrays: list[Array] | None = None
        self.runs = self.short = 0
        self.dead = False  # whether a buffer is gone
        # Whether buffers are changing hands: if an exception strikes meanwhile, some are here and some are not.
        self.moving = False

    @property
    def is_read_too_often(self) -> bool:
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
        # For the whole run: between taking the arrays and binding their successors no thread may read the state.
        with donation.lock:
            state = self._take()

            def keep(outputs: Sequence[Array]) -> T:
                # The first results are the new state, as ``Packing.pack`` orders them.
                self.arrays = list(outputs[: len(state)])
                return commit(outputs)

            try:
                return donation.run(program, [*state, *inputs], keep, undo)
            except Exception as error:
                # The run failed before ``keep``: some arrays may have been donated all the same.
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
            # An interrupt left some buffers with markers and some without: finish that before anything else.
            self._give_back()
        if self.arrays is None and not self._adopt():
            # A buffer may be resident with another program, which gives it back here.
            groups = [[donation.settled(_alive(b)) for b in group] for group in self.bundles]
            bundles = self._join(groups)
            # What a user's variable still refers to is copied: a donated array would be deleted under it.
            self._keep([*[donation.settled(_alive(b)) for b in self.whole], *bundles], owned=False)
        self.runs += 1
        assert self.arrays is not None
        return self.arrays

    def begin(self, whole: list[Array], groups: Sequence[Sequence[Array]]) -> None:
        """Keep these arrays, which nothing else holds, from now on, those of ``groups`` as bundles."""
        self._keep([*whole, *self._join(groups)], owned=True)

    def _join(self, groups: Sequence[Sequence[Array]]) -> list[Array]:
        """Return each group as one array; ``donation.run`` makes room and tries again where there is no memory."""
        pairs = zip(self.programs, groups, strict=True)
        return [donation.run(joined, group, lambda bundle: bundle) for (joined, _), group in pairs]

    def _adopt(self) -> bool:
        """Take the arrays over from a residence of the same buffers, as a step for another batch size has it."""
        buffers = self._buffers()
        marker = _alive(buffers[0]).held if buffers else None
        other = marker.residence if type(marker) is donation.Resident else None
        # The same buffers in the same order: then the arrays fit as they are.
        if not isinstance(other, Residence) or (other.whole, other.bundles) != (self.whole, self.bundles):
            return False
        if other.arrays is None or other.moving:
            return False
        # Both have the arrays until all buffers have changed hands, so that none is lost on the way.
        self._keep(other.arrays, owned=True)
        other.arrays = None
        return True

    def _buffers(self) -> list[ref[Buffer]]:
        return [*self.whole, *[b for group in self.bundles for b in group]]

    def _keep(self, arrays: list[Array], owned: bool) -> None:
        """Keep these arrays, and leave a marker in their buffers; copy those that others hold, unless all are owned."""
        self.moving = True
        self.arrays, self.runs = arrays, 0
        # One marker for all: whichever buffer is read first gives all of them back.
        marker = donation.Resident(self)
        for reference in self._buffers():
            _alive(reference).held = marker
        if not owned:
            # After the markers: a thread that read a buffer between the count and its marker would hold an array that
            # the program overwrites.
            donation.own(arrays, range(len(self.whole)), hidden=True)
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
            # Few runs between two reads mean that the bundles are made and taken apart for nothing.
            self.short = self.short + 1 if self.runs < _RUNS else 0
        self.moving = True
        for reference, array in zip(self.whole, arrays, strict=False):
            self._restore(reference(), array)
        rest = arrays[len(self.whole) :]
        for group, (_, parted), bundle in zip(self.bundles, self.programs, rest, strict=True):
            for reference, array in zip(group, _parts(parted, bundle, len(group)), strict=True):
                self._restore(reference(), array)
        self.arrays = None
        self.moving = False

    def _restore(self, buffer: Buffer | None, array: Array) -> None:
        """Give a buffer its array, unless it is gone or has been given one already."""
        if buffer is None:
            return
        # A buffer that was written meanwhile holds its new array, which is newer than the one here.
        held = buffer.held
        if type(held) is donation.Resident and held.residence is self:
            buffer.held = array


def _parts(parted: Callable[..., Any], bundle: Any, count: int) -> Sequence[Any]:
    # The state was lost in a failed run: each buffer gets the error instead of an array.
    if isinstance(bundle, Lost):
        return [bundle] * count
    try:
        return parted(bundle)  # type: ignore[no-any-return]
    except Exception as error:
        return [Lost(error)] * count


def _died(residence: ref[Residence], _: Any) -> None:
    """Give all state back when one of its buffers is freed: a program cannot keep an array that belongs to no one."""
    alive = residence()
    # At the end of the process modules are being torn down, and the state is not read again.
    if alive is None or sys.is_finalizing():
        return
    alive.dead = True
    # Buffers die in the middle of anything, of a compilation too: to wait here for another thread might be for ever.
    acquired = False
    try:
        # By unpacking, so that no signal handler runs between the call and the assignment: see donation.py.
        (acquired,) = map(donation.lock.acquire, (False,))
        if acquired:
            alive.give_back()
    finally:
        # Nor before the release, since no call is before it: a lock left behind would stop all other threads.
        _ = acquired and donation.lock.release()  # type: ignore[func-returns-value]


def _alive(reference: ref[Buffer]) -> Buffer:
    buffer = reference()
    assert buffer is not None  # the caller that runs the program holds it
    return buffer
