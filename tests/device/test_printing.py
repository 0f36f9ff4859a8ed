"""A tensor prints as it does on the CPU, plus its device, in one transfer and without an op on the device."""

import pytest
import torch

from isthmus import metrics

TENSORS = [
    torch.arange(6.0).reshape(2, 3),
    torch.tensor([1e-8, 1.0, 1e8]),
    torch.tensor([float("nan"), float("inf"), -0.0]),
    torch.tensor(3),
    torch.tensor(1.5, dtype=torch.float64),
    torch.tensor([True, False]),
    torch.tensor([1 + 2j, -1j]),
    torch.ones(3, dtype=torch.bfloat16),
    torch.ones(3, dtype=torch.uint8),
    torch.empty(0),
    torch.empty(0, 3, dtype=torch.int64),
    torch.arange(4000.0).reshape(40, 100),
    torch.arange(2000),
    torch.arange(12.0).reshape(3, 4).t(),
]


def as_cpu(text: str) -> str:
    return "".join(text.replace("device='jax:0'", "").replace(", ,", ",").replace(", )", ")").split())


@pytest.mark.parametrize("tensor", TENSORS, ids=str)
def test_prints_as_on_the_cpu(tensor: torch.Tensor) -> None:
    assert "device='jax:0'" in repr(tensor.to("jax"))
    assert as_cpu(repr(tensor.to("jax"))) == as_cpu(repr(tensor))


def test_prints_exactly() -> None:
    assert repr(torch.arange(3.0).to("jax")) == "tensor([0., 1., 2.], device='jax:0')"
    half = torch.ones(2, dtype=torch.float16).to("jax")
    assert repr(half) == "tensor([1., 1.], device='jax:0', dtype=torch.float16)"
    grown = torch.ones(2).to("jax").requires_grad_()
    assert repr(grown) == "tensor([1., 1.], device='jax:0', requires_grad=True)"
    assert repr(grown * 2) == "tensor([2., 2.], device='jax:0', grad_fn=<MulBackward0>)"
    assert repr(torch.nn.Parameter(torch.ones(1).to("jax"))) == (
        "Parameter containing:\ntensor([1.], device='jax:0', requires_grad=True)"
    )
    assert repr(torch.empty(0, 2).to("jax")) == "tensor([], device='jax:0', size=(0, 2))"
    assert f"{torch.tensor(1.25).to('jax'):.1f}" == "1.2"
    assert repr(torch.tensor([1 + 2j]).to("jax").conj()) == "tensor([1.-2.j], device='jax:0')"


def test_prints_in_one_transfer_and_no_program() -> None:
    tensor = torch.randn(50, 60).to("jax")
    before = dict(metrics.counts())
    repr(tensor)
    after = metrics.counts()
    assert after["transfers to host"] == before.get("transfers to host", 0) + 1
    assert after["compilations"] == before.get("compilations", 0)


def test_options_are_obeyed() -> None:
    torch.set_printoptions(precision=2, threshold=5)
    try:
        tensor = torch.rand(20)
        assert as_cpu(repr(tensor.to("jax"))) == as_cpu(repr(tensor))
    finally:
        torch.set_printoptions(profile="default")
