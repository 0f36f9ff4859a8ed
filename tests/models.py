"""Small models, plain PyTorch, with the data and the loss each is trained on; tests/families/ has published ones."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class MLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.LayerNorm(16), nn.Linear(16, 4))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(self.net(x), y)

    @staticmethod
    def batch(g: torch.Generator) -> tuple[Tensor, ...]:
        return torch.randn(6, 8, generator=g), torch.randint(0, 4, (6,), generator=g)


class Block(nn.Module):
    def __init__(self, inside: int, outside: int, stride: int) -> None:
        super().__init__()
        self.a = nn.Conv2d(inside, outside, 3, stride, 1, bias=False)
        self.na = nn.BatchNorm2d(outside)
        self.b = nn.Conv2d(outside, outside, 3, 1, 1, bias=False)
        self.nb = nn.BatchNorm2d(outside)
        self.short = nn.Sequential(nn.Conv2d(inside, outside, 1, stride, bias=False), nn.BatchNorm2d(outside))

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.na(self.a(x)), inplace=True)
        return F.relu(self.nb(self.b(y)) + self.short(x))


class ResNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(), nn.MaxPool2d(3, 2, 1)
        )
        self.blocks = nn.Sequential(Block(4, 8, 2), Block(8, 8, 1))
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        x = F.adaptive_avg_pool2d(self.blocks(self.stem(x)), 1).flatten(1)
        return F.cross_entropy(self.head(x), y, label_smoothing=0.1)

    @staticmethod
    def batch(g: torch.Generator) -> tuple[Tensor, ...]:
        return torch.randn(4, 3, 16, 16, generator=g), torch.randint(0, 3, (4,), generator=g)


class LSTM(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 6)
        self.rnn = nn.LSTM(6, 8, num_layers=2, batch_first=True, bidirectional=True)
        self.head = nn.Linear(16, 11)

    def forward(self, tokens: Tensor) -> Tensor:
        hidden, _ = self.rnn(self.embed(tokens[:, :-1]))
        return F.cross_entropy(self.head(hidden).flatten(0, 1), tokens[:, 1:].flatten())

    @staticmethod
    def batch(g: torch.Generator) -> tuple[Tensor, ...]:
        return (torch.randint(0, 11, (3, 7), generator=g),)


class SmallLSTM(LSTM):
    """One layer on short sequences, for tests that are not slow: each step of each layer is compiled anew."""

    def __init__(self) -> None:
        super().__init__()
        self.rnn = nn.LSTM(6, 8, batch_first=True, bidirectional=True)

    @staticmethod
    def batch(g: torch.Generator) -> tuple[Tensor, ...]:
        return (torch.randint(0, 11, (3, 4), generator=g),)


class Transformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 16)
        self.body = nn.Transformer(16, 2, 1, 1, 32, dropout=0.0, batch_first=True)
        self.head = nn.Linear(16, 11)

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(target.shape[1] - 1, device=target.device)
        hidden = self.body(self.embed(source), self.embed(target[:, :-1]), tgt_mask=mask, tgt_is_causal=True)
        return F.cross_entropy(self.head(hidden).flatten(0, 1), target[:, 1:].flatten())

    @staticmethod
    def batch(g: torch.Generator) -> tuple[Tensor, ...]:
        return torch.randint(0, 11, (3, 5), generator=g), torch.randint(0, 11, (3, 6), generator=g)


class UNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.down = nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), nn.GroupNorm(2, 4), nn.SiLU())
        self.middle = nn.Sequential(nn.Conv2d(4, 8, 3, padding=1), nn.GroupNorm(2, 8), nn.SiLU())
        self.up = nn.ConvTranspose2d(8, 4, 2, 2)
        self.out = nn.Conv2d(12, 1, 3, padding=1)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        skip = self.down(x)
        middle = self.middle(F.avg_pool2d(skip, 2))
        enlarged = F.interpolate(middle, scale_factor=2, mode="bilinear", align_corners=False)[:, :4]
        return F.mse_loss(self.out(torch.cat([skip, self.up(middle), enlarged], 1)), y)

    @staticmethod
    def batch(g: torch.Generator) -> tuple[Tensor, ...]:
        return torch.randn(2, 1, 8, 8, generator=g), torch.randn(2, 1, 8, 8, generator=g)


class VAE(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encode = nn.Sequential(nn.Linear(12, 10), nn.Tanh(), nn.Linear(10, 6))
        self.decode = nn.Sequential(nn.Linear(3, 10), nn.Softplus(), nn.Linear(10, 12))

    def forward(self, x: Tensor, noise: Tensor) -> Tensor:
        mean, log_variance = self.encode(x).chunk(2, -1)
        z = mean + noise * torch.exp(0.5 * log_variance)
        kl = -0.5 * (1 + log_variance - mean.pow(2) - log_variance.exp()).sum(-1).mean()
        return F.binary_cross_entropy_with_logits(self.decode(z), x.sigmoid()) + 0.01 * kl

    @staticmethod
    def batch(g: torch.Generator) -> tuple[Tensor, ...]:
        return torch.randn(5, 12, generator=g), torch.randn(5, 3, generator=g)


class DropoutMLP(nn.Module):
    """Random numbers and running statistics: two kinds of state beside the weights."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(
            nn.Linear(8, 16, bias=False), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.2), nn.Linear(16, 4)
        )

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(self.net(x), y)

    @staticmethod
    def batch(g: torch.Generator) -> tuple[Tensor, ...]:
        return torch.randn(6, 8, generator=g), torch.randint(0, 4, (6,), generator=g)


