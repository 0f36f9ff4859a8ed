"""Modules of torch.nn on the device against the CPU: results, gradients of inputs and parameters, buffers."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True)
class Row:
    """A module, the shapes of its inputs, and whether it trains."""

    make: Callable[[], nn.Module]
    shapes: tuple[tuple[int, ...], ...]
    train: bool = True
    id: str = field(default="")

    def __str__(self) -> str:
        return self.id


def row(id: str, make: Callable[[], nn.Module], *shapes: tuple[int, ...], train: bool = True) -> Row:
    """A row of the table below."""
    return Row(make, shapes, train, id)


class Classify(nn.Module):
    """Cross entropy with everything on."""

    def forward(self, x: Tensor) -> Tensor:
        """Return the loss of ``x`` against fixed targets."""
        target = torch.arange(x.size(0), device=x.device) % x.size(1)
        weight = torch.linspace(0.5, 2, x.size(1)).to(x.device)
        return F.cross_entropy(x, target, weight=weight, ignore_index=1, label_smoothing=0.1)


class Packed(nn.Module):
    """A recurrent module over sequences of different lengths."""

    def __init__(self, rnn: nn.Module) -> None:
        super().__init__()
        self.rnn = rnn

    def forward(self, x: Tensor) -> Any:
        """Return the padded results."""
        lengths = torch.tensor([3, 5])
        packed = nn.utils.rnn.pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
        return nn.utils.rnn.pad_packed_sequence(self.rnn(packed)[0], batch_first=True)[0]


class Unpooled(nn.Module):
    """A maximum put back where it was."""

    def forward(self, x: Tensor) -> Tensor:
        """Return ``x`` pooled and unpooled."""
        return F.max_unpool2d(*F.max_pool2d(x, 2, return_indices=True), 2)


class Frozen(nn.Module):
    """A module run without gradients: the fast paths of transformers are taken only then."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, *inputs: Tensor) -> Any:
        """Return what the module returns."""
        with torch.no_grad():
            return self.inner(*inputs)


