"""Programs whose sizes change: the same lines again and again, in a loop, with other sizes in each turn.

A program is written out, so that it runs, is compared and is made smaller like any other (``running.py``)::

    b, n = 2, 17                                        # the first turn
    t1 = data(3, (b, n), torch.float32, dev)            # makes
    t2 = torch.cat([t1, t1[:, :1]], 1)                  # body: of a function in modes "jit" and "compiled"
    k1 = t2[1:]                                         # after: is kept over turns
    r1 = t2.tolist()                                    # reads, in every way there is
    b, n = 2, 9                                         # the second turn ...

So arrays have padding in later turns. Kept are views, results, gradients and old caches; reads, writes, copies, other
threads and changes of mode come in between. At the end all that a program has named is compared with the CPU's, so
memory that was given away too early shows.
"""

from __future__ import annotations

import contextlib
import itertools
import random
from collections.abc import Callable
from typing import Any

import torch

import isthmus
from tests.fuzz import running
from tests.fuzz.programs import Generator, execute, namespace, raised_by, tensors

MODES = ("eager", "lazy", "jit", "compiled")
WHOLE = ("jit", "compiled")
Names = dict[str, Any]
# No sum, in any order, of products of two numbers is rounded in float32: of at most 2**13 elements each.
_LARGEST, _TOTAL = 2**7, 2**16

PRELUDE = """
import contextlib, copy, io, pickle, threading
from torch.nn import functional as F

def together(*functions):
    results, errors = [None] * len(functions), []
    def run(at):
        try:
            results[at] = functions[at]()
        except Exception as error:
            errors.append(error)
    threads = [threading.Thread(target=run, args=(at,)) for at in range(len(functions))]
    for each in threads: each.start()
    for each in threads: each.join()
    if errors: raise errors[0]
    return results

def aside(function):
    return together(function)[0]

def recorded(function):
    with lazy():
        return function()

def refused(function):
    try:
        return function().tolist() is None
    except (IndexError, RuntimeError):
        return True

def saved(x):
    file = io.BytesIO()
    torch.save(x, file)
    file.seek(0)
    return torch.load(file)
"""

# What a turn begins with; the shapes of one program have at most three axes that vary.
SHAPES = (
    ["(b, n)"] * 4
    + ["(b, n, 16)"] * 4
    + ["(n,)", "(n, 16)", "(n, b)", "(b, 1, n)", "(n, n)", "(b, 4)", "(16, n)"]
)
DTYPES = [torch.float32] * 6 + [torch.int64] * 2 + [torch.bool]
SMALL = [[1, 2, 3], [0, 1, 2, 3, 5, 7, 8, 9, 12, 16, 17]]
LARGE = [[1, 2, 3], [24, 33, 40, 48, 63, 64, 65, 70, 80]]


