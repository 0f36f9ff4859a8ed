"""Buffers whose array is larger than their storage: every way to read or write one sees the exact contents."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import pytest
import torch
from torch import nn

import isthmus
from isthmus._device.core.buffer import buffer_of
from isthmus._device.core.slack import Slack
from isthmus._runtime import compiler

VALUES = torch.arange(12.0).reshape(3, 4)


def with_slack(values: torch.Tensor = VALUES) -> torch.Tensor:
    """Return a tensor on the device whose buffer has an array with NaN past the end of every axis."""
    tensor = values.to("jax")
    padded = np.full([n + 3 for n in values.shape], np.nan, np.float32)
    padded[tuple(slice(0, n) for n in values.shape)] = values.numpy()
    buffer_of(tensor).held = Slack(jax.device_put(padded, compiler.default_device()), values.shape)
    return tensor


def saved(x: torch.Tensor) -> torch.Tensor:
    file = io.BytesIO()
    torch.save(x, file)
    file.seek(0)
    return torch.load(file)


def in_jit(x: torch.Tensor) -> torch.Tensor:
    step = isthmus.jit(lambda: x.mul_(2))
    step()
    step()
    return x


def in_lazy(x: torch.Tensor) -> torch.Tensor:
    with isthmus.lazy():
        return (x * 2 + x.t().sum()).cpu()


def assign(x: torch.Tensor) -> torch.Tensor:
    x[1, 2:] = 5.0
    return x


def data_of(x: torch.Tensor) -> torch.Tensor:
    new = torch.zeros(1, device=x.device)
    new.data = x
    return new


def swapped(x: torch.Tensor) -> torch.Tensor:
    other = torch.zeros(1, device=x.device)
    torch.utils.swap_tensors(x, other)
    return other


def loaded(x: torch.Tensor) -> torch.Tensor:
    layer = nn.Linear(4, 3, bias=False).to("jax")
    layer.load_state_dict({"weight": x})
    return layer.weight.detach()


def enlarged(x: torch.Tensor) -> torch.Tensor:
    x.untyped_storage().resize_(4 * 20)
    return x


def resize(x: torch.Tensor) -> torch.Tensor:
    x.resize_(2, 4)
    return x


READS: dict[str, Callable[[torch.Tensor], Any]] = {
    "cpu": lambda x: x.cpu(),
    "item": lambda x: x[2, 3].item(),
    "tolist": lambda x: x.tolist(),
    "sum": lambda x: x.sum().item(),
    "view": lambda x: x.view(4, 3)[1:].cpu(),
    "transpose": lambda x: x.t().contiguous().cpu(),
    "as_strided": lambda x: torch.as_strided(x, (2, 2), (4, 1), 1).cpu(),
    "in place": lambda x: x.add_(1).cpu(),
    "in place through a view": lambda x: (x[1:].mul_(3), x)[1].cpu(),
    "assign": lambda x: assign(x).cpu(),
    "copy_": lambda x: x.copy_(torch.ones(3, 4)).cpu(),
    "resize_": lambda x: resize(x).cpu(),
    "set storage": lambda x: torch.empty(0, device=x.device).set_(x.untyped_storage(), 0, (12,)).cpu(),
    "deepcopy": lambda x: copy.deepcopy(x).cpu(),
    "pickle": lambda x: saved(x).cpu(),
    "clone": lambda x: x.clone().cpu(),
    "out": lambda x: torch.add(x, 1, out=x).cpu(),
    "backward": lambda x: torch.autograd.grad((x.requires_grad_() ** 2).sum(), x)[0].cpu(),
    "lazy": in_lazy,
    "jit state": lambda x: in_jit(x).cpu(),
    "print": repr,
    "numpy": lambda x: x.cpu().numpy().tolist(),
    "array": lambda x: np.asarray(x.cpu()).tolist(),
    "iteration": lambda x: [row.tolist() for row in x],
    "bool of": lambda x: bool(x[0, 1]),
    "bytes": lambda x: x.untyped_storage().nbytes(),
    "bytes of the storage": lambda x: bytes(x.untyped_storage().cpu()),
    "view of a dtype": lambda x: x.view(torch.int32).cpu(),
    "data": lambda x: data_of(x).cpu(),
    "swap": lambda x: swapped(x).cpu(),
    "state_dict": lambda x: nn.ParameterList([x]).state_dict()["0"].cpu(),
    "load_state_dict": lambda x: loaded(x).cpu(),
    "copy to": lambda x: torch.empty(3, 4, device=x.device).copy_(x).cpu(),
    "copy into the CPU": lambda x: torch.empty(3, 4).copy_(x),
    "to a dtype": lambda x: x.to(torch.float64).cpu(),
    "storage of a larger size": lambda x: enlarged(x).cpu(),
    "fill of a storage": lambda x: (x.untyped_storage().fill_(0), x)[1].cpu(),
    "clone of a storage": lambda x: (
        torch.empty(0, device=x.device).set_(x.untyped_storage().clone(), 0, (3, 4)).cpu()
    ),
    "shallow copy": lambda x: copy.copy(x).cpu(),
    "jit argument": lambda x: isthmus.jit(lambda y: y * 2 + y.sum())(x).cpu(),
    "index": lambda x: x[torch.tensor([2, 0], device=x.device)].cpu(),
    "masked write": lambda x: x.masked_fill_(x > 5, 0.0).cpu(),
    "equal": lambda x: torch.equal(x, VALUES.to("jax")),
    "nonzero": lambda x: x.nonzero().cpu(),
    "functional": lambda x: torch.func.vmap(lambda row: row * row.sum())(x).cpu(),
    "jax function": lambda x: isthmus.jax_function(lambda a: a.sum(0))(x).cpu(),
}


@pytest.mark.parametrize("name", READS)
def test_reads_and_writes_see_the_exact_contents(name: str) -> None:
    found, expected = READS[name](with_slack()), READS[name](VALUES.clone().to("jax"))
    if isinstance(expected, torch.Tensor):
        assert found.shape == expected.shape
        torch.testing.assert_close(found, expected, rtol=0, atol=0)
    else:
        assert found == expected


def test_compiled_functions_see_the_exact_contents() -> None:
    compiled = torch.compile(lambda x: x * 2 + x.sum(), backend="isthmus")
    torch.testing.assert_close(compiled(with_slack()).cpu(), VALUES * 2 + VALUES.sum())


def test_arrays_and_dlpack_have_the_exact_shape() -> None:
    assert np.asarray(isthmus.to_jax(with_slack())).tolist() == VALUES.tolist()
    x = with_slack()
    exported = torch.from_dlpack(x)
    assert exported.tolist() == VALUES.tolist()


def test_where_the_data_is() -> None:
    """``data_ptr`` names the storage, whether or not its array is padded."""
    x = with_slack()
    before = x.data_ptr()
    assert before == x.untyped_storage().data_ptr()
    x.sum().item()  # takes the padding away
    assert x.data_ptr() == before
    assert x[1:].data_ptr() == before + 4 * 4


def test_a_copy_does_not_share_what_is_written() -> None:
    x = with_slack()
    copies = [copy.deepcopy(x), x.clone(), x.detach().clone()]
    x.zero_()
    assert all(each.tolist() == VALUES.tolist() for each in copies)
    y = with_slack()
    kept = y.detach()  # shares the storage
    y.add_(1)
    assert kept.tolist() == (VALUES + 1).tolist()


def test_a_read_leaves_an_exact_array_in_the_buffer() -> None:
    x = with_slack()
    x.sum().item()
    held = buffer_of(x).held
    assert type(held) is not Slack
    assert held.shape == (3, 4)


def test_no_program_takes_slack_for_an_array() -> None:
    with pytest.raises(TypeError):
        jax.jit(lambda x: x)(Slack(jax.numpy.ones(3), (2,)))


def test_views_made_before_see_a_write() -> None:
    x = with_slack()
    view = x[1]
    x.add_(1)
    assert view.tolist() == (VALUES[1] + 1).tolist()


def test_what_a_failed_program_has_taken_is_cut_again() -> None:
    x = with_slack()
    slack = buffer_of(x).held
    slack.exact().delete()  # donated by a program that then found no memory
    assert not slack.is_deleted()
    assert x.tolist() == VALUES.tolist()
