"""Views as torch has them: taken and written on both devices, layouts, elements, base and errors agree."""

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.support import in_mode

GRID = torch.arange(24.0).reshape(4, 6)
WHOLE = torch.arange(24).reshape(4, 6)
BLOCK = torch.arange(120.0).reshape(2, 3, 4, 5)
COMPLEX = torch.complex(torch.arange(12.0), torch.arange(12.0).flip(0)).reshape(3, 4)


def empty_like(x: torch.Tensor, *size: int) -> torch.Tensor:
    return torch.empty(size, dtype=x.dtype, device=x.device)


VIEWS = {
    "detach": (GRID, lambda x: x.detach()),
    "data": (GRID, lambda x: x.data),
    "slice": (GRID, lambda x: x[1:3, ::2]),
    "last": (GRID, lambda x: x[-1]),
    "ellipsis": (BLOCK, lambda x: x[..., 1]),
    "new dim": (GRID, lambda x: x[:, None]),
    "nothing": (GRID, lambda x: x[2:2]),
    "as_strided": (GRID, lambda x: x.as_strided((3, 3), (5, 2), 1)),
    "unfold": (GRID, lambda x: x.unfold(1, 3, 3)),
    "diagonal": (GRID, lambda x: x.diagonal()),
    "diagonal above": (GRID, lambda x: x.diagonal(1)),
    "diagonal of dims": (BLOCK, lambda x: x.diagonal(0, 1, 2)),
    "real": (COMPLEX, lambda x: x.real),
    "imag": (COMPLEX, lambda x: x.imag),
    "view_as_real": (COMPLEX, torch.view_as_real),
    "view_as_complex": (GRID, lambda x: torch.view_as_complex(x.reshape(4, 3, 2))),
    "wider dtype": (GRID, lambda x: x.view(torch.int64)),
    "narrower dtype": (GRID, lambda x: x.view(torch.int16)),
    "bytes": (GRID, lambda x: x.view(torch.uint8)),
    "same width": (GRID, lambda x: x.view(torch.int32)),
    "halves of int64": (WHOLE, lambda x: x.view(torch.int32)),
    "complex as floats": (COMPLEX, lambda x: x.view(torch.float32)),
    "slice as wider dtype": (GRID, lambda x: x[:, 2:4].view(torch.int64)),
    "T": (GRID, lambda x: x.T),
    "mT": (BLOCK, lambda x: x.mT),
    "H": (COMPLEX, lambda x: x.H),
    "adjoint": (COMPLEX, lambda x: x.adjoint()),
    "conj": (COMPLEX, lambda x: x.conj()),
    "real of conj": (COMPLEX, lambda x: x.conj().real),
    "imag of conj": (COMPLEX, lambda x: x.conj().imag),
    "resolve_conj": (COMPLEX, lambda x: x.conj().resolve_conj()),
    "neg view": (GRID, lambda x: x._neg_view()),
    "chunk": (GRID, lambda x: x.chunk(2, 1)),
    "split": (GRID, lambda x: x.split([1, 3])),
    "tensor_split": (GRID, lambda x: x.tensor_split(4, 1)),
    "unbind": (GRID, lambda x: x.unbind(1)),
    "squeeze": (GRID[None], lambda x: x.squeeze(0)),
    "movedim": (BLOCK, lambda x: x.movedim(0, 2)),
    "permute": (BLOCK, lambda x: x.permute(3, 1, 0, 2)),
    "swapaxes": (BLOCK, lambda x: x.swapaxes(0, 3)),
    "narrow": (GRID, lambda x: x.narrow(1, 2, 3)),
    "select": (GRID, lambda x: x.select(1, 3)),
    "view": (GRID, lambda x: x.view(2, 2, -1)),
    "view_as": (GRID, lambda x: x.view_as(torch.empty(24))),
    "reshape": (GRID, lambda x: x.reshape(3, 8)),
    "reshape that copies": (GRID, lambda x: x.t().reshape(24)),
    "flatten": (BLOCK, lambda x: x.flatten(1, 2)),
    "unflatten": (GRID, lambda x: x.unflatten(1, (2, 3))),
    "ravel": (GRID, lambda x: x.ravel()),
    "scalar": (torch.tensor(3.0), lambda x: x.view(1, 1)),
    "channels_last": (BLOCK, lambda x: x.to(memory_format=torch.channels_last)),
    "squeeze_": (GRID[None], lambda x: x.squeeze_()),
    "unsqueeze_": (GRID, lambda x: x.unsqueeze_(0)),
    "t_": (GRID, lambda x: x.t_()),
    "transpose_": (BLOCK, lambda x: x.transpose_(0, 1)),
    "swapaxes_": (BLOCK, lambda x: x.swapaxes_(0, 2)),
    "as_strided_": (GRID, lambda x: x.as_strided_((2, 2), (1, 2))),
    "detach_": (GRID, lambda x: x.detach_()),
    "resize_ down": (GRID, lambda x: x.resize_(2, 3)),
    "resize_ as large": (GRID, lambda x: x.resize_(6, 4)),
    "resize_ to nothing": (GRID, lambda x: x.resize_(0)),
    "resize_as_": (GRID, lambda x: x.resize_as_(torch.empty(3, 2))),
    "set_ a view": (GRID, lambda x: empty_like(x, 0).set_(x[1])),
    "set_ a storage": (GRID, lambda x: empty_like(x, 0).set_(x.untyped_storage(), 2, (3,), (2,))),
    "set_ all of it": (GRID, lambda x: empty_like(x, 0).set_(x.untyped_storage())),
    "expand": (GRID, lambda x: x[:, :1].expand(4, 3)),
    "broadcast_to": (GRID, lambda x: x.broadcast_to(2, 4, 6)),
}
REFUSED = {
    "as_strided past the end": (GRID, lambda x: x.as_strided((30,), (1,))),
    "view of what is not contiguous": (GRID, lambda x: x.t().view(24)),
    "view of another size": (GRID, lambda x: x.view(5, 5)),
    "odd length as wider dtype": (torch.arange(5.0), lambda x: x.view(torch.float64)),
    "transposed as wider dtype": (GRID, lambda x: x.t().view(torch.float64)),
    "index past the end": (GRID, lambda x: x[7]),
    "narrow past the end": (GRID, lambda x: x.narrow(1, 4, 3)),
    "squeeze of no dim": (GRID, lambda x: x.squeeze(5)),
    "transpose of no dim": (GRID, lambda x: x.transpose(0, 4)),
    "expand of a dim with elements": (GRID, lambda x: x.expand(2, 6)),
    "write to an expanded tensor": (GRID, lambda x: x[:, :1].expand(4, 3).add_(1)),
    "copy to an expanded tensor": (GRID, lambda x: x[:, :1].expand(4, 3).copy_(x[:, :3])),
    "write from overlapping memory": (GRID, lambda x: x[0, 1:].add_(x[0, :-1])),
    "copy from overlapping memory": (GRID, lambda x: x[0, 1:].copy_(x[0, :-1])),
    "in place on a broadcast": (GRID[:1], lambda x: x.add_(torch.ones(4, 6, device=x.device))),
    "in place with another size": (GRID, lambda x: x.mul_(torch.ones(5, device=x.device))),
    "float into int": (WHOLE, lambda x: x.add_(1.5)),
    "quotient into int": (WHOLE, lambda x: x.div_(2)),
    "int into bool": (GRID > 3, lambda x: x.add_(2)),
    "complex into float": (GRID, lambda x: x.add_(1j)),
    "complex tensor into float": (GRID, lambda x: x.mul_(torch.ones(6, device=x.device) * 1j)),
    "out of another dtype": (GRID, lambda x: torch.add(x, 1, out=empty_like(x.long(), 4, 6))),
    "mm out of another dtype": (GRID, lambda x: torch.mm(x, x.t(), out=empty_like(x.double(), 4, 4))),
    "view_as_complex of threes": (GRID, lambda x: torch.view_as_complex(x.reshape(8, 3))),
    "imag of floats": (GRID, lambda x: x.imag),
}