class _Lines(Generator):
    """Lines for one part of a turn, written for the sizes of the first."""

    def __init__(self, chance: random.Random, names: Names, replay: Callable[[list[str]], Names]) -> None:
        self.chance, self.names, self.lines, self.count = chance, names, [], 0
        self.raises, self.by_line = 0, False  # no ``resize_`` to a number: in another turn it may be longer
        self._replay = replay

    def add(self, line: str) -> bool:
        """Run a line on the CPU and keep it; take it back where it raises or makes numbers that would be rounded."""
        raised = execute(line, self.names)
        if raised is None and all(map(tame, tensors(self.names).values())):
            self.lines.append(line)
            return True
        self.names = self._replay(self.lines)
        return False

    def start(self) -> None:
        """Begin with one more tensor."""
        shape, dtype = self.chance.choice(SHAPES), self.chance.choice(DTYPES)
        made = f"data({self.chance.randint(0, 9)}, {shape}, {dtype}, dev)"
        self.add(self.new(made + self.one("", "", "", ".mT" if "," in shape.strip(",)") else "", "[1:]")))

    def sized(self) -> str | None:
        """Do what depends on the sizes of this turn."""
        name = self.pick(lambda x: x.dim() > 0)
        if name is None:
            return None
        d = self.dim(self.names[name])
        other = self.pick(lambda x: x.dtype == self.names[name].dtype) or name
        ways = [
            f"torch.cat([{name}, {name}.narrow({d}, 0, 1)], {d})", f"{name}.narrow({d}, 0, {name}.shape[{d}] // 2)",
            f"{name}[: n // 2]", f"{name}[-(n // 3 + 1):]", "torch.arange(n, device=dev)", f"{name}[..., : b + 1]",
            f"F.pad({name}, (1, 2))", f"{name}.reshape(b, -1)", f"{name}.reshape(-1, {name}.shape[-1])",
            f"{name}.narrow({d}, 1, {name}.shape[{d}] - 1)", "torch.zeros(b, n, device=dev)",
            f"{name}[{name}.shape[0] - 1]", "torch.ones(n, 16, device=dev).cumsum(0).clamp(max=9)",
            f"{name}.new_zeros({name}.shape)",
            f"{name}.index_select({d}, torch.arange({name}.shape[{d}] // 2, device=dev))",
            f"torch.cat([{name}.reshape(-1), {other}.reshape(-1)])", f"{name} * b", f"{name} + n % 5",
            "torch.tril(torch.ones(n, n, device=dev, dtype=torch.bool))", f"{name}.expand(3, *{name}.shape)",
        ]  # fmt: skip
        return self.new(self.chance.choice(ways))

    def sized_write(self) -> str | None:
        """Write to a part that the sizes say."""
        name = self.writable()
        if name is None or not self.names[name].dim():
            return None
        d = self.dim(self.names[name])
        return self.one(
            f"{name}[: n // 2] = {self.number()}", f"{name}.narrow({d}, {name}.shape[{d}] // 2, 1).add_(1)",
            f"{name}[..., -1:] = 2", f"{name}.narrow({d}, 0, {name}.shape[{d}] // 2).zero_()", f"{name}[-1] = 1",
            f"{name}[torch.arange({name}.shape[0] // 2, device=dev)] = 3", f"torch.add({name}, 1, out={name})",
            f"{name}[{name}.shape[0] - 1] += 1",
        )  # fmt: skip

    def weigh(self) -> str | None:
        """Differentiate what a parameter makes of a tensor of this turn."""
        name = self.pick(lambda x: x.dim() > 1 and x.shape[-1] == 16 and x.dtype == torch.float32)
        if name is None:
            return self.one("with torch.no_grad(): w.sub_(1)", "w.grad = None")
        return self.one(
            f"({name}.detach() @ w).sign().mul(w.sum()).sum().backward()", f"({name} * w[0]).sum().backward()",
            f"{self.new(f'({name} * w[1])')}", "(w * 2).sum().backward(retain_graph=True)",
            "w.grad = None", "with torch.no_grad(): w.clamp_(-2, 2).sub_(1)",
        )  # fmt: skip


