"""Families written here in plain PyTorch."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.families.family import Batch, Family, adamw, classes, tokens

Result = tuple[Tensor, Tensor]


class Residual(nn.Module):
    """Two convolutions beside a shortcut."""

    def __init__(self, inside: int, outside: int, stride: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(inside, outside, 3, stride, 1, bias=False)
        self.first_norm = nn.BatchNorm2d(outside)
        self.second = nn.Conv2d(outside, outside, 3, 1, 1, bias=False)
        self.second_norm = nn.BatchNorm2d(outside)
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or inside != outside:
            self.shortcut = nn.Sequential(
                nn.Conv2d(inside, outside, 1, stride, bias=False), nn.BatchNorm2d(outside)
            )

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.first_norm(self.first(x)), inplace=True)
        return F.relu(self.second_norm(self.second(y)) + self.shortcut(x), inplace=True)


class ResNet(nn.Module):
    """Residual blocks on images."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(3, 8, 7, 2, 3, bias=False), nn.BatchNorm2d(8), nn.ReLU(True), nn.MaxPool2d(3, 2, 1)
        )
        self.body = nn.Sequential(Residual(8, 8, 1), Residual(8, 16, 2))
        self.head = nn.Linear(16, 10)

    def forward(self, images: Tensor, labels: Tensor) -> Result:
        pooled = F.adaptive_avg_pool2d(self.body(self.stem(images)), 1).flatten(1)
        logits = self.head(pooled)
        return F.cross_entropy(logits, labels, label_smoothing=0.1), logits


def _images(g: torch.Generator) -> Batch:
    return {"images": torch.randn(4, 3, 32, 32, generator=g), "labels": classes(10, 4, g)}


class Stage(nn.Module):
    """Two normalized convolutions of a U-Net."""

    def __init__(self, inside: int, outside: int) -> None:
        super().__init__()
        self.net = nn.Sequential(
            nn.Conv2d(inside, outside, 3, padding=1),
            nn.GroupNorm(4, outside),
            nn.SiLU(),
            nn.Conv2d(outside, outside, 3, padding=1),
            nn.GroupNorm(4, outside),
            nn.SiLU(),
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)


class UNet(nn.Module):
    """Down twice and up twice, once by interpolation and once by a transposed convolution, with skips between."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.ModuleList([Stage(1, 8), Stage(8, 16)])
        self.middle = Stage(16, 16)
        self.enlarge = nn.ConvTranspose2d(16, 8, 2, 2)
        self.up = nn.ModuleList([Stage(32, 16), Stage(16, 8)])
        self.out = nn.Conv2d(8, 1, 1)

    def forward(self, noisy: Tensor, clean: Tensor) -> Result:
        first = self.down[0](noisy)
        second = self.down[1](F.max_pool2d(first, 2))
        x = self.middle(F.avg_pool2d(second, 2))
        x = F.interpolate(x, scale_factor=2, mode="bilinear", align_corners=False)
        x = self.up[0](torch.cat([second, x], 1))
        x = self.up[1](torch.cat([first, self.enlarge(x)], 1))
        found = self.out(x)
        return F.mse_loss(found, clean), found


def _pair(g: torch.Generator) -> Batch:
    clean = torch.randn(2, 1, 16, 16, generator=g)
    return {"noisy": clean + 0.1 * torch.randn(2, 1, 16, 16, generator=g), "clean": clean}


class LSTM(nn.Module):
    """A recurrent language model."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(100, 32)
        self.rnn = nn.LSTM(32, 32, num_layers=2, batch_first=True)
        self.head = nn.Linear(32, 100)

    def forward(self, text: Tensor) -> Result:
        hidden, _ = self.rnn(self.embed(text[:, :-1]))
        logits = self.head(hidden)
        return F.cross_entropy(logits.flatten(0, 1), text[:, 1:].flatten()), logits


class GRU(nn.Module):
    """A bidirectional recurrent classifier of sequences."""

    def __init__(self) -> None:
        super().__init__()
        self.rnn = nn.GRU(8, 16, bidirectional=True)
        self.head = nn.Linear(32, 5)

    def forward(self, series: Tensor, labels: Tensor) -> Result:
        _, last = self.rnn(series)
        logits = self.head(last.transpose(0, 1).flatten(1))
        return F.cross_entropy(logits, labels), logits