def layout(tensor: torch.Tensor) -> tuple:
    size, stride = tuple(tensor.shape), tuple(tensor.stride())
    return size, stride, tensor.storage_offset(), tensor.dtype, tensor.is_conj(), tensor.is_neg()


def listed(result: object) -> list[torch.Tensor]:
    return list(result) if isinstance(result, (list, tuple)) else [result]


def outcome(function, *args: object) -> tuple[type[Exception], str] | None:
    """Return what a call raised, with the device left out of its words."""
    try:
        function(*args)
    except Exception as error:
        return type(error), str(error).split("\n")[0].replace("jax:0", "cpu")
    return None


@pytest.mark.parametrize("name", VIEWS)
def test_taken_and_written(name: str) -> None:
    source, take = VIEWS[name]
    here, there = source.clone(), source.to("jax")
    for ours, theirs in zip(listed(take(there)), listed(take(here)), strict=True):
        assert ours.device.type == "jax"
        assert layout(ours) == layout(theirs)
        assert torch.equal(ours.cpu(), theirs.resolve_conj().resolve_neg())
        assert outcome(ours.mul_, 2) == outcome(theirs.mul_, 2)
        assert outcome(ours.copy_, theirs * 3) == outcome(theirs.copy_, theirs * 3)
        assert torch.equal(ours.cpu(), theirs.resolve_conj().resolve_neg())
    assert torch.equal(there.cpu(), here)