class _After(_Lines):
    """Lines that come after the body of a turn."""

    def keep(self) -> str | None:
        """Keep something for later turns."""
        name = self.pick()
        if name is None:
            return None
        self.count += 1
        way = self.one(
            name, name, name, f"{name}[1:]", f"{name}.detach()", f"{name}.data", f"copy.deepcopy({name}.detach())",
            f"{name}.clone()", "past", "past[:, :2]", f"{name}.mT", f"{name}.view(-1)", "w.grad",
        )  # fmt: skip
        return f"k{self.count}_TURN = {way}"

    def grow(self) -> str | None:
        """Let a cache grow, shrink or begin anew."""
        return self.one(
            "past = torch.cat([past, torch.full((2, 1, 32), 2.0, device=dev)], 1)",
            "past = torch.cat([past, torch.full((2, 1, 32), 2.0, device=dev)], 1)",
            "past = torch.cat([past, past[:, :n]], 1)[:, -200:]",
            "past = torch.cat([past, torch.full((2, n, 32), 1.0, device=dev)], 1)[:, -200:]",
            "past = past[:, :n].contiguous()", "past[:, -1] = 1", "past.add_(1)", "old = past", "old.mul_(1)",
            "past = past.index_select(0, torch.tensor([1, 0], device=dev))", "past[:, :1].zero_()",
        )  # fmt: skip

    def read_one(self) -> str | None:
        """Read a tensor in any way."""
        name = self.pick(lambda x: x.numel() > 0) or "past"
        name = self.one(name, name, name, "past")
        self.count += 1
        plain = f"{name}.detach()"
        return self.one(
            f"r{self.count} = {name}.tolist()", f"r{self.count} = {name}.reshape(-1)[0].item()", f"str({name})",
            f"r{self.count} = {name}.sum().item()", f"c{self.count} = {plain}.cpu().clone()",
            f"r{self.count} = {plain}.cpu().numpy().tolist()", f"{name}.data_ptr()",
            f"r{self.count} = torch.from_dlpack({plain}).tolist()",
            f"t{self.count} = pickle.loads(pickle.dumps({plain}))",
            f"t{self.count} = copy.deepcopy({plain})", f"t{self.count} = saved({plain})",
            f"r{self.count} = len({name})",
            f"r{self.count} = bool(({name} == 1).any())",
            f"r{self.count} = ({name}.reshape(-1) != 0).nonzero().tolist()",
            f"r{self.count} = torch.equal({name}, {name}.clone())", "sync()",
            f"t{self.count} = {name}.detach().cpu().clone().to(dev)",
            f"r{self.count} = {name}.shape", f"for row in {name}: row.sum()",
            f"t{self.count} = {plain}.to(torch.float64)",
        )  # fmt: skip

    def wrong(self) -> str | None:
        """Ask for elements past the end, which are inside of what arrays are padded to, or just not."""
        name = self.pick(lambda x: x.dim() > 0 and x.numel() > 0)
        if name is None:
            return None
        d = self.dim(self.names[name])
        self.count += 1
        past = self.one("torch.tensor([{}], device=dev)", "torch.full((2,), {}, device=dev)")
        past = past.format(self.one("{0}.shape[{1}]", "-{0}.shape[{1}] - 1", "{0}.shape[{1}] - 1"))
        first, along = past.format(name, 0), past.format(name, d)
        way = self.one(
            f"{name}[{first}]", f"{name}.index_select({d}, {along})", f"{name}.clone().index_fill_({d}, {along}, 1)",
            f"F.embedding({first}, {name}.reshape({name}.shape[0], -1).float())",
            f"torch.gather({name}, {d}, torch.full_like({name}, {name}.shape[{d}], dtype=torch.int64))",
            f"{name}.clone().index_put(({first},), {name}[0])", f"{name}.take({past.format(name + '.view(-1)', 0)})",
        )  # fmt: skip
        return f"r{self.count} = refused(lambda: {way})"

    def store(self) -> str | None:
        """Change what a tensor lies on."""
        name = self.pick(lambda x: x.is_contiguous() and not x.requires_grad and not x.storage_offset())
        if name is None:
            return None
        x: torch.Tensor = self.names[name]
        other = self.pick(lambda y: y.dtype == x.dtype and not y.requires_grad) or name
        # What shares memory with the target would be read while it is resized.
        apart = (
            self.pick(lambda y: y.untyped_storage().data_ptr() != x.untyped_storage().data_ptr()) or "past"
        )
        self.count += 1
        return self.one(
            f"{name}.resize_({name}.numel() // 2)", f"{name}.set_({other})", f"{name}.data = {other}.clone()",
            f"t{self.count} = {name}.new_empty(0).set_({name}.untyped_storage(), 0, {name}.shape)",
            f"torch.mul({apart}, 2, out={name})",
            f"t{self.count} = torch.add({name}, 1, out=torch.empty(0, dtype={name}.dtype, device=dev))",
        )  # fmt: skip

    def elsewhere(self) -> str | None:
        """Use a tensor in another thread, or another mode."""
        name, target = self.pick(), self.writable()
        if name is None or target is None:
            return None
        name, target = self.one(name, "past"), self.one(target, "past")
        self.count += 1
        both = f"t{self.count}, t{self.count + 1}"
        use = self.one(f"{name} * 2", f"{name}[:1] + 1", f"{name}.clone()", f"{name} == 1")
        write = self.one(
            f"{target}.add_(1)", f"{target}.zero_()", f"{target}[:1].fill_(2)", f"{target}.mul_(2)"
        )
        return self.one(
            f"t{self.count} = aside(lambda: {use})", f"aside(lambda: {write})",
            f"t{self.count} = recorded(lambda: {use})",
            f"recorded(lambda: {write})", f"t{self.count} = aside(lambda: recorded(lambda: {use}))",
            f"aside(lambda: recorded(lambda: {write}))", f"r{self.count} = aside(lambda: {name}.tolist())",
            f"{both} = together(lambda: {use}, lambda: {name} + 1)",
            f"{both} = together(lambda: recorded(lambda: {use}), lambda: recorded(lambda: {name} + {name}))",
            f"t{self.count}, r{self.count} = together(lambda: recorded(lambda: {use}), lambda: {name}.tolist())",
            "set_mode('lazy')", "set_mode('eager')",
        )  # fmt: skip