def _series(g: torch.Generator) -> Batch:
    return {"series": torch.randn(9, 4, 8, generator=g), "labels": classes(5, 4, g)}


class ConvNet(nn.Module):
    """Plain, grouped and dilated convolutions between normalizations of several kinds."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(
            nn.Conv2d(3, 16, 3, padding=1),
            nn.BatchNorm2d(16),
            nn.LeakyReLU(0.1),
            nn.MaxPool2d(2),
            nn.Conv2d(16, 16, 3, padding=1, groups=4),
            nn.GroupNorm(4, 16),
            nn.GELU(),
            nn.Conv2d(16, 32, 3, padding=2, dilation=2),
            nn.InstanceNorm2d(32, affine=True),
            nn.Hardswish(),
            nn.AvgPool2d(2),
            nn.Flatten(),
            nn.Linear(32 * 16, 10),
        )

    def forward(self, images: Tensor, labels: Tensor) -> Result:
        logits = self.net(images)
        return F.cross_entropy(logits, labels), logits


def _small_images(g: torch.Generator) -> Batch:
    return {"images": torch.randn(4, 3, 16, 16, generator=g), "labels": classes(10, 4, g)}


class Mixing(nn.Module):
    """Mixes along tokens, then along channels."""

    def __init__(self, count: int, width: int) -> None:
        super().__init__()
        self.norms = nn.ModuleList([nn.LayerNorm(width), nn.LayerNorm(width)])
        self.across = nn.Sequential(nn.Linear(count, 32), nn.GELU(), nn.Linear(32, count))
        self.within = nn.Sequential(nn.Linear(width, 64), nn.GELU(), nn.Linear(64, width))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.across(self.norms[0](x).transpose(1, 2)).transpose(1, 2)
        return x + self.within(self.norms[1](x))


class Mixer(nn.Module):
    """An MLP-Mixer: patches, two kinds of perceptron, the mean of the tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, 32, 4, 4)
        self.blocks = nn.Sequential(Mixing(16, 32), Mixing(16, 32))
        self.norm = nn.LayerNorm(32)
        self.head = nn.Linear(32, 10)

    def forward(self, images: Tensor, labels: Tensor) -> Result:
        x = self.patches(images).flatten(2).transpose(1, 2)
        logits = self.head(self.norm(self.blocks(x)).mean(1))
        return F.cross_entropy(logits, labels), logits


class GAN(nn.Module):
    """A convolutional generator against a discriminator whose verdict it is trained on."""

    def __init__(self) -> None:
        super().__init__()
        self.generator = nn.Sequential(
            nn.ConvTranspose2d(16, 16, 4, 1, 0, bias=False),
            nn.BatchNorm2d(16),
            nn.ReLU(True),
            nn.ConvTranspose2d(16, 8, 4, 2, 1, bias=False),
            nn.BatchNorm2d(8),
            nn.ReLU(True),
            nn.ConvTranspose2d(8, 3, 3, 2, 1, output_padding=1),
            nn.Tanh(),
        )
        self.discriminator = nn.Sequential(
            nn.Conv2d(3, 8, 4, 2, 1), nn.LeakyReLU(0.2, True), nn.Conv2d(8, 1, 8)
        )

    def forward(self, noise: Tensor, real: Tensor) -> Result:
        images = self.generator(noise)
        false, true = self.discriminator(images).flatten(), self.discriminator(real).flatten()
        loss = F.binary_cross_entropy_with_logits(false, torch.ones_like(false))
        return loss + F.binary_cross_entropy_with_logits(true, torch.full_like(true, 0.9)), images


def _noise(g: torch.Generator) -> Batch:
    return {"noise": torch.randn(4, 16, 1, 1, generator=g), "real": torch.randn(4, 3, 16, 16, generator=g)}


WRITTEN = [
    Family("ResNet", ResNet, _images, quick=True),
    Family("U-Net", UNet, _pair),
    Family("LSTM", LSTM, lambda g: {"text": tokens((3, 9), g)}, adamw),
    Family("GRU", GRU, _series, adamw),
    Family("ConvNet", ConvNet, _small_images),
    Family("MLP-Mixer", Mixer, _small_images, quick=True),
    Family("DCGAN", GAN, _noise, quick=True),
]
