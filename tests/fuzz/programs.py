"""Programs made from a seed: lines of Python on a handful of tensors, each valid, or refused, on the CPU.

A line is written by a method of ``Generator`` that looks at the tensors as they are on the CPU at that point, and is
run there at once, so what follows can build on it. Values are small integers, in floats too, so that every result is
exact and is compared bit by bit. Excluded by construction, because they differ and README's "Where it differs from the
CPU" says so: writes through windows that overlap, indices out of range (they raise elsewhere on an accelerator), ties
of unstable sorts, denormal numbers (bits of integers seen as floats), sums of half types in another order.
"""

from __future__ import annotations

import random
import warnings
from typing import Any

import torch

# Few shapes, and few dtypes most of the time: ops are compiled for both, and thousands of programs share what is.
SHAPES = [(4,), (4,), (2, 3), (2, 3), (2, 3), (4, 4), (2, 2, 2), (), (3, 1), (0, 3)]
FLOATS = [torch.float32, torch.float64]
HALVES = [torch.bfloat16, torch.float16]
DTYPES = (
    [torch.float32] * 12 + [torch.int64] * 4 + [torch.bool, torch.complex64, torch.bfloat16, torch.float64]
)
RARE = [torch.int32, torch.int16, torch.uint8, torch.float16]
# Which kernels torch has for which dtypes is for the fuzzer of refusals.
_REFUSED_DTYPES = (NotImplementedError, TypeError)
LARGEST = 2**18  # beyond it sums of products would no longer be exact in float32

# What a line may use besides torch; written into scripts that reproduce a failure, too.
PRELUDE = """
def data(seed, shape, dtype, dev):
    g = torch.Generator().manual_seed(seed)
    return torch.randint(-4, 5, shape, generator=g).to(dtype).to(dev)
"""


def namespace(device: str) -> dict[str, Any]:
    """Return the names a program starts with."""
    names: dict[str, Any] = {"torch": torch, "dev": device}
    exec(PRELUDE, names)
    return names


def execute(line: str, names: dict[str, Any]) -> type[Exception] | None:
    """Run a line, and return the type of what it raised."""
    error = raised_by(line, names)
    return None if error is None else type(error)


def raised_by(line: str, names: dict[str, Any]) -> Exception | None:
    """Run a line, and return what it raised."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            exec(line, names)
    except Exception as error:
        # Without the frames, which would keep tensors alive.
        return error.with_traceback(None)
    return None


def tensors(names: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Return the tensors a program has made, those of the CPU (``c0``, ``c1``...) included."""
    return {name: value for name, value in names.items() if isinstance(value, torch.Tensor)}


def expanded(x: torch.Tensor) -> bool:
    """Return whether elements are shown more than once by a stride of zero."""
    return any(n > 1 and s == 0 for n, s in zip(x.shape, x.stride(), strict=True))


def overlaps(x: torch.Tensor) -> bool:
    """Return whether elements share memory without a stride of zero: torch leaves such writes undefined."""
    if expanded(x):
        return False  # refused
    places = torch.zeros((), dtype=torch.int64)
    for n, s in zip(x.shape, x.stride(), strict=True):
        places = places.unsqueeze(-1) + torch.arange(n) * s
    return places.unique().numel() != x.numel()