@pytest.mark.parametrize("name", REFUSED)
def test_refused_in_torchs_words_and_unchanged(name: str) -> None:
    source, call = REFUSED[name]
    here, there = source.clone(), source.to("jax")
    expected = outcome(call, here)
    assert expected is not None
    assert outcome(call, there) == expected
    assert outcome(call, there) == expected  # the second call takes the path of known signatures
    assert torch.equal(there.cpu(), source)


def test_what_overlaps_without_being_refused() -> None:
    for device in ("cpu", "jax"):
        x = GRID.clone().to(device)
        x[0].expand(4, 6).fill_(7)
        assert x[0].tolist() == [7] * 6
        x.add_(x)
        x[0].add_(x[1])
        assert x[0, 0] == 26
        x[:, :2].add_(x[:, 2:4])
        assert x[0, 0] == 26 + 14 + 16
    windows = GRID.to("jax").as_strided((5, 3), (2, 1))
    assert torch.equal(windows.cpu(), GRID.as_strided((5, 3), (2, 1)))


def test_resize_grows_and_keeps() -> None:
    x = torch.arange(3.0).to("jax")
    view = x[1:]
    x.resize_(2, 3)
    assert x.shape == (2, 3)
    assert x[0].tolist() == [0, 1, 2]
    view.zero_()
    assert x[0].tolist() == [0, 0, 0]
    image = torch.empty(0, device="jax").resize_(2, 3, 4, 5, memory_format=torch.channels_last)
    assert image.is_contiguous(memory_format=torch.channels_last)


def test_set_data() -> None:
    weight = torch.nn.Parameter(GRID.to("jax"))
    weight.data = (GRID * 2).to("jax")
    assert torch.equal(weight.detach().cpu(), GRID * 2)
    weight.data.zero_()
    assert not weight.any()
    x = GRID.to("jax")
    x.data = torch.ones(2, device="jax")
    assert x.tolist() == [1, 1]
    empty = torch.empty(3, device="jax").set_()
    assert empty.shape == (0,)
    with pytest.raises(RuntimeError, match="devices must match"):
        torch.empty(0, device="jax").set_(torch.UntypedStorage(4))


