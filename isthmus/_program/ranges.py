"""Programs for ranges of sizes: graphs that are alike but for their sizes run by one program, on padded arrays.

A mode asks ``find`` for every graph before it compiles it. The first graph of a skeleton (everything but its integers,
``_graph/size_templates.py``) is compiled exactly. When a second one comes with other sizes, the two are generalised
into a template, the graph is lifted to symbolic sizes and traced once, and from then on every graph whose integers fit
the template runs on padded arrays (``_runtime/padding``). ``_lazy/ranges.py`` calls it, and nothing here knows of lazy
mode::

    match = find(graph, given, options)                     # None: compile exactly; so does whoever catches Refused
    match.program.run(match.sizes, given(match.program.slots), rest, commit)

Strided reads and writes of views become slices of grids first (``strided_slices.py``), since strides are not linear in
sizes. The program itself is in ``ranged_program.py``. What cannot be padded raises ``Refused``, which says what it is;
callers count it (``note``) and compile exactly.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Mapping, Sequence, Set
from dataclasses import dataclass, replace

from isthmus import config
from isthmus._caches import LruCache
from isthmus._graph.graph import Graph
from isthmus._graph.nodes import Leaf, temporary
from isthmus._graph.size_guesses import generalise, hints
from isthmus._graph.size_templates import Ints, Skeleton, Template, skeleton
from isthmus._program.program import STATELESS, StateLayout
from isthmus._program.ranged_program import Given, RangedProgram, XlaOptions
from isthmus._program.strided_slices import Offsets, without_strides
from isthmus._runtime import counters
from isthmus._runtime.padding.sizes import Refused

# Half types are rounded after every op, as they are when ops run one by one.
OPTIONS = {"xla_allow_excess_precision": False}
# After so many graphs of one skeleton that no template fits, its sizes are compiled exactly.
_SAMPLES = 6

refusals: Counter[str] = Counter()
"""How many graphs are compiled exactly, by the primitive that padding refused and why."""


GivenFor = Callable[[list[int]], Given]
"""Gives the arrays of these leaves."""


Limits = Mapping[tuple[int, int], int]
"""The largest size of dims of array leaves: by leaf and dim."""
NO_LIMITS: Limits = {}


@dataclass(frozen=True)
class _Attempt:
    """How a template is made of samples (``generalise``), where the first was refused: by ``after``, None for all."""

    least: int | None
    bold: bool = False
    in_units: bool = False
    after: str | None = None


# Where a lowering asks whether a size is 1, it is not padded for 1; nearly none does. One that asks whether it is less
# than a number of its own, as the k of ``topk``, is padded for sizes from the smallest seen. One that divides a size,
# as into patches, is padded for multiples.
_ATTEMPTS = (
    _Attempt(1),
    _Attempt(2),
    _Attempt(None, after="trace"),
    _Attempt(1, in_units=True),
    _Attempt(1, bold=True),
    _Attempt(2, bold=True),
    _Attempt(1, bold=True, in_units=True),
)


class SizeFamily:
    """The graphs of one skeleton: the integers seen so far, and the program for a range of their sizes."""

    def __init__(
        self,
        options: XlaOptions,
        state: StateLayout = STATELESS,
        results: tuple[int, ...] | None = None,
        limits: Limits = NO_LIMITS,
    ) -> None:
        self.options, self.state, self.results, self.limits = options, state, results, limits
        self.samples: list[Ints] = []
        self.tries = 0
        # One attribute, read once for each graph: another thread may put a program for more sizes in its place.
        self.program: RangedProgram | None = None
        # Why graphs of other sizes are compiled exactly, if they are.
        self.refused: Refused | None = None
        # How many transfers there had been when its first graph came (``find_one_size``).
        self.since = 0

    def sizes_of(self, found: Skeleton) -> Ints | None:
        """Return the sizes for which the program that is there serves a graph; None if it does not."""
        program = self.program
        return None if program is None else program.template.match(found.ints)

    def match(self, graph: Graph, found: Skeleton, given: GivenFor) -> tuple[RangedProgram, Ints] | None:
        """Return the program and the sizes for a graph, None for the first one; raise Refused where there is none."""
        program, refused = self.program, self.refused
        sizes = None if program is None else program.template.match(found.ints)
        if program is not None and sizes is not None:
            program.prepare(sizes, given(program.slots))
            return program, sizes
        if found.ints not in self.samples and self.tries < _SAMPLES:
            self.samples.append(found.ints)
            self.tries += 1
            if len(self.samples) > 1:
                return self._generalise(graph, found, given)
        elif refused is not None and found.ints != self.samples[0]:
            raise refused
        return None

    def _generalise(
        self, graph: Graph, found: Skeleton, given: GivenFor
    ) -> tuple[RangedProgram, Ints] | None:
        refused, known = None, hints(graph)
        tried: list[Template] = []
        for attempt in _ATTEMPTS:
            if refused is not None and attempt.after not in (None, refused.primitive):
                continue
            template = generalise(
                self.samples, found.dims, attempt.least, known, attempt.bold, attempt.in_units
            )
            if template is None and refused is None:
                self.refused = Refused("sizes", "one of them is not that of an array")
                raise self.refused
            if template is None or template in tried:
                continue
            tried.append(template)
            sizes = template.match(found.ints)
            if sizes is None:  # the first graph had a size of 0
                return None
            try:
                most = self._most(graph, template)
                program = RangedProgram(graph, template, self.options, self.state, self.results, most)
                program.prepare(sizes, given(program.slots))
            except Refused as error:
                refused = refused or error
                continue
            self.program, self.refused = program, None
            return program, sizes
        assert refused is not None
        self.refused = refused
        raise refused

    def _most(self, graph: Graph, template: Template) -> list[int | None]:
        """Return the largest size announced for each size of a template, None for others."""
        found = skeleton(graph)
        assert found is not None
        dims = [(leaf, d) for leaf, size in _leaf_sizes(graph) for d in range(len(size))]
        owner = dict(zip(found.dims, dims, strict=True))
        # A size of what is computed from no array, as by arange, has no owner.
        limits = [self.limits[owner[p]] if owner.get(p) in self.limits else None for p in template.places]
        return [None if n is None else n // unit for n, unit in zip(limits, template.units, strict=True)]


def note(error: Refused) -> None:
    """Count a graph that is compiled exactly."""
    counters.count("sizes refused")
    refusals[str(error)] += 1


@dataclass(frozen=True)
class Match:
    """A graph that a program for a range of sizes serves: the graph without strides, the program and the sizes."""

    graph: Graph
    program: RangedProgram
    sizes: Ints


_families: LruCache[Hashable, SizeFamily] = LruCache("graphs alike but for sizes", 256)


def find(
    graph: Graph,
    given: GivenFor,
    options: XlaOptions,
    state: StateLayout = STATELESS,
    results: tuple[int, ...] | None = None,
    limits: Limits = NO_LIMITS,
    others: Callable[[], Sequence[Graph]] | None = None,
    fixed: Set[int] = frozenset(),
) -> Match | None:
    """Return the program for a range of sizes that computes a graph without strides, None for its first sizes.

    Raises Refused where it is to be compiled exactly.

    Arguments:
        graph: the graph of a call.
        given: returns the arrays of these leaves.
        options: for XLA's compiler.
        state: leaves that stay with the program.
        results: the outputs to return, by default all.
        limits: the largest size of dims of leaves for which it is known.
        others: returns the graph for other sizes, so that not even the first size is compiled exactly.
        fixed: leaves whose sizes do not vary, such as parameters: graphs where they differ are not alike.
    """
    found = skeleton(graph)
    if found is None:
        return None
    shared = (found.key, tuple(sorted(options.items())))
    kept = tuple((leaf, size) for leaf, size in _leaf_sizes(graph) if leaf in fixed)
    key = (*shared, kept, config.buckets, state, results, *sorted(limits.items()))
    family = _families.get(key)
    if family is None:
        family = _families[key] = SizeFamily(options, state, results, limits)
        firsts = _firsts.get(shared) or []
        samples = [ints for sizes, ints in firsts if all(sizes[leaf] == size for leaf, size in kept)]
        if others is not None and {*samples} <= {found.ints}:
            alike = [skeleton(other) for other in others()]
            samples = [each.ints for each in alike if each is not None and each.key == found.key]
        family.samples += samples
    match = family.match(graph, found, given)
    return None if match is None else Match(graph, *match)


# Graphs of fixed sizes, which are first samples of those that vary: the sizes of their leaves, and their integers.
_firsts: LruCache[Hashable, list[tuple[dict[int, tuple[int, ...]], Ints]]] = LruCache(
    "graphs of fixed sizes", 256
)
_MOST_FIRSTS = 16


def remember(graph: Graph, options: XlaOptions) -> None:
    """Note a graph that is compiled exactly, as ``find`` notes the first one: others may differ in their sizes."""
    found = skeleton(graph)
    if found is None:
        return
    key = (found.key, tuple(sorted(options.items())))
    firsts = _firsts.get(key)
    if firsts is None:
        firsts = _firsts[key] = []
    first = (dict(_leaf_sizes(graph)), found.ints)
    if first not in firsts:
        firsts[:] = [*firsts[1 - _MOST_FIRSTS :], first]


# For each skeleton of one op, the families of its calls by the sizes that do not vary in them.
_calls: LruCache[Hashable, dict[tuple[int | None, ...], SizeFamily]] = LruCache(
    "calls alike but for one size", 1024
)
# One op is called with many shapes in a model, and each makes a family for each of its sizes.
_FAMILIES = 512


def find_one_size(
    graph: Graph,
    given: GivenFor,
    options: XlaOptions,
    fixed: Set[int] = frozenset(),
) -> Match | None:
    """Return the program for a range of one size that computes a small graph, None for the first one.

    Raises Refused where it is to be compiled exactly.

    Graphs of a single op have the same skeleton at every place of a model, so all sizes of their arrays but one, which
    may be a dim of several arrays, must be those of the earlier graphs. Sizes of the leaves in ``fixed`` never vary.
    The sizes of a graph without arrays (``arange``) are those of what it computes.

    Layers of one model differ in their sizes too, and none of these change. So a size that comes while nothing has
    crossed between host and device since the first one is another layer's: it is compiled exactly.
    """
    found = skeleton(graph)
    if found is None:
        return None
    owners = [leaf for leaf, size in _leaf_sizes(graph) for _ in size]
    if not found.dims:
        found = replace(found, dims=found.computed)
        owners = [-1 for _ in found.computed]
    key = (found.key, fixed, tuple(sorted(options.items())), config.buckets)
    families = _calls.get(key)
    if families is None or len(families) > _FAMILIES:
        families = _calls[key] = {}
    sizes = [found.ints[at] for at in found.dims]
    varies = [owner not in fixed for owner in owners]
    now = counters.transfers()
    refused = None
    # A program that is there comes first: another size may be new by chance, or equal to the one that varies.
    known = sorted(families.items(), key=lambda item: item[1].program is None)
    for kept, family in known:
        if family.program is None and family.since == now:
            continue
        if family.sizes_of(found) is not None or _differs_in_one_size(sizes, kept):
            try:
                match = family.match(graph, found, given)
            except Refused as error:
                # Another family may have a size that can be padded.
                refused = error
                continue
            if match is not None:
                return Match(graph, *match)
    for size in sorted({n for n, free in zip(sizes, varies, strict=True) if n > 1 and free}):
        kept = tuple(None if n == size and free else n for n, free in zip(sizes, varies, strict=True))
        if kept not in families:
            families[kept] = family = SizeFamily(options)
            family.since = now
            family.match(graph, found, given)
    if refused is not None:
        raise refused
    return None


def _differs_in_one_size(sizes: Sequence[int], kept: Sequence[int | None]) -> bool:
    """Return whether sizes are those of a family but for the one that varies in it, which they have in its places."""
    varying = {n for n, old in zip(sizes, kept, strict=True) if old is None}
    return len(varying) == 1 and all(old in (None, n) for n, old in zip(sizes, kept, strict=True))


def _leaf_sizes(graph: Graph) -> list[tuple[int, tuple[int, ...]]]:
    """Return the array leaves of a graph with their sizes."""
    calls = [n.call for n in graph.inputs]
    return [(call.index, call.type.size) for call in calls if isinstance(call, Leaf) and call.kind == "array"]


def lifted_strides(graph: Callable[[], Graph], offset_of: Offsets) -> Graph:
    """Return a graph without strides; raise Refused where it has a view that is no slice."""
    with temporary():
        return without_strides(graph(), offset_of)
