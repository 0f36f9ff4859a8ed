"""Calls that are wrong in one thing: what the CPU refuses the device refuses, with the same type of exception.

A call is a sample of torch's op_db with one change: a tensor's dtype, a size, a number, what ``out=`` is, what shares
memory with what. Its name says all of it, so a call that differs is run again by its name alone::

    python -m tests.fuzz.refusals --seeds 0 100                 # numbers, and each call that differs
    python -m tests.fuzz.refusals --seeds 0 15 --change share   # calls whose tensors share memory
    python -m tests.fuzz.refusals index_add/float32/3/dtype/17  # one call
"""

from __future__ import annotations

import argparse
import itertools
import random
import re
import tomllib
import warnings
import zlib
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch.testing._internal.common_methods_invocations import op_db
from torch.testing._internal.opinfo.core import OpInfo
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_unflatten

from tests.conformance.kinds import HOST_ARGUMENTS
from tests.conformance.values import Mismatch, compare_forms

TABLE = Path(__file__).with_suffix(".toml")
DTYPES = [torch.bool, torch.uint8, torch.int32, torch.int64, torch.float16, torch.bfloat16]
DTYPES += [torch.float32, torch.float64, torch.complex64]
# The device has the strided layout only.
_SPARSE = {"sparse.sampled_addmm", "sparse.mm", "sparse.mm.reduce", "to_sparse"}
# The CPU's own kernels read or write out of bounds when these are wrong: strides, pivots of another size, an ``out=``
# with strides that are ignored, statistics of another size.
_UNSAFE = {"as_strided", "as_strided.partial_views", "as_strided_scatter", "lu_unpack", "lu_solve"}
_UNSAFE |= {"linalg.lu_solve", "linalg.ldl_solve", "nn.functional.avg_pool3d", "narrow_copy"}
_UNSAFE |= {"_native_batch_norm_legit", "_batch_norm_with_update", "native_batch_norm"}
# These read out of bounds for one change alone, and end the process: offsets of more rows than there are.
_UNSAFE_CHANGES = {("_segment_reduce.offsets", "size")}
_SAMPLES = 12
CHUNK = 200
CALLS = 20_000
# A half type the CPU has no kernel for says nothing: CUDA has one, and so may the device.
NO_REFERENCE = re.compile(r"not implemented for '(Half|BFloat16|ComplexHalf)'|mkldnn|MKLDNN")


@dataclass(frozen=True)
class Change:
    """What a call does to its sample: ``choose`` picks one way, or returns None where there is none."""

    choose: Callable[[OpInfo, Prepared, random.Random], Prepared | None]


@dataclass(frozen=True)
class Prepared:
    """A call on the CPU: a function, its arguments, and which of them it writes to."""

    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


@dataclass(frozen=True)
class Call:
    """The name of a call: the op, the dtype and number of its sample, what is changed, and the draw that says how."""

    op: str
    dtype: str
    sample: int
    change: str
    draw: int

    def __str__(self) -> str:
        return f"{self.op}/{self.dtype}/{self.sample}/{self.change}/{self.draw}"

    @classmethod
    def parse(cls, name: str) -> Call:
        """Return the call of a name."""
        op, dtype, sample, change, draw = name.rsplit("/", 4)
        return cls(op, dtype, int(sample), change, int(draw))


def name_of(op: OpInfo) -> str:
    """Return the name of an entry, its variant included."""
    return op.name + (f".{op.variant_test_name}" if op.variant_test_name else "")


@cache
def entries() -> dict[str, OpInfo]:
    """Return the entries that calls are made of, by name."""
    skipped = _SPARSE | _UNSAFE
    return {name_of(op): op for op in sorted(op_db, key=name_of) if name_of(op) not in skipped}


# ---- changes


def _replaced(call: Prepared, choose: Callable[[Any], bool], change: Callable[[Any], Any], rng: Any) -> Any:
    """Return the call with one of the leaves that ``choose`` names changed, or None."""
    leaves, spec = tree_flatten((call.args, call.kwargs))
    places = [n for n, leaf in enumerate(leaves) if choose(leaf)]
    if not places:
        return None
    at = rng.choice(places)
    leaves[at] = change(leaves[at])
    args, kwargs = tree_unflatten(leaves, spec)
    return Prepared(call.function, args, kwargs)