def test_memory_formats() -> None:
    expected = BLOCK.to(memory_format=torch.channels_last).stride()
    x = BLOCK.to("jax").to(memory_format=torch.channels_last)
    assert x.stride() == expected
    assert x.is_contiguous(memory_format=torch.channels_last)
    assert not x.is_contiguous()
    for same in (x + 1, x.clone(), torch.empty_like(x), torch.zeros_like(x), x.relu(), x * x):
        assert same.stride() == expected
    assert torch.empty(2, 3, 4, 5, device="jax", memory_format=torch.channels_last).stride() == expected
    assert x.contiguous().stride() == BLOCK.stride()
    assert torch.equal(x.contiguous().cpu(), BLOCK)
    module = torch.nn.Conv2d(3, 2, 3).to("jax", memory_format=torch.channels_last)
    assert module.weight.is_contiguous(memory_format=torch.channels_last)


def test_out_is_resized_with_a_warning() -> None:
    x = torch.ones(3, 2, device="jax")
    out = torch.empty(0, device="jax")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        torch.add(x, 1, out=out)
    assert out.tolist() == [[2, 2]] * 3
    out = torch.empty(5, device="jax")
    with pytest.warns(UserWarning, match="An output with one or more elements was resized"):
        torch.add(x, 1, out=out)
    assert out.tolist() == [[2, 2]] * 3
    out = torch.zeros(4, 4, device="jax")
    assert torch.add(x, 1, out=out[:3, ::2]).data_ptr() == out.data_ptr()
    assert out.tolist() == [[2, 0, 2, 0]] * 3 + [[0, 0, 0, 0]]


def test_lazy_conjugates_reach_the_right_ops() -> None:
    here, there = COMPLEX, COMPLEX.to("jax")
    pairs = [
        (there.H @ there, here.H @ here),
        (torch.dot(there[0].conj(), there[1]), torch.dot(here[0].conj(), here[1])),
        (there.conj() + 1, here.conj() + 1),
        (there.conj().clone(), here.conj().clone()),
        (there.conj().imag.clone(), here.conj().imag.clone()),
        (torch.addmm(there, there.conj(), there.T @ there), torch.addmm(here, here.conj(), here.T @ here)),
    ]
    for ours, theirs in pairs:
        torch.testing.assert_close(ours.cpu(), theirs.resolve_conj().resolve_neg())
    here, there = here.clone(), there.clone()
    for x in (here, there):
        x.conj().copy_(COMPLEX * 2)
        x.conj().imag.add_(1)
    torch.testing.assert_close(there.cpu(), here)


@pytest.mark.parametrize("mode", ["eager", "lazy", "compiled"])
@pytest.mark.parametrize(
    "write",
    [
        lambda x, y: x.copy_((y * 1j).conj()),
        lambda x, y: x.real.copy_((y * 1j).conj().imag),
        lambda x, y: x.conj().copy_((y * 1j).conj()),
        lambda x, y: x.copy_(torch._neg_view(y * 1)),
        lambda x, y: x.real.contiguous().copy_(torch._neg_view(y.real)),
    ],
)
def test_conjugate_and_negative_views_are_copied_from(write: Callable[..., Any], mode: str) -> None:
    here, there = COMPLEX.clone(), COMPLEX.to("jax")
    want, got = write(here, here * 2), in_mode(write, mode)(there, there * 2)
    for ours, theirs in ((got, want), (there, here)):
        torch.testing.assert_close(ours.cpu(), theirs.resolve_conj().resolve_neg())


def test_views_know_their_base() -> None:
    x = GRID.to("jax")
    assert x[0]._base is x
    assert x[0]._is_view()
    assert x._version == 0
    x[0].zero_()
    assert x._version == 1
    assert x[0]._version == 1
    x.copy_(GRID)
    assert x._version == 2


def test_a_resize_to_the_same_size_keeps_the_strides() -> None:
    for device in ("cpu", "jax"):
        x = torch.arange(6).reshape(2, 3).to(device).t()
        assert x.resize_(3, 2).stride() == (1, 3)
        assert x.tolist() == [[0, 3], [1, 4], [2, 5]]