class SmallResNet(ResNet):
    """Two blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.stem[0] = nn.Conv2d(3, 4, 3, padding=1, bias=False)


class ResNet18(SmallResNet):
    """Four stages of two blocks, narrow, in float64: so many norms over few samples magnify a float32's rounding."""

    def __init__(self) -> None:
        super().__init__()
        stages = [(4, 4, 1), (4, 8, 2), (8, 8, 2), (8, 8, 2)]
        self.blocks = nn.Sequential(*[nn.Sequential(Block(i, o, s), Block(o, o, 1)) for i, o, s in stages])
        self.double()

    @staticmethod
    def batch(g: torch.Generator) -> tuple[Tensor, ...]:
        x, y = ResNet.batch(g)
        return x.double(), y


class Layer(nn.Module):
    """One layer of the GPT below."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.before, self.after = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width), nn.Dropout(0.1)
        )

    def forward(self, x: Tensor) -> Tensor:
        split = [
            t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in self.qkv(self.before(x)).chunk(3, -1)
        ]
        mixed = F.scaled_dot_product_attention(*split, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        return x + self.mlp(self.after(x))


class GPT(nn.Module):
    """A causal language model whose head is its embedding."""

    def __init__(self, layers: int = 2) -> None:
        super().__init__()
        self.embed, self.places = nn.Embedding(13, 16), nn.Embedding(8, 16)
        self.layers = nn.Sequential(*[Layer(16, 2) for _ in range(layers)])
        self.norm = nn.LayerNorm(16)

    def forward(self, tokens: Tensor) -> Tensor:
        given = tokens[:, :-1]
        x = self.embed(given) + self.places(torch.arange(given.shape[1], device=given.device))
        logits = self.norm(self.layers(x)) @ self.embed.weight.T
        return F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())

    @staticmethod
    def batch(g: torch.Generator) -> tuple[Tensor, ...]:
        return (torch.randint(0, 13, (3, 9), generator=g),)


class SmallGPT(GPT):
    """One layer, for tests that are not slow: a second is compiled again and computes nothing new."""

    def __init__(self) -> None:
        super().__init__(layers=1)


MODELS: list[Any] = [MLP, ResNet, LSTM, Transformer, UNet, VAE]


def train(
    make: Any, device: str, steps: int, optimizer: Callable[[Any], torch.optim.Optimizer]
) -> list[float]:
    """Train a model from a fixed start on fixed data and return its losses."""
    torch.manual_seed(0)
    model = make().to(device)
    step = optimizer(model.parameters())
    g = torch.Generator().manual_seed(1)
    batches = [tuple(t.to(device) for t in make.batch(g)) for _ in range(2)]
    losses = []
    for n in range(steps):
        loss = model(*batches[n % 2])
        step.zero_grad()
        loss.backward()
        step.step()
        losses.append(loss.item())
    return losses
