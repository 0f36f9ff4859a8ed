"""The bytes of a storage seen as several dtypes: what is written as one is read as another, as on the CPU."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.fx import GraphModule

import isthmus
from isthmus._dynamo.backend import isthmus as compile_graph
from isthmus._dynamo.refusals import writes_bytes_as_booleans
from tests.support import in_mode

DTYPES = [
    torch.bool, torch.uint8, torch.int8, torch.int16, torch.uint16, torch.float16, torch.bfloat16, torch.int32,
    torch.uint32, torch.float32, torch.int64, torch.float64, torch.complex64, torch.complex128,
    torch.float8_e4m3fn, torch.float8_e5m2,
]  # fmt: skip
MODES = ["eager", "lazy", "jit"]


def bytes_of(x: Tensor) -> list[int]:
    return x.cpu().contiguous().view(torch.uint8).reshape(-1).tolist()


def run(program: Callable[..., Any], mode: str, *args: Tensor) -> Any:
    """Return what a program returns for tensors of the device."""
    function = isthmus.jit(program) if mode == "jit" else in_mode(program, mode)
    for _ in range(2 if mode == "jit" else 1):
        found = function(*[x.to("jax") for x in args])
    return found


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    "part", [slice(None), slice(1, 3), slice(0, None, 2)], ids=["all", "some", "every other"]
)
def test_a_byte_of_a_boolean_is_kept(part: slice, mode: str) -> None:
    def program(given: Tensor) -> tuple[Tensor, ...]:
        flags = given.clone()
        view = flags.view(torch.uint8)
        view[part] = 5
        return view, flags, flags.logical_not(), flags.sum(), flags.view(torch.int32), view + 1

    given = torch.tensor([True, False, True, False])
    want, got = program(given), run(program, mode, given)
    assert [x.tolist() for x in got] == [x.tolist() for x in want]
    assert got[0].tolist()[part][0] == 5


@pytest.mark.parametrize("mode", ["eager", "lazy"])
def test_writes_to_both_dtypes_of_a_storage(mode: str) -> None:
    def program(flags: Tensor) -> tuple[Tensor, ...]:
        view = flags.view(torch.uint8)
        view.add_(7)
        first = view.clone()
        flags[1] = False
        second = view.clone()
        flags.logical_not_()
        torch.mul(view, 3, out=view)
        return first, second, view, flags

    given = torch.tensor([True, False, True, False])
    want, got = program(given.clone()), run(program, mode, given)
    assert [x.tolist() for x in got] == [x.tolist() for x in want]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("dtype", DTYPES[1:], ids=str)
def test_booleans_written_to_other_bytes_leave_the_rest(dtype: torch.dtype, mode: str) -> None:
    def program(base: Tensor) -> Tensor:
        view = base.view(torch.uint8).view(torch.bool)
        view[1:3] = True
        view[4] = False
        return base

    base = (torch.arange(32) + 65).to(torch.uint8).view(dtype)
    want, got = program(base.clone()), run(lambda x: program(x.clone()), mode, base)
    assert bytes_of(got) == bytes_of(want)


@pytest.mark.usefixtures("fresh_dynamo")
def test_a_compiled_function_writes_bytes_to_booleans() -> None:
    flags = torch.tensor([True, False, True, False], device="jax")
    compiled = torch.compile(lambda view: view.add_(4), backend="isthmus")
    compiled(flags.view(torch.uint8))
    assert flags.view(torch.uint8).tolist() == [5, 4, 5, 4]
    compiled(flags.view(torch.uint8)[1:3])
    assert flags.view(torch.uint8).tolist() == [5, 8, 9, 4]
    assert flags.tolist() == [True] * 4


QUICK = (torch.bool, torch.bfloat16, torch.int32, torch.complex64)


@pytest.mark.parametrize(
    ("mode", "some"),
    [
        ("eager", QUICK),
        ("lazy", QUICK),
        *(pytest.param(m, DTYPES, marks=pytest.mark.slow) for m in ("eager", "lazy")),
    ],
)
def test_every_pair_of_dtypes(mode: str, some: Any) -> None:
    """Bytes that are no nan and no denormal number in any dtype, written through each and read through each."""
    wrong = []
    for one, other in itertools.permutations(some, 2):
        bits = (torch.arange(32) % 7 + 66).to(torch.uint8)
        more = (torch.arange(16) % 5 + 68).to(torch.uint8)
        if torch.bool in (one, other):
            bits, more = bits % 2, more % 2

        def program(base: Tensor, new: Tensor, other: torch.dtype = other) -> tuple[Tensor, Tensor]:
            base = base.clone()
            view = base.view(other)
            view[: view.numel() // 2].copy_(new.view(other))
            return base, view

        given = (bits.view(one), more.view(one))
        want, got = program(*given), run(program, mode, *given)
        if [bytes_of(x) for x in got] != [bytes_of(x) for x in want]:
            wrong.append((one, other))
    assert not wrong


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    ("floats", "integers", "nans"),
    [
        (torch.float32, torch.int32, [0x7FA00001, 0x7F800001, -0x005FFFFF, 0x7FC01234]),
        (torch.float64, torch.int64, [0x7FF4000000000001, 0x7FF0000000000001, 0x7FF8000000001234, 1]),
        (torch.float16, torch.int16, [0x7D01, 0x7C01, 0x7E12, 0x3C00]),
    ],
    ids=str,
)
def test_signalling_nans_are_kept(
    floats: torch.dtype, integers: torch.dtype, nans: list[int], mode: str
) -> None:
    def program(given: Tensor) -> tuple[Tensor, ...]:
        x = given.view(floats).clone()
        y = x.clone()
        y.view(integers)[1:].add_(0)
        y[:1] = x[:1]
        return x.view(integers), y.view(integers), x[1:].view(integers), x.flip(0).view(integers)

    given = torch.tensor(nans, dtype=integers)
    want, got = program(given), run(program, mode, given)
    assert [x.tolist() for x in got] == [x.tolist() for x in want]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("integers", [torch.int16, torch.int32])
@pytest.mark.parametrize("floats", [torch.bfloat16, torch.float16, torch.float8_e5m2])
def test_integers_that_are_nans_as_narrow_floats_are_kept(
    floats: torch.dtype, integers: torch.dtype, mode: str
) -> None:
    """XLA moves such floats as wider ones on the CPU, which changes nans: those beside what is written must not be."""

    def program(given: Tensor) -> Tensor:
        x = given.clone()
        x.view(floats)[2:4] = 1
        x.view(floats)[1] = 2
        return x

    nans = [0x7D017D01, 0x7F817FA1, 0x7F817D7D, 0x7D7E7FC1]
    given = torch.tensor(nans, dtype=torch.int32).view(integers)
    assert run(program, mode, given).tolist() == program(given).tolist()


@pytest.mark.parametrize("mode", MODES)
def test_complex_numbers_and_their_parts(mode: str) -> None:
    def program(given: Tensor) -> tuple[Tensor, ...]:
        z = given.clone()
        parts = torch.view_as_real(z)
        parts[1:, 0] = 7
        z.imag[0] = -3
        z.real.view(torch.int32)[2] = 0x7FA00001
        parts.view(torch.int32)[3, 1] = 0x7FC01234
        torch.view_as_complex(parts)[3:].real.neg_()
        return parts.view(torch.int32), z.real.view(torch.int32), z.imag.view(torch.int32)

    given = torch.arange(4) + 1j * torch.arange(4)
    want, got = program(given), run(program, mode, given)
    assert [x.tolist() for x in got] == [x.tolist() for x in want]


@pytest.mark.usefixtures("fresh_dynamo")
@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8])
def test_a_compiled_write_through_booleans_leaves_the_bytes_beside_it(dtype: torch.dtype) -> None:
    def write(data: torch.Tensor) -> torch.Tensor:
        data.view(torch.bool)[0] = True
        return data + 0

    data = torch.tensor([7, 5, 3], dtype=dtype)
    on_device = data.to("jax")
    compiled = torch.compile(write, backend="isthmus")
    assert compiled(on_device).tolist() == write(data).tolist() == [1, 5, 3]
    assert on_device.tolist() == [1, 5, 3]


@pytest.mark.usefixtures("fresh_dynamo")
def test_a_compiled_write_of_bytes_to_booleans_made_inside_keeps_them() -> None:
    def write(data: torch.Tensor) -> tuple[Tensor, Tensor]:
        flags = data > 3
        flags.view(torch.uint8)[1:].fill_(5)
        return flags.view(torch.uint8) + 0, flags & True

    data = torch.tensor([7, 5, 3])
    got, want = torch.compile(write, backend="isthmus")(data.to("jax")), write(data)
    assert [x.tolist() for x in got] == [x.tolist() for x in want] == [[1, 5, 5], [True] * 3]


READS: dict[str, Callable[[Tensor], Any]] = {
    "where": lambda data: torch.where(data.view(torch.bool), data, data + 1),
    "operators": lambda data: ~data.view(torch.bool) & (data > 3),
    "any": lambda data: data.view(torch.bool).any(dim=0, keepdim=True),
    "index": lambda data: data.view(torch.bool)[1:].float().relu_().sum(),
    "a write elsewhere": lambda data: data.view(torch.bool).to(torch.int32).add_(3),
    "the view itself": lambda data: data.view(torch.bool),
}
WRITES: dict[str, Callable[[Tensor], Any]] = {
    "operator": lambda data: operator.iand(data.view(torch.bool)[:1], torch.ones_like(data[:1]).bool()),
    "method": lambda data: data.view(torch.bool)[1:].logical_not_(),
    "item": lambda data: data.view(torch.bool).__setitem__(0, True),
    "out": lambda data: torch.logical_not(data[:1] > 0, out=data.view(torch.bool)[:1]),
    "read back": lambda data: data.view(torch.bool)[1:].view(torch.uint8) + 0,
    "a view of a result": lambda data: (data + 0).view(torch.bool)[1:],
}


@pytest.mark.usefixtures("fresh_dynamo")
@pytest.mark.parametrize("name", [*READS, *WRITES])
def test_a_compiled_function_of_bytes_viewed_as_booleans(name: str) -> None:
    """Only one that writes through the view, or whose bytes may be read back, runs op by op."""
    function = (READS | WRITES)[name]
    data = torch.tensor([7, 5, 0, 3], dtype=torch.uint8)
    on_device = data.to("jax")
    refused: list[bool] = []

    def backend(module: GraphModule, inputs: list[Tensor]) -> Callable[..., Any]:
        refused.append(writes_bytes_as_booleans(module.graph))
        return compile_graph(module, inputs)

    got, want = torch.compile(function, backend=backend)(on_device), function(data)
    assert refused == [name in WRITES]
    assert on_device.tolist() == data.tolist()
    if want is None:
        return
    assert got.dtype == want.dtype
    assert got.tolist() == want.tolist()
    if "view" in name:
        assert got.view(torch.uint8).tolist() == want.view(torch.uint8).tolist()
    if name == "the view itself":
        got[1:2].logical_not_()  # the bytes beside it stay
        assert on_device.tolist() == [7, 0, 0, 3]