def tame(x: torch.Tensor) -> bool:
    """Return whether a tensor's values, and its gradient's, are exact whatever is done with them next."""
    try:
        grad = x.grad if x.is_leaf else None
    except RuntimeError:  # a view of several whose base was written to: nothing can be asked of it
        return False
    for y in (x, grad):
        if y is not None and y.numel() and y.dtype != torch.bool:
            if y.is_complex():
                return False
            wide = y.detach().double().abs()
            if y.numel() > 2**16 or not (bool(wide.max() <= _LARGEST) and bool(wide.sum() <= _TOTAL)):
                return False
    return True


def names_on(device: str, transform: Callable[[Any], Any] = lambda function: function) -> Names:
    """Return the names a program starts with; ``transform`` is done to its function, if it has one."""
    names = namespace(device)
    ours = device == "jax"
    names["lazy"] = isthmus.lazy if ours else contextlib.nullcontext
    names["sync"] = isthmus.sync if ours else lambda: None
    names["set_mode"] = isthmus.set_mode if ours else lambda name: None
    names["transform"] = transform
    exec(PRELUDE, names)
    return names


def make(seed: int, mode: str, large: bool = False) -> list[str]:
    """Return the lines of a program for a mode."""
    chance = random.Random(seed)
    batches, lengths = LARGE if large else SMALL
    sizes = [(chance.choice(batches), chance.choice(lengths)) for _ in range(chance.randint(3, 5))]
    if chance.random() < 0.5:  # only one of them varies
        sizes = [(sizes[0][0], n) for _, n in sizes]
    if chance.random() < 0.3:
        sizes = [(n, n) for _, n in sizes] if not large else sizes
    sizes += chance.choices(sizes, k=chance.randint(0, 2))
    first = f"b, n = {sizes[0]}"
    before = [
        "past = torch.zeros(2, 3, 32, device=dev)",
        "w = torch.ones(16, 16, device=dev).requires_grad_()",
    ]

    def ran(lines: list[str]) -> Names:
        return _ran(names_on("cpu"), [*before, first, *lines])

    begin = _Lines(chance, ran([]), ran)
    for _ in range(chance.randint(1, 3)):
        begin.start()
    body = _Lines(chance, begin.names, lambda lines: ran([*begin.lines, *lines]))
    body.count = begin.count
    kinds = [
        body.view,
        body.view,
        body.write,
        body.compute,
        body.compute,
        body.sized,
        body.sized,
        body.sized_write,
    ]
    kinds += [body.index, body.index_write]
    kinds += [body.weigh] if mode not in WHOLE else []
    _write(body, kinds, chance.randint(2, 7))
    after = _After(chance, body.names, lambda lines: ran([*begin.lines, *body.lines, *lines]))
    after.count = body.count + 10
    kinds = [after.keep, after.keep, after.grow, after.grow, after.read_one, after.read_one, after.elsewhere]
    kinds += [after.write, after.compute, after.sized, after.store, after.weigh, after.wrong]
    _write(after, kinds, chance.randint(5, 14))
    middle = body.lines
    if mode in WHOLE:
        results = _results(begin.lines, body, mode)
        function, call = _function(begin.lines, body.lines, results)
        before, middle = [*before, function, "turn = transform(turn)"], [call]
    whole = _After(chance, names_on("cpu"), lambda lines: _ran(names_on("cpu"), lines))
    whole.count = after.count
    for line in before:
        whole.add(line)
    for turn, (b, n) in enumerate(sizes):
        # Others in each turn, and some in the middle of the body: the same graphs come in other pieces.
        rest = [line for line in after.lines if chance.random() < 0.6]
        inside = [[line, *chance.choices(after.lines, k=chance.random() < 0.3)] for line in middle]
        rest = [*itertools.chain(*inside), *rest]
        # An index into nothing is wrong here, and passes unseen on the CPU where nothing is read or written.
        if not n and any("torch.tensor([" in line for line in [*body.lines, *rest]):
            continue
        for line in [f"b, n = {b}, {n}", *begin.lines, *rest]:
            if n or "refused(" not in line:
                whole.add(line.replace("_TURN", f"_{turn}"))
        if n:
            # Graphs that no other turn has are compiled exactly, and are given what is padded.
            _write(whole, [whole.keep, whole.read_one, whole.read_one, whole.write, whole.compute], 4)
    return [line.replace("_TURN", "") for line in whole.lines]