class Itself(nn.Module):
    """Attention of a sequence to itself."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.options = options

    def forward(self, x: Tensor) -> Any:
        """Return attention and its probabilities."""
        return self.attention(x, x, x, **self.options)


def encoder() -> nn.Module:
    """An encoder layer without dropout."""
    return nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)


IMAGE, LINE = (2, 6, 9, 8), (2, 6, 9)
ROWS = [
    *[
        row(n, getattr(nn, n), (4, 6))
        for n in ("ReLU", "GELU", "SiLU", "SELU", "CELU", "Hardswish", "Mish", "GLU")
    ],
    *[row(n, getattr(nn, n), (4, 6)) for n in ("PReLU", "LogSigmoid", "Softplus", "Tanhshrink", "Softsign")],
    row("softmax", lambda: nn.Softmax(-1), (4, 6)),
    row("layer norm", lambda: nn.LayerNorm(6), (4, 6)),
    row("rms norm", lambda: nn.RMSNorm(6), (4, 6)),
    row("group norm", lambda: nn.GroupNorm(2, 6), IMAGE),
    row("batch norm", lambda: nn.BatchNorm1d(6), (4, 6)),
    row("batch norm, cumulative", lambda: nn.BatchNorm2d(6, momentum=None), IMAGE),
    row("batch norm, eval", lambda: nn.BatchNorm2d(6), IMAGE, train=False),
    row("batch norm, no stats", lambda: nn.BatchNorm1d(6, affine=False, track_running_stats=False), LINE),
    row("instance norm", lambda: nn.InstanceNorm2d(6, affine=True, track_running_stats=True), IMAGE),
    row("local response norm", lambda: nn.LocalResponseNorm(2), IMAGE),
    row("conv1d", lambda: nn.Conv1d(6, 4, 3, stride=2, padding=1), LINE),
    row("conv2d", lambda: nn.Conv2d(6, 4, 3, dilation=2, groups=2), IMAGE),
    row("conv2d depthwise", lambda: nn.Conv2d(6, 12, 3, padding="same", groups=6), IMAGE),
    row("conv3d", lambda: nn.Conv3d(2, 3, 2), (1, 2, 4, 3, 5)),
    row("conv transpose", lambda: nn.ConvTranspose2d(6, 4, 3, stride=2, output_padding=1, groups=2), IMAGE),
    row("max pool", lambda: nn.MaxPool2d(3, 2, 1, ceil_mode=True), IMAGE),
    row("max pool 1d", lambda: nn.MaxPool1d(3), LINE),
    row("unpool", Unpooled, IMAGE),
    row("avg pool", lambda: nn.AvgPool2d(3, 2, 1, ceil_mode=True, count_include_pad=False), IMAGE),
    row("adaptive avg pool", lambda: nn.AdaptiveAvgPool2d((4, 3)), IMAGE),
    row("adaptive max pool", lambda: nn.AdaptiveMaxPool2d((4, 3)), IMAGE),
    row("upsample", lambda: nn.Upsample(scale_factor=2, mode="bilinear"), IMAGE),
    row("upsample, cubic", lambda: nn.Upsample(size=(5, 13), mode="bicubic", align_corners=True), IMAGE),
    row("cross entropy", Classify, (5, 7)),
    row("bilinear", lambda: nn.Bilinear(3, 4, 5), (2, 3), (2, 4)),
    row("lstm", lambda: nn.LSTM(6, 4, 2, bidirectional=True), (5, 2, 6)),
    row("lstm, no bias", lambda: nn.LSTM(6, 4, bias=False, proj_size=3), (5, 2, 6)),
    row("lstm, batch first", lambda: nn.LSTM(6, 4, 2, bias=False, batch_first=True), (2, 5, 6)),
    row("lstm, packed", lambda: Packed(nn.LSTM(6, 4, batch_first=True, bidirectional=True)), (2, 5, 6)),
    row("gru", lambda: nn.GRU(6, 4, 2), (5, 2, 6)),
    row("gru, no bias", lambda: nn.GRU(6, 4, bias=False), (5, 2, 6)),
    row("gru, packed", lambda: Packed(nn.GRU(6, 4, batch_first=True)), (2, 5, 6)),
    row("rnn", lambda: nn.RNN(6, 4, nonlinearity="relu"), (5, 2, 6)),
    row("attention", Itself, (2, 5, 8)),
    row("attention, fast", lambda: Frozen(Itself()), (2, 5, 8), train=False),
    row("attention, fast, no weights", lambda: Frozen(Itself(need_weights=False)), (2, 5, 8), train=False),
    row("encoder layer", encoder, (2, 5, 8)),
    row("encoder layer, fast", lambda: Frozen(encoder()), (2, 5, 8), train=False),
    row(
        "transformer",
        lambda: nn.Transformer(8, 2, 1, 1, 16, dropout=0.0, batch_first=True),
        (2, 5, 8),
        (2, 4, 8),
    ),
]


def tensors(value: Any) -> list[Tensor]:
    """Return the floating tensors of a result, flat."""
    if isinstance(value, Tensor):
        return [value] if value.is_floating_point() else []
    return [t for item in value or () for t in tensors(item)]


def observe(module: nn.Module, inputs: list[Tensor]) -> dict[str, Tensor | None]:
    """Run a module forward and backward; return everything there is to see."""
    results = tensors(module(*inputs))
    if results[0].requires_grad:
        torch.stack([r.square().mean() for r in results]).sum().backward()
    seen: dict[str, Tensor | None] = {f"result {i}": r.detach() for i, r in enumerate(results)}
    seen |= {f"gradient of input {i}": x.grad for i, x in enumerate(inputs)}
    seen |= {f"gradient of {name}": p.grad for name, p in module.named_parameters()}
    return seen | dict(module.named_buffers())


@pytest.mark.parametrize("row", ROWS, ids=str)
def test_module_agrees_with_the_cpu(row: Row) -> None:
    inputs = [torch.randn(shape) for shape in row.shapes]
    there, here = row.make().train(row.train), row.make().train(row.train)
    here.load_state_dict(there.state_dict())
    here = here.to("jax")
    want = observe(there, [x.clone().requires_grad_() for x in inputs])
    got = observe(here, [x.to("jax").requires_grad_() for x in inputs])
    assert got.keys() == want.keys()
    for name, expected in want.items():
        found = got[name]
        if expected is None:
            assert found is None, name
            continue
        assert found is not None, name
        assert found.device.type == "jax", name
        torch.testing.assert_close(found.cpu(), expected, msg=lambda text, name=name: f"{name}: {text}")


@pytest.mark.parametrize("bias", [False, True])
def test_a_complex_linear_has_the_conjugate_gradient(bias: bool) -> None:
    def gradients(device: str) -> list[Tensor]:
        torch.manual_seed(1)
        layer = nn.Linear(3, 4, bias=bias, dtype=torch.complex64)
        x = torch.randn(2, 5, 3, dtype=torch.complex64).to(device).requires_grad_()
        layer = layer.to(device)
        (layer(x).abs() ** 2).sum().backward()
        return [t.grad.cpu() for t in (x, *layer.parameters())]

    torch.testing.assert_close(gradients("jax"), gradients("cpu"))


@pytest.mark.parametrize(
    "make",
    [lambda: nn.LazyLinear(4), lambda: nn.LazyConv1d(4, 2), lambda: nn.LazyBatchNorm1d()],
    ids=["linear", "conv", "norm"],
)
def test_a_lazy_module_moves_before_it_knows_its_shapes(make: Callable[[], nn.Module]) -> None:
    x = torch.randn(3, 5, 2)
    layer = make().to("jax").double()
    assert isinstance(layer.weight, nn.UninitializedParameter)
    assert layer.weight.device.type == "jax"
    x = x if isinstance(layer, nn.LazyConv1d | nn.LazyBatchNorm1d) else x.mT
    there = make().double()
    there(x.double())
    layer(x.double().to("jax"))
    layer.load_state_dict(there.state_dict())
    torch.testing.assert_close(layer.eval()(x.double().to("jax")).cpu(), there.eval()(x.double()))
    assert make().to("jax").to("cpu").weight.device.type == "cpu"