def _is_tensor(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.layout == torch.strided


def _is_index(value: Any) -> bool:
    return _is_tensor(value) and value.dtype in (torch.int64, torch.int32)


def _is_number(value: Any) -> bool:
    return type(value) in (int, float)


def _cast(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return tensor.detach().to(dtype)


def _dtype(op: OpInfo, call: Prepared, rng: random.Random) -> Prepared | None:
    return _replaced(
        call, _is_tensor, lambda t: _cast(t, rng.choice([d for d in DTYPES if d != t.dtype])), rng
    )


def _index(op: OpInfo, call: Prepared, rng: random.Random) -> Prepared | None:
    others = [torch.int32, torch.int64, torch.int16, torch.uint8, torch.bool, torch.float32]
    return _replaced(
        call, _is_index, lambda t: _cast(t, rng.choice([d for d in others if d != t.dtype])), rng
    )


def _number(op: OpInfo, call: Prepared, rng: random.Random) -> Prepared | None:
    def other(value: Any) -> Any:
        choices = [0, -1, -7, True, 2.5] if type(value) is int else [0.0, -1.0, -0.5, True, 0]
        return rng.choice([c for c in choices if type(c) is not type(value) or c != value])

    return _replaced(call, _is_number, other, rng)


def _size(op: OpInfo, call: Prepared, rng: random.Random) -> Prepared | None:
    def other(tensor: torch.Tensor) -> torch.Tensor:
        tensor = tensor.detach()
        ways: list[Callable[[], torch.Tensor]] = [lambda: tensor.unsqueeze(0).clone()]
        if tensor.dim():
            dim = rng.randrange(tensor.dim())
            ways += [
                lambda: torch.cat([tensor, tensor.narrow(dim, 0, min(1, tensor.shape[dim]))], dim),
                lambda: tensor.narrow(dim, 0, 0).clone(),
                lambda: tensor.narrow(dim, 0, max(0, tensor.shape[dim] - 1)).clone(),
                lambda: tensor.sum(dim).to(tensor.dtype),
            ]
        return rng.choice(ways)()

    return _replaced(call, _is_tensor, other, rng)


def _results(call: Prepared) -> Any:
    """Return what a call gives on the CPU, to make ``out=`` of."""
    moved = Moved("cpu")
    return call.function(*moved(call.args), **moved(call.kwargs))


def _with_out(call: Prepared, change: Callable[[torch.Tensor], torch.Tensor], rng: Any) -> Prepared | None:
    """Return the call with ``out=`` like its results, one of them changed."""
    results = _results(call)
    single = isinstance(results, torch.Tensor)
    made = [results] if single else list(results)
    if not made or not all(_is_tensor(r) for r in made):
        return None
    made = [torch.zeros_like(r, memory_format=torch.contiguous_format) for r in made]
    at = rng.randrange(len(made))
    made[at] = change(made[at])
    return Prepared(call.function, call.args, {**call.kwargs, "out": made[0] if single else tuple(made)})


def _out_dtype(op: OpInfo, call: Prepared, rng: random.Random) -> Prepared | None:
    if not op.supports_out:
        return None
    return _with_out(call, lambda t: _cast(t, rng.choice([d for d in DTYPES if d != t.dtype])), rng)


def _out_shape(op: OpInfo, call: Prepared, rng: random.Random) -> Prepared | None:
    if not op.supports_out:
        return None

    def other(tensor: torch.Tensor) -> torch.Tensor:
        ways: list[Callable[[], torch.Tensor]] = [
            lambda: tensor.new_zeros((*tensor.shape, 2)),
            lambda: tensor.new_zeros(()).expand(tensor.shape),
            lambda: tensor.new_zeros(0),
        ]
        return rng.choice(ways)()

    return _with_out(call, other, rng)


def _shifted(tensor: torch.Tensor, like: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Return two tensors, of the values of ``tensor`` and of the size of ``like``, whose memory overlaps."""
    count = max(tensor.numel(), like.numel())
    if tensor.dtype != like.dtype or count == 0:
        return None
    base = torch.zeros(count + 1, dtype=tensor.dtype)
    one = base[: tensor.numel()].view(tensor.shape)
    one.copy_(tensor)
    return one, base[1 : 1 + like.numel()].view(like.shape)


def _out_overlap(op: OpInfo, call: Prepared, rng: random.Random) -> Prepared | None:
    """Give a tensor of the call as ``out=``, or memory that overlaps with it."""
    if not op.supports_out:
        return None
    results = _results(call)
    if not _is_tensor(results):
        return None
    leaves, spec = tree_flatten((call.args, call.kwargs))
    places = [n for n, leaf in enumerate(leaves) if _is_tensor(leaf) and leaf.dtype == results.dtype]
    if not places:
        return None
    at = rng.choice(places)
    if rng.random() < 0.5:
        out = leaves[at] = leaves[at].detach().clone()
    else:
        pair = _shifted(leaves[at].detach(), results)
        if pair is None:
            return None
        leaves[at], out = pair
    args, kwargs = tree_unflatten(leaves, spec)
    return Prepared(call.function, args, {**kwargs, "out": out})


def _inplace(op: OpInfo, call: Prepared, rng: random.Random) -> Prepared | None:
    if op.inplace_variant is None or not call.args or not _is_tensor(call.args[0]):
        return None
    return Prepared(op.inplace_variant, call.args, call.kwargs)


def _inplace_dtype(op: OpInfo, call: Prepared, rng: random.Random) -> Prepared | None:
    written = _inplace(op, call, rng)
    return None if written is None else _dtype(op, written, rng)


def _inplace_size(op: OpInfo, call: Prepared, rng: random.Random) -> Prepared | None:
    written = _inplace(op, call, rng)
    return None if written is None else _size(op, written, rng)


def _inplace_overlap(op: OpInfo, call: Prepared, rng: random.Random) -> Prepared | None:
    """Let the target repeat its memory, be another argument too, or overlap with one."""
    written = _inplace(op, call, rng)
    if written is None:
        return None
    target = written.args[0].detach()
    leaves, spec = tree_flatten((written.args, written.kwargs))
    others = [n for n, leaf in enumerate(leaves) if n and _is_tensor(leaf)]
    way = rng.choice(["repeats", "same", "shifted"])
    if way == "repeats" or not others:
        if not target.dim():
            return None
        leaves[0] = target.narrow(rng.randrange(target.dim()), 0, min(1, target.numel())).expand(target.shape)
    else:
        at = rng.choice(others)
        other = leaves[at].detach()
        if way == "same":
            same = other.shape == target.shape
            leaves[0] = leaves[at] = other.clone() if same else _cast(target, other.dtype)
        else:
            pair = _shifted(_cast(target, other.dtype), other)
            if pair is None:
                return None
            pair[1].copy_(other)
            leaves[0], leaves[at] = pair
    args, kwargs = tree_unflatten(leaves, spec)
    return Prepared(written.function, args, kwargs)


def _share(op: OpInfo, call: Prepared, rng: random.Random) -> Prepared | None:
    """Let any two tensors of a call, in place, with ``out=`` or neither, share memory; or let one repeat its own."""
    forms = [
        call,
        call,
        _inplace(op, call, rng),
        _with_out(call, lambda t: t, rng) if op.supports_out else None,
    ]
    written = rng.choice([form for form in forms[1:] if form is not None])
    leaves, spec = tree_flatten((written.args, written.kwargs))
    places = [n for n, leaf in enumerate(leaves) if _is_tensor(leaf)]
    way = rng.choice(["same", "shifted", "part", "repeats"])
    if way == "repeats" or len(places) < 2:
        at = rng.choice(places)
        tensor = leaves[at].detach()
        if not tensor.numel() or not tensor.dim():
            return None
        leaves[at] = tensor.narrow(rng.randrange(tensor.dim()), 0, 1).expand(tensor.shape)
    else:
        one, other = rng.sample(places, 2)
        tensor, second = leaves[one].detach(), leaves[other].detach()
        if way == "same":
            leaves[one] = leaves[other] = tensor.clone()
        elif way == "part":  # one lies within the other
            large, small = (one, other) if tensor.numel() >= second.numel() else (other, one)
            base = leaves[large].detach().clone().contiguous()
            if base.dtype != leaves[small].dtype or not leaves[small].numel():
                return None
            count = leaves[small].numel()
            leaves[large], leaves[small] = base, base.view(-1)[-count:].view(leaves[small].shape)
        else:
            pair = _shifted(tensor, second)
            if pair is None:
                return None
            pair[1].copy_(second)
            leaves[one], leaves[other] = pair
    args, kwargs = tree_unflatten(leaves, spec)
    return Prepared(written.function, args, kwargs)


CHANGES: dict[str, Change] = {
    "dtype": Change(_dtype),
    "index": Change(_index),
    "number": Change(_number),
    "size": Change(_size),
    "out-dtype": Change(_out_dtype),
    "out-shape": Change(_out_shape),
    "out-overlap": Change(_out_overlap),
    "inplace-dtype": Change(_inplace_dtype),
    "inplace-size": Change(_inplace_size),
    "inplace-overlap": Change(_inplace_overlap),
    "share": Change(_share),
}
# Calls that share memory are drawn by themselves.
_WEIGHTS = {"dtype": 6, "index": 2, "number": 5, "size": 3, "out-dtype": 3, "inplace-dtype": 3, "share": 0}


# ---- calls


def calls(seed: int, count: int, only: str | None = None) -> Iterator[Call]:
    """Yield that many calls that can be made, always the same for a seed; with one sort of change or with any."""
    rng = random.Random(seed)
    names, changes = [*entries()], [*CHANGES]
    weights = [_WEIGHTS.get(change, 1) for change in changes]
    made = 0
    while made < count:
        op = entries()[rng.choice(names)]
        supported = [d for d in DTYPES if d in op.supported_dtypes("cpu")]
        plain = [d for d in supported if d == torch.float32] or supported
        (change,) = [only] if only is not None else rng.choices(changes, weights)
        if not supported:
            continue
        dtype = rng.choice(plain if rng.random() < 0.8 else supported)
        short = str(dtype).removeprefix("torch.")
        call = Call(name_of(op), short, rng.randrange(_SAMPLES), change, rng.randrange(1000))
        if prepare(call) is not None:
            made += 1
            yield call


def prepare(call: Call) -> Prepared | None:
    """Return a call on the CPU, or None where its sample cannot be changed so."""
    op = entries()[call.op]
    made = _samples(call.op, call.dtype)
    if not made or (call.op, call.change) in _UNSAFE_CHANGES:
        return None
    seed = zlib.crc32(str(call).encode())
    torch.manual_seed(seed)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        sample = made[call.sample % len(made)]
        plain = Prepared(op.op, (sample.input, *sample.args), dict(sample.kwargs))
        try:
            return CHANGES[call.change].choose(op, plain, random.Random(seed))
        except Exception:
            return None  # the sample cannot be run to make out= of, or not be cast


@cache
def _samples(op: str, dtype: str) -> list[Any]:
    """Return the first samples of an entry, always the same."""
    torch.manual_seed(zlib.crc32(f"{op}/{dtype}".encode()))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return [*itertools.islice(entries()[op].sample_inputs("cpu", getattr(torch, dtype)), _SAMPLES)]


class Moved:
    """Copies of arguments on a device; what shares memory there shares memory here."""

    def __init__(self, device: str, keep: bool = False) -> None:
        self.device, self.keep = device, keep
        self.bases: dict[tuple[int, torch.dtype], torch.Tensor] = {}
        self.tensors: dict[int, torch.Tensor] = {}
        self._alive: list[torch.Tensor] = []  # an id is one tensor's as long as it lives

    def __call__(self, value: Any) -> Any:
        """Return any argument with its tensors copied."""
        return tree_map(self._leaf, value)

    def _leaf(self, value: Any) -> Any:
        if _is_tensor(value):
            return self.tensors[id(value)] if id(value) in self.tensors else self._copied(value)
        is_cpu = isinstance(value, torch.device) and value.type == "cpu"
        named = is_cpu or (isinstance(value, str) and value == "cpu")
        return torch.device(self.device) if named else value

    def _copied(self, tensor: torch.Tensor) -> torch.Tensor:
        self._alive.append(tensor)
        plain = tensor.detach().resolve_conj().resolve_neg()
        key = (plain.untyped_storage().data_ptr() or id(plain), plain.dtype)
        if key not in self.bases:
            self._alive.append(plain)
            length = plain.untyped_storage().nbytes() // plain.element_size()
            self.bases[key] = plain.as_strided((length,), (1,), 0).to(self.device, copy=True)
        made = self.bases[key].as_strided(plain.shape, plain.stride(), plain.storage_offset())
        self.tensors[id(tensor)] = made
        return made


@dataclass
class Outcome:
    """What came of a call in one place."""

    results: list[Any] = field(default_factory=list)
    error: Exception | None = None
    changed: bool = False


def outcome(call: Call, prepared: Prepared, device: str) -> Outcome:
    """Make a call on copies of its arguments on a device."""
    moved = Moved(device)
    host = call.op in HOST_ARGUMENTS and device == "jax"
    args, kwargs = moved(prepared.args), moved(prepared.kwargs)
    if host:
        args = (args[0], *prepared.args[1:])
    before = {key: base.cpu().clone() for key, base in moved.bases.items()}
    torch.manual_seed(0)
    try:
        results = prepared.function(*args, **kwargs)
        kept = [leaf for leaf in tree_leaves(results) if leaf is not None]
        return Outcome([leaf.cpu() if _is_tensor(leaf) else leaf for leaf in kept])
    except Exception as error:
        same = [_same(base.cpu(), before[key]) for key, base in moved.bases.items()]
        return Outcome(error=error, changed=not all(same))


def _same(one: torch.Tensor, other: torch.Tensor) -> bool:
    return torch.equal(
        one.view(torch.uint8) if one.dim() else one, other.view(torch.uint8) if one.dim() else other
    )


def differs(call: Call) -> str | None:
    """Return how the device differs from the CPU, '' where it does not, None where the CPU is no reference."""
    prepared = prepare(call)
    if prepared is None:
        return None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        want = outcome(call, prepared, "cpu")
        if want.error is not None and NO_REFERENCE.search(str(want.error)):
            return None
        got = outcome(call, prepared, "jax")
    return _difference(got, want)


def _difference(got: Outcome, want: Outcome) -> str:
    if want.error is None and got.error is None:
        try:
            compare_forms(got.results, want.results, "cpu")
        except Mismatch as mismatch:
            return f"another form: {mismatch}"
        return ""
    if want.error is None:
        return f"refused: {_words(got.error)}"
    if got.error is None:
        return f"accepted: the CPU raises {_words(want.error)}"
    if type(got.error) is not type(want.error):
        return f"another exception: {_words(got.error)}; the CPU raises {_words(want.error)}"
    if got.changed and not want.changed:
        return f"changed: a failed call wrote to its arguments ({_words(got.error)})"
    return ""


def _words(error: Exception | None) -> str:
    lines = str(error).strip().split("\n")
    return f"{type(error).__name__}: {lines[0][:160]}"


# ---- the calls we know to differ


@cache
def rows() -> list[dict[str, Any]]:
    """Return the rows of the table: each names calls that differ, and why."""
    return tomllib.loads(TABLE.read_text(encoding="utf-8")).get("differs", []) if TABLE.exists() else []


def row_of(call: Call, difference: str) -> dict[str, Any] | None:
    """Return the row that tells of a difference."""
    for row in rows():
        named = "names" not in row or call.op in row["names"]
        changed = call.change in row.get("changes", [call.change])
        if named and changed and re.search(row["what"], difference):
            return row
    return None


@dataclass
class Tally:
    """How calls went."""

    counts: Counter[str] = field(default_factory=Counter)
    unlisted: list[str] = field(default_factory=list)
    listed: list[str] = field(default_factory=list)

    def add(self, call: Call) -> str | None:
        """Make a call and count it; return how it differs."""
        difference = differs(call)
        if difference is None:
            self.counts["no reference"] += 1
        elif not difference:
            self.counts["agree"] += 1
        else:
            known = row_of(call, difference)
            self.counts["differ"] += 1
            (self.listed if known else self.unlisted).append(f"{call}  {difference}")
        return difference

    @property
    def agreement(self) -> float:
        """The part of the calls with a reference that agree."""
        return self.counts["agree"] / max(1, self.counts["agree"] + self.counts["differ"])

    def __str__(self) -> str:
        counts = ", ".join(f"{count} {name}" for name, count in sorted(self.counts.items()))
        return f"{counts}: {100 * self.agreement:.2f} % agree; {len(self.unlisted)} not in {TABLE.name}"


def main() -> None:
    """Make calls and print how they went."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("names", nargs="*", help="calls to make, by name")
    parser.add_argument(
        "--seeds", type=int, nargs=2, default=(0, 1), help=f"{CHUNK} calls for each from .. to"
    )
    parser.add_argument("--change", choices=CHANGES, help="make only calls with this change")
    given = parser.parse_args()
    import isthmus

    isthmus.config.fallback, isthmus.config.check_indices = "cpu", "now"
    tally = Tally()
    made = itertools.chain.from_iterable(calls(seed, CHUNK, given.change) for seed in range(*given.seeds))
    for call in map(Call.parse, given.names) if given.names else made:
        difference = tally.add(call)
        if difference or given.names:
            print(call, difference, flush=True)
        if sum(tally.counts.values()) % 1000 == 0:
            print(tally, flush=True)
    print(tally)


if __name__ == "__main__":
    main()