class Generator:
    """Writes one program."""

    def __init__(
        self, seed: int, steps: int = 10, autograd: bool = True, reads: bool = True, refusals: int = 2
    ) -> None:
        self.chance = random.Random(seed)
        self.names = namespace("cpu")
        self.lines: list[str] = []
        self.raises = refusals  # how many lines may raise
        self.by_line = reads  # otherwise the program becomes a function
        self.count = 0
        kinds = [
            self.start,
            self.view,
            self.view,
            self.view,
            self.write,
            self.write,
            self.write,
            self.compute,
        ]
        kinds += [self.compute, self.index, self.index_write, self.scalar]
        kinds += [self.differentiate, self.differentiate] if autograd else []
        kinds += [self.read] if reads else []
        self.start()
        for _ in range(steps):
            line = self.chance.choice(kinds)()
            if line is not None and not self.add(line):
                break

    # Writing lines

    def add(self, line: str) -> bool:
        """Run a line on the CPU and keep it; False if the program has to end before it."""
        refused = execute(line, self.names)
        if refused is not None and (self.raises <= 0 or refused in _REFUSED_DTYPES):
            return True  # a line that raised changed nothing, so it can be left out
        self.raises -= refused is not None
        if not all(tame(x) for x in tensors(self.names).values()):
            return False
        self.lines.append(line)
        return True

    def new(self, expression: str) -> str:
        """Return a line that names a new tensor."""
        self.count += 1
        return f"t{self.count} = {expression}"

    def names_of(self, want: Any = None) -> list[str]:
        """Return the names of the device's tensors, of those for which ``want`` holds."""
        found = [n for n, x in tensors(self.names).items() if n.startswith("t")]
        return [n for n in found if want is None or want(self.names[n])]

    def pick(self, want: Any = None) -> str | None:
        """Return the name of a tensor; later ones are likelier."""
        found = self.names_of(want)
        return self.chance.choice(found + found[-3:]) if found else None

    def dim(self, x: torch.Tensor) -> int:
        """Return a dim of a tensor."""
        return self.chance.randint(-x.dim(), x.dim() - 1) if x.dim() else 0

    def dtype(self) -> torch.dtype:
        """Return a dtype."""
        return self.chance.choice(RARE if self.chance.random() < 0.05 else DTYPES)

    def one(self, *options: Any) -> Any:
        """Return one of these."""
        return self.chance.choice(options)

    def number(self) -> str:
        """Return a number, or a scalar of the CPU."""
        scalars = [n for n, x in tensors(self.names).items() if n.startswith("c") and not x.dim()]
        if scalars and self.chance.random() < 0.4:
            return self.chance.choice(scalars)
        return self.one("2", "-1", "3", "0.5", "-1.5", "True", "0")

    def start(self) -> None:
        """Begin with one more tensor."""
        shape, dtype = self.chance.choice(SHAPES), self.dtype()
        made = f"data({self.chance.randint(0, 9)}, {shape}, {dtype}, dev)"
        if len(shape) > 1:
            made += self.one("", "", ".mT", "[..., ::2]", "[1:]")
        elif shape:
            made += self.one("", "", "[1:]", "[::2]")
        if self.chance.random() < 0.15:
            made = self.one(
                f"torch.zeros({shape}, dtype={dtype}, device=dev)",
                f"torch.full({shape}, 3, dtype={dtype}, device=dev)",
                f"torch.ones({shape}, dtype={dtype}, device=dev)",
                "torch.arange(6, device=dev)",
                "torch.eye(4, device=dev)",
            )
        self.add(self.new(made))

    def scalar(self) -> str:
        """Make, or write to, a scalar of the CPU that is a view."""
        vectors = [n for n, x in tensors(self.names).items() if n.startswith("c") and x.dim()]
        self.count += 1
        if not vectors:
            dtype = self.one(torch.float32, torch.float64, torch.int64, torch.bool)
            return f"c{self.count} = torch.tensor([2, 0, 3, -1, 5], dtype={dtype})"
        vector = self.chance.choice(vectors)
        index = self.chance.randint(0, 4)
        return self.one(
            f"c{self.count} = {vector}[{index}]",
            f"c{self.count} = {vector}[{index}]",
            f"c{self.count} = {vector}[{index}:].sum()",
            f"c{self.count} = torch.tensor(1.5)",
            f"{vector}[{index}] = 4",
            f"{vector}.add_(1)",
        )

    def view(self) -> str | None:
        """Look at a tensor another way."""
        name = self.pick()
        if name is None:
            return None
        x: torch.Tensor = self.names[name]
        d, e = self.dim(x), self.dim(x)
        size = x.shape[d] if x.dim() else 0
        ways = [
            f"{name}.transpose({d}, {e})", f"{name}.unsqueeze({d})", f"{name}.squeeze()", f"{name}.squeeze({d})",
            f"{name}.view(-1)", f"{name}.reshape(-1)", f"{name}.reshape(2, -1)", f"{name}.flatten()",
            f"{name}.detach()", f"{name}.data", f"{name}.expand(2, *{name}.shape)", f"{name}.movedim({d}, {e})",
            f"{name}[None, ..., None]", f"{name}[...]", f"{name}.view_as({name})", f"{name}.swapaxes({d}, {e})",
        ]  # fmt: skip
        if x.dim():
            ways += [
                f"{name}[{self.chance.randint(0, 1)}:]", f"{name}[:, {self.one('::2', '1:', ':2', '0')}]",
                f"{name}[..., {self.one('::2', '1:', ':2', '-1')}]", f"{name}.select({d}, {self.one(0, -1, 1)})",
                f"{name}.narrow({d}, {self.one(0, 1)}, {self.one(1, 2)})", f"{name}.chunk(2, {d})[{self.one(0, -1)}]",
                f"{name}.split({self.one(1, 2)}, {d})[-1]", f"{name}.unbind({d})[{self.one(0, -1)}]",
                f"{name}.permute({', '.join(map(str, self.chance.sample(range(x.dim()), x.dim())))})",
                f"{name}.diagonal({self.one(0, 1)}, {d}, {e})", f"{name}.T", f"{name}.mT",
                f"{name}.tensor_split(2, {d})[0]", f"{name}.unfold({d}, 2, 2)",
            ]  # fmt: skip
            if size and size % 2 == 0:
                ways.append(f"{name}.unflatten({d}, (2, -1))")
        if x.is_complex():
            ways += [f"torch.view_as_real({name})", f"{name}.real", f"{name}.imag"] * 2
        if not x.dtype.is_floating_point and not x.is_complex() and x.dtype.itemsize > 2:
            ways.append(f"{name}.view(torch.int16)")
        if x.numel() >= 4 and not overlaps(x):
            ways += [f"{name}.as_strided((2, 2), {s}, {self.one(0, 1)})" for s in ((1, 2), (2, 1), (0, 1))]
        return self.new(self.chance.choice(ways))

    def writable(self) -> str | None:
        """Return the name of a tensor that may be written to."""
        return self.pick(lambda x: not overlaps(x))

    def other(self, name: str) -> str:
        """Return an operand for a tensor: a number, a scalar of the CPU, or a tensor that broadcasts to it."""
        x: torch.Tensor = self.names[name]

        def fits(y: torch.Tensor) -> bool:
            shared = y.untyped_storage().data_ptr() == x.untyped_storage().data_ptr()
            same = (
                y.shape == x.shape and y.stride() == x.stride() and y.storage_offset() == x.storage_offset()
            )
            sizes = list(zip(reversed(y.shape), reversed(x.shape), strict=False))
            return (not shared or same) and y.dim() <= x.dim() and all(a in (1, b) for a, b in sizes)

        found = self.pick(fits)
        return self.number() if found is None or self.chance.random() < 0.35 else found

    def write(self) -> str | None:
        """Write to a tensor in place."""
        name = self.writable()
        if name is None:
            return None
        x: torch.Tensor = self.names[name]
        other, number, d = self.other(name), self.number(), self.dim(x)
        ways = [
            f"{name}.add_({other})", f"{name}.sub_({other})", f"{name}.mul_({other})", f"{name}.copy_({other})",
            f"{name} += {other}", f"{name} -= {other}", f"{name} *= {number}", f"{name}.fill_({number})",
            f"{name}.zero_()", f"{name}.neg_()", f"{name}.clamp_(-2, 3)", f"{name}[...] = {other}",
            f"{name}.add_({other}, alpha=2)", f"{name}.data.add_(1)", f"{name}.detach().mul_(2)",
            f"torch.add({name}, {other}, out={name})", f"torch.mul({name}, 2, out={name})",
            f"{name}.masked_fill_({name} > 0, {number})", f"{name}.abs_()", f"{name}.addcmul_({name}, {name})",
            f"{name}.copy_({name}.flip(0))" if x.dim() else f"{name}.copy_(1.5)",
            f"torch.neg({name}, out={name})", f"torch._foreach_add_([{name}], 1)", f"{name}.squeeze_()",
            f"{name}.unsqueeze_({d})", f"{name}.transpose_({d}, {self.dim(x)})",
            f"with torch.no_grad(): {name}.add_({other})", f"with torch.no_grad(): {name}.mul_(2)",
        ]  # fmt: skip
        apart = self.pick(lambda y: y.untyped_storage().data_ptr() != x.untyped_storage().data_ptr())
        if apart is not None:  # of any size: the target is resized, and shares no memory with what is read
            ways += [f"torch.mul({apart}, 2, out={name})", f"torch.sub({apart}, 1, out={name})"]
        # Not in whole functions: torch.compile raises for an argument of a device in Python whose storage is set.
        if self.by_line and x.numel() > 1 and not expanded(x):
            ways.append(f"{name}.resize_({x.numel() - 1})")  # longer, it would show memory nobody wrote to
        if x.dim():
            ways += [
                f"{name}[0] = {number}", f"{name}[-1] += {number}", f"{name}[..., 0] = {number}",
                f"{name}[{self.one('1:', '::2', ':1')}] = {number}", f"{name}.cumsum_({d})",
                f"{name}.select({d}, 0).fill_({number})", f"{name}.unbind({d})[0].mul_(2)",
            ]  # fmt: skip
        if x.dim() > 1:
            ways += [f"{name}.tril_()", f"{name}.fill_diagonal_(2)", f"{name}.T.add_({number})"]
        way = self.chance.choice(ways)
        # torch does not refuse these for tensors that are expanded, and what they then write is undefined.
        undefined = expanded(x) and ("tril_" in way or "fill_diagonal_" in way)
        return None if undefined or ("cumsum" in way and x.dtype in HALVES) else way

    def compute(self) -> str | None:
        """Compute a new tensor."""
        name = self.pick()
        if name is None:
            return None
        x: torch.Tensor = self.names[name]
        other, number, d = self.other(name), self.number(), self.dim(x)
        like = self.pick(lambda y: y.shape == x.shape) or name
        ways = [
            f"{name} {self.one('+', '-', '*')} {other}", f"{other} {self.one('+', '-', '*')} {name}",
            f"{name} {self.one('>', '<=', '==', '!=')} {other}", f"-{name}", f"{name}.abs()", f"{name}.clone()",
            f"{name}.contiguous()", f"{name}.to({self.dtype()})", f"{name}.clamp(min=-1)",
            f"torch.where({name} > 0, {name}, {other})", f"torch.where({name} > 0, {other}, {like})",
            f"torch.cat([{name}, {like}], {d})", f"torch.stack([{name}, {like}], {d})",
            f"torch.maximum({name}, {like})", f"{name}.sign()",
            f"~{name}" if x.dtype == torch.bool else f"torch.relu({name})",
            f"{name} * {name}" if x.is_complex() else f"{name} ** 2",  # rounded differently where it is complex
            f"torch.zeros_like({name})", f"torch.full_like({name}, 2)", f"{name}.new_ones(3)",
            f"torch.add({name}, {other}, alpha={self.one(2, -1)})", f"torch.add({other}, {name})",
            f"{name}.masked_fill({name} == 1, {number})", f"torch.rsub({name}, {number})",
            # What is resized gets the strides that torch's Meta kernels announce, which are the CPU's for these only.
            f"torch.add({name}, 1, out=torch.empty(0, dtype={name}.dtype, device=dev))"
            if x.is_contiguous() else f"+{name}",
            f"torch.clamp({name}, min={number})", f"{name}.logical_not()", f"{name} // 2", f"{name} % 3",
            f"torch.broadcast_to({name}, (2, *{name}.shape)).contiguous()", f"torch.addcmul({name}, {like}, {like})",
            f"torch.lerp({name}, {like}, 2.0)", f"torch.sub({number}, {name})", f"torch.mul({other}, {name})",
        ]  # fmt: skip
        if x.dim():
            ways += [
                f"{name}.flip({d})", f"{name}.roll(1, {d})", f"{name}.repeat({', '.join('2' * x.dim())})",
                f"{name}.any({d})", f"{name}.all()", f"{name}.sort({d}, stable=True)[0]",
                f"torch.hstack([{name}, {name}])", f"{name}.repeat_interleave(2, {d})", f"{name}.tile(2)",
            ]  # fmt: skip
            if x.numel() and not x.is_complex():
                ways += [f"{name}.amax({d})", f"{name}.min({d})[0]", f"{name}.max({d}).values"]
            if x.dtype not in HALVES:
                ways += [
                    f"{name}.sum({d})",
                    f"{name}.sum()",
                    f"{name}.sum({d}, keepdim=True)",
                    f"{name}.cumsum({d})",
                ]
                ways += [f"{name}.sum(dtype=torch.float64)", f"{name}.count_nonzero()"]
        if x.dim() > 1:
            ways += [f"{name}.tril()", f"{name}.triu(1)"]
            ways += [f"{name} @ {name}.mT"] if x.dtype in FLOATS else []
        return self.new(self.chance.choice(ways))

    def indices(self, size: int) -> str:
        """Return integers that may index a dim of this size, of the CPU or the device."""
        count, low = self.one(1, 2, 3), self.one(0, -size)
        chosen = [self.chance.randint(low, size - 1) for _ in range(count)]
        return f"torch.tensor({chosen}, device=dev)"

    def mask(self, name: str) -> str:
        """Return a mask for a tensor."""
        return self.one(f"{name} > 0", f"{name} != 1", f"({name} == {name})")

    def index(self) -> str | None:
        """Read elements of a tensor by indices or a mask."""
        name = self.pick(lambda x: x.dim() > 0 and x.numel() > 0)
        if name is None:
            return None
        x: torch.Tensor = self.names[name]
        d = self.dim(x)
        first, along = self.indices(x.shape[0]), self.indices(x.shape[d])
        ways = [
            f"{name}[{first}]", f"{name}[{self.mask(name)}]", f"{name}.index_select({d}, {along.replace('-', '')})"
            if "-" not in along else f"{name}[{first}]",
            f"{name}.take({self.indices(x.numel())})", f"{name}[..., {self.indices(x.shape[-1])}]",
            f"{name}.masked_select({self.mask(name)})",
            f"torch.take_along_dim({name}, {name}.argsort({d}, stable=True), {d})",
            f"({name} != 0).nonzero()", f"{name}[{first}, ..., None]",
        ]  # fmt: skip
        if x.dim() > 1:
            ways += [f"{name}[{first}, 0]", f"{name}[:, {self.indices(x.shape[1])}]", f"{name}[{first}, 1:]"]
            ways.append(f"{name}[{self.one(0, -1)}, {self.indices(x.shape[1])}]")
        return self.new(self.chance.choice(ways))

    def index_write(self) -> str | None:
        """Write elements of a tensor by indices or a mask."""
        # Of tensors that are expanded torch only warns that this is deprecated; what it then writes is undefined.
        name = self.pick(lambda x: x.dim() > 0 and x.numel() > 0 and not overlaps(x) and not expanded(x))
        if name is None:
            return None
        x: torch.Tensor = self.names[name]
        d, number = self.dim(x), self.number()
        first = self.indices(x.shape[0])
        # Of indices that repeat, the last to write wins on the CPU and any may win on a device: one value for all.
        once = f"torch.tensor([{self.chance.randint(0, x.shape[d] - 1)}], device=dev)"
        row, last = (
            f"{name}.select({d}, 0).clone().unsqueeze({d})",
            f"{name}.select({d}, -1).clone().unsqueeze({d})",
        )
        ways = [
            f"{name}[{first}] = {number}", f"{name}[{self.mask(name)}] = {number}",
            f"{name}[{once}] += 1" if x.shape[d] <= x.shape[0] else f"{name}[0] += 1",
            f"{name}.index_fill_({d}, {once}, 3)", f"{name}.index_add_({d}, {once}, {row})",
            f"{name}.index_copy_({d}, {once}, {last})", f"{name}.masked_fill_({self.mask(name)}, {number})",
            f"{name}.scatter_({d}, torch.zeros_like({name}, dtype=torch.int64), 2)",
            f"{name}.put_({once}, {name}.reshape(-1)[:1].clone())",
            f"{name}[..., {self.indices(x.shape[-1])}] = {number}",
        ]  # fmt: skip
        if x.dtype not in HALVES:
            one = f"torch.ones((), dtype={name}.dtype, device=dev)"
            ways.append(f"{name}.index_put_(({first},), {one}, accumulate=True)")
        if x.dim() > 1:
            ways += [f"{name}[:, {self.indices(x.shape[1])}] = {number}", f"{name}[{first}, 0] = {number}"]
            ways.append(f"{name}[{self.mask(f'{name}[:, 0]')}] = {number}")
        return self.chance.choice(ways)

    def differentiate(self) -> str | None:
        """Ask for gradients, compute them, or use them."""
        floats = self.pick(lambda x: x.dtype in FLOATS)
        if floats is None:
            return None
        graph = self.pick(lambda x: x.requires_grad and x.dtype in FLOATS)
        leaf = self.pick(lambda x: x.requires_grad and x.is_leaf)
        has = self.pick(lambda x: x.is_leaf and x.grad is not None)
        ways = [f"{floats}.requires_grad_()", self.new(f"{floats}.detach().clone().requires_grad_()")]
        ways.append(self.new(f"torch.nn.Parameter({floats}.detach())"))
        if graph is not None:
            ways += [
                f"({graph} * {graph}).sum().backward()",
                f"({graph} * 2).sum().backward(retain_graph=True)",
            ] * 2
            ways += [self.new(f"{graph} * {self.number()}"), self.new(f"{graph}.clone()")]
        if graph is not None and leaf is not None:
            ways.append(
                self.new(
                    f"torch.autograd.grad(({graph} * 2).sum(), {leaf}, allow_unused=True, retain_graph=True)[0]"
                )
            )
        if leaf is not None:
            ways += [
                f"with torch.no_grad(): {leaf}.sub_(1)",
                f"{leaf}.data.mul_(2)",
                f"{leaf}.data = {leaf}.data + 1",
            ]
        if has is not None:
            ways += [
                f"{has}.grad.add_(1)",
                f"{has}.grad = None",
                self.new(f"{has}.grad"),
                f"{has}.grad.zero_()",
            ]
        return self.chance.choice(ways)

    def read(self) -> str | None:
        """Read a value into Python."""
        name = self.pick(lambda x: x.numel() > 0)
        if name is None:
            return None
        self.count += 1
        return self.one(
            f"r{self.count} = {name}.reshape(-1)[0].item()",
            f"r{self.count} = {name}.tolist()",
            f"r{self.count} = bool(({name} == 1).any())",
            f"r{self.count} = ({name}.shape, {name}.is_contiguous())",
        )


def tame(x: torch.Tensor) -> bool:
    """Return whether a tensor's values, and its gradient's, are exact whatever is done with them next."""
    try:
        grad = x.grad if x.is_leaf else None
    except RuntimeError:  # a view of several whose base was written to: nothing can be asked of it
        return False
    for y in (x, grad):
        if y is not None and y.numel() and y.dtype != torch.bool:
            wide = torch.view_as_real(y.detach().resolve_conj()) if y.is_complex() else y.detach()
            if not bool(wide.double().abs().max() <= LARGEST):  # a nan is not
                return False
    return True


def make(seed: int, **options: Any) -> list[str]:
    """Return the lines of a program."""
    return Generator(seed, **options).lines