def _ran(names: Names, lines: list[str]) -> Names:
    for line in lines:
        execute(line, names)
    return names


def _write(part: _Lines, kinds: list[Callable[[], str | None]], count: int) -> None:
    tries = 4 * count
    while count and tries:
        tries -= 1
        line = part.chance.choice(kinds)()
        count -= line is not None and part.add(line)


def _results(begin: list[str], body: _Lines, mode: str) -> list[str]:
    """Return the names of what a function returns."""
    given = running.assigned(begin)
    results = list(dict.fromkeys([*given, *running.assigned(body.lines)]))
    if mode == "compiled":
        return results
    # What a replay returns is new or an argument, so results share memory in the recorded call alone.
    storages = {id: n for n, id in reversed([(n, body.names[n].untyped_storage()._cdata) for n in results])}
    return [n for n in results if n in storages.values()]


def _function(begin: list[str], body: list[str], results: list[str]) -> tuple[str, str]:
    """Return the lines that define the function of a turn's tensors and sizes, and that call it."""
    given, inside = ", ".join([*running.assigned(begin), "b", "n"]), "".join(f"    {line}\n" for line in body)
    shown = ", ".join(results)
    return f"def turn({given}):\n{inside}    return [{shown}]\n", f"[{shown}] = turn({given})"


def difference(lines: list[str], mode: str) -> str | None:
    """Return what differs between the CPU and the device in this mode; None if nothing does."""
    if mode == "compiled":
        found = _difference(lines, names_on("jax", lambda f: torch.compile(f, backend="isthmus")), mode)
        if found is None:
            return None
        # torch's tracing itself, without any backend, may differ from what it traced.
        traced = _difference(lines, names_on("cpu", lambda f: torch.compile(f, backend="aot_eager")), mode)
        return found if traced is None else None
    return _difference(lines, names_on("jax", isthmus.jit), mode)


def _difference(lines: list[str], ours: Names, mode: str) -> str | None:
    theirs = names_on("cpu")
    was = isthmus.mode()
    isthmus.set_mode("lazy" if mode == "lazy" else "eager")
    try:
        for line in lines:
            want, got = raised_by(line, theirs), raised_by(line, ours)
            if isinstance(want, NameError) or isinstance(got, (NameError, isthmus.errors.JitError)):
                return None  # made smaller too far, or cannot be replayed, and says so
            if want is not None and (got is None or not isinstance(got, type(want))):
                return f"{line}: the CPU raises {want!r}, the device {got!r}"
            if want is None and got is not None:
                return f"{line}: the device raises {got!r}, the CPU does not"
        return running.compare(theirs, ours, lines, versions=mode not in WHOLE)
    except (
        IndexError,
        RuntimeError,
    ) as error:  # of a value check whose program ran with the last read; of lost data
        return f"the device raises {error!r}"
    finally:
        with contextlib.suppress(IndexError):
            isthmus.set_mode(was)


def check(seeds: range, mode: str, large: bool = False) -> int:
    """Run the programs of these seeds in a mode; raise an AssertionError with the lines of the first that differs."""
    for seed in seeds:
        lines = make(seed, mode, large)
        why = difference(lines, mode)
        if why is not None:
            smaller, found = running.shrink(lines, lambda fewer: difference(fewer, mode))
            text = "\n".join(smaller)
            raise AssertionError(f"program {seed} in mode {mode}, large={large}: {found or why}\n{text}")
    return len(seeds)
