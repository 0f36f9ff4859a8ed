"""Models and functions whose arguments come in many sizes, and how they run in each mode: nobody tuned for them.

A ``Program`` is a module, its arguments for some sizes, and the sizes. ``check`` runs it in a mode with
``isthmus.config.shapes = "auto"`` for each of them, and for two of them again: results and gradients are the CPU's.
"""

from __future__ import annotations

import contextlib
import copy
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import isthmus
from tests import models

MODES = ("lazy", "compile", "jit", "eager")
# The first size exactly, one that makes a range, one in it, one beyond it, ones below the first.
ONE = [(n,) for n in (9, 13, 14, 22, 7, 16)]
# One size changes, then the other; then both, equal by chance.
TWO = [(3, 9), (3, 13), (5, 13), (4, 11), (7, 17), (6, 6)]
EVEN = [(n,) for n in (8, 12, 16, 20, 28)]
IMAGES = [(8, 8), (12, 8), (12, 10), (16, 16), (9, 11)]
PATCHES = [(8, 8), (12, 8), (16, 12), (16, 16), (24, 8)]
Inputs = Callable[..., Sequence[Tensor]]


@dataclass(frozen=True)
class Program:
    """A module by what makes it, its arguments for a size, the sizes, and whether it is differentiated."""

    make: Callable[[], nn.Module]
    inputs: Inputs
    sizes: Sequence[tuple[int, ...]]
    training: bool = True


def floats(*size: int, seed: int = 0) -> Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(sum(size) + seed))


def integers(high: int, *size: int) -> Tensor:
    return torch.randint(high, size, generator=torch.Generator().manual_seed(sum(size)))


def check(program: Program, mode: str) -> None:
    """Compare a program in a mode with the CPU at each of its sizes."""
    torch.manual_seed(0)
    module = program.make()
    ours = copy.deepcopy(module).to("jax")
    run = runner(ours, program.training, mode)
    for size in (*program.sizes, program.sizes[1], program.sizes[3]):
        inputs = program.inputs(*size)
        expected = results(forward, module, inputs, program.training)
        found = run([x.to("jax") for x in inputs])
        for n, (ours_n, theirs) in enumerate(zip(found, expected, strict=True)):
            tolerance = 2e-2 if theirs.dtype == torch.bfloat16 else 2e-4
            torch.testing.assert_close(
                ours_n, theirs, rtol=tolerance, atol=tolerance, equal_nan=True, msg=_told(mode, size, n)
            )


def _told(mode: str, size: tuple[int, ...], n: int) -> Callable[[str], str]:
    return lambda message: f"result {n} in mode {mode} for {size}: {message}"


def runner(module: nn.Module, training: bool, mode: str) -> Callable[[Sequence[Tensor]], list[Tensor]]:
    """Return what computes results and gradients in a mode, as tensors of the CPU."""
    call: Callable[..., list[Tensor]] = forward
    if mode == "compile":
        call = torch.compile(forward, backend="isthmus", options={"shapes": "auto"})
    compute: Callable[..., list[Tensor]] = lambda *inputs: results(call, module, inputs, training)  # noqa: E731
    if mode == "jit":
        compute = isthmus.jit(compute)

    def run(inputs: Sequence[Tensor]) -> list[Tensor]:
        with isthmus.lazy() if mode == "lazy" else contextlib.nullcontext(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return [x.cpu() for x in compute(*inputs)]

    return run


def results(
    call: Callable[..., list[Tensor]], module: nn.Module, inputs: Sequence[Tensor], training: bool
) -> list[Tensor]:
    """Return the results of a module; in training with the gradients of what is floating."""
    if not training:
        with torch.no_grad():
            return call(module, *inputs)[:-1]
    leaves = [x.detach().requires_grad_(x.is_floating_point()) for x in inputs]
    *found, loss = call(module, *leaves)
    wanted = [x for x in (*leaves, *module.parameters()) if x.requires_grad]
    gradients = torch.autograd.grad(loss, wanted, allow_unused=True)
    return [x.detach() for x in (*found, *gradients) if x is not None]


def forward(module: nn.Module, *inputs: Tensor) -> list[Tensor]:
    """Return the results of a module and a loss that weighs each."""
    found = module(*inputs)
    found = list(found) if isinstance(found, tuple) else [found]
    loss = inputs[0].new_zeros((), dtype=torch.float32)
    for n, x in enumerate(found):
        if x.is_floating_point() and x.numel():
            finite = torch.nan_to_num(x.float(), posinf=0.0, neginf=0.0)
            loss = loss + (1 + 0.1 * n) * finite.square().mean()
    return [*found, loss]


# ---- Models


class Convolutions(nn.Module):
    """Windows that stride, dilate and go back, with statistics of batches and of groups."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.batch = nn.Conv1d(4, 8, 3, padding=1), nn.BatchNorm1d(8)
        self.second, self.group = nn.Conv1d(8, 8, 5, padding=4, dilation=2), nn.GroupNorm(2, 8)
        self.down, self.up = nn.Conv1d(8, 6, 3, stride=2), nn.ConvTranspose1d(6, 4, 4, stride=2, padding=1)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        x = F.relu(self.batch(self.first(x)))
        y = self.down(F.gelu(self.group(self.second(x))))
        return self.up(y).mean(2), F.max_pool1d(y, 3, 2).amax(2)


class RelativeAttention(nn.Module):
    """Attention with a bias for the distance of two places."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.bias = nn.Linear(8, 24), nn.Embedding(33, 2)

    def forward(self, x: Tensor) -> Tensor:
        rows, n, _ = x.shape
        q, k, v = self.qkv(x).view(rows, n, 3, 2, 4).permute(2, 0, 3, 1, 4)
        places = torch.arange(n, device=x.device)
        distance = (places[None] - places[:, None]).clamp(-16, 16) + 16
        weights = q @ k.transpose(-1, -2) / 2 + self.bias(distance).permute(2, 0, 1)
        return (weights.softmax(-1) @ v).transpose(1, 2).reshape(rows, n, 8)


class MaskedPooling(nn.Module):
    """Means, maxima and sums over the places that a mask leaves."""

    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Linear(8, 8)

    def forward(self, x: Tensor, mask: Tensor) -> tuple[Tensor, ...]:
        y, kept = self.mix(x), mask.unsqueeze(-1)
        hidden = y.masked_fill(~kept.bool(), float("-inf"))
        mean = (y * kept).sum(1) / kept.sum(1).clamp(min=1)
        return mean, y.masked_fill(~kept.bool(), -1e9).amax(1), hidden.logsumexp(1)


class Encoder(nn.Module):
    """A layer that leaves out padding tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.layer = (
            nn.Embedding(20, 8),
            nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True),
        )

    def forward(self, tokens: Tensor) -> Tensor:
        return self.layer(self.embed(tokens), src_key_padding_mask=tokens.eq(0))[:, 0]


class Decoder(nn.Module):
    """A causal layer that looks at another sequence."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.TransformerDecoderLayer(8, 2, 16, 0.0, batch_first=True)

    def forward(self, x: Tensor, memory: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1], device=x.device)
        return self.layer(x, memory, tgt_mask=mask, tgt_is_causal=True)


class Recurrent(nn.Module):
    """Two layers in both directions."""

    def __init__(self, kind: type[nn.LSTM] | type[nn.GRU]) -> None:
        super().__init__()
        self.layers = kind(4, 5, batch_first=True, bidirectional=True, num_layers=2)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        out, state = self.layers(x)
        return out.mean(1), state[0] if isinstance(state, tuple) else state


class Detector(nn.Module):
    """A backbone, a head per anchor, and boxes around the anchors' places in the image."""

    def __init__(self) -> None:
        super().__init__()
        self.backbone = nn.Sequential(
            nn.Conv2d(3, 8, 3, 2, 1), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3, 2, 1), nn.ReLU()
        )
        self.scores, self.boxes = nn.Conv2d(8, 2, 1), nn.Conv2d(8, 8, 1)

    def every_box(self, images: Tensor) -> tuple[Tensor, Tensor]:
        """Return the corners of a box for each anchor, and the scores."""
        features = self.backbone(images)
        _, _, height, width = features.shape
        y, x = torch.meshgrid(
            torch.arange(height, device=images.device) * 4.0,
            torch.arange(width, device=images.device) * 4.0,
            indexing="ij",
        )
        sides = torch.tensor([4.0, 8.0], device=images.device)
        centres = torch.stack([x, y], -1)[:, :, None].expand(-1, -1, 2, -1)
        anchors = torch.cat([centres, sides[:, None].expand(height, width, 2, 2)], -1).reshape(-1, 4)
        moves = self.boxes(features).permute(0, 2, 3, 1).reshape(images.shape[0], -1, 4)
        middle = anchors[:, :2] + moves[..., :2] * anchors[:, 2:]
        side = anchors[:, 2:] * moves[..., 2:].exp()
        scores = self.scores(features).permute(0, 2, 3, 1).reshape(images.shape[0], -1).sigmoid()
        return torch.cat([middle - side / 2, middle + side / 2], -1), scores

    def forward(self, images: Tensor) -> tuple[Tensor, Tensor]:
        boxes, scores = self.every_box(images)
        best = scores.topk(5, 1).indices
        return boxes.gather(1, best[..., None].expand(-1, -1, 4)), scores.gather(1, best)


def _images(h: int, w: int) -> list[Tensor]:
    return [floats(2, 3, 2 * h, 2 * w)]


MODELS: dict[str, Program] = {
    "convolutions": Program(Convolutions, lambda n: [floats(2, 4, n)], ONE),
    "relative attention": Program(RelativeAttention, lambda b, n: [floats(b, n, 8)], TWO),
    "masked pooling": Program(
        MaskedPooling, lambda b, n: [floats(b, n, 8), (integers(3, b, n) > 0).float()], TWO
    ),
    "encoder": Program(
        Encoder, lambda b, n: [torch.cat([integers(19, b, 1) + 1, integers(20, b, n - 1)], 1)], TWO
    ),
    "decoder": Program(
        Decoder,
        lambda n, m: [floats(2, n, 8), floats(2, m, 8)],
        [(9, 5), (13, 7), (14, 5), (9, 12), (16, 16)],
    ),
    "lstm": Program(lambda: Recurrent(nn.LSTM), lambda n: [floats(2, n, 4)], ONE),
    "gru": Program(lambda: Recurrent(nn.GRU), lambda b, n: [floats(b, n, 4)], TWO),
    "resnet": Program(models.ResNet, lambda h, w: [floats(2, 3, 2 * h, 2 * w), torch.tensor([0, 2])], IMAGES),
    "detector": Program(Detector, _images, IMAGES),
}


# ---- Functions of a matrix of weights and of the arguments


class Function(nn.Module):
    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function, self.weight = function, nn.Parameter(floats(8, 8, seed=5) * 0.3)

    def forward(self, *inputs: Tensor) -> Any:
        return self.function(self.weight, *inputs)


FUNCTIONS: dict[str, Program] = {}


def _function(
    sizes: Sequence[tuple[int, ...]], inputs: Inputs, training: bool = True
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    def add(function: Callable[..., Any]) -> Callable[..., Any]:
        FUNCTIONS[function.__name__.strip("_")] = Program(lambda: Function(function), inputs, sizes, training)
        return function

    return add


def _row(n: int) -> list[Tensor]:
    return [floats(3, n)]


def _rows(b: int, n: int) -> list[Tensor]:
    return [floats(b, n, 8)]


def _square(n: int) -> list[Tensor]:
    return [floats(2, n, n)]


def _image(h: int, w: int) -> list[Tensor]:
    return [floats(1, 2, h, w)]


@_function(ONE, lambda n: [integers(8, n), torch.tensor([0, n // 2])])
def bags(w: Tensor, tokens: Tensor, offsets: Tensor) -> Any:
    return F.embedding_bag(tokens, w, offsets, mode="mean")


@_function(ONE, _row)
def cumsum_sort_gather(w: Tensor, x: Tensor) -> Any:
    y = x.cumsum(1)
    values, order = y.sort(1, descending=True)
    return values.gather(1, order.flip(1)), y.topk(5, 1).values, y.median(1).values, y.kthvalue(3, 1).values


@_function(TWO, _rows)
def topk_gather(w: Tensor, x: Tensor) -> Any:
    scores = (x @ w).norm(dim=2)
    best = scores.topk(3, 1).indices
    return x.gather(1, best.unsqueeze(-1).expand(-1, -1, 8)), scores.argsort(1)


@_function(TWO, lambda b, n: [floats(b, n, 8), torch.where(integers(4, b, n) == 0, -100, integers(8, b, n))])
def cross_entropy_that_ignores(w: Tensor, x: Tensor, classes: Tensor) -> Any:
    logits = x @ w
    each = F.cross_entropy(logits.transpose(1, 2), classes, reduction="none").sum(1)
    mean = F.cross_entropy(logits.flatten(0, 1), classes.flatten(), ignore_index=-100)
    return mean, each, F.cross_entropy(logits.flatten(0, 1), classes.flatten(), label_smoothing=0.1)


@_function(TWO, lambda b, n: [floats(b, n, 8), integers(8, b, n)])
def shifted_cross_entropy(w: Tensor, x: Tensor, tokens: Tensor) -> Any:
    logits = (x @ w)[..., :-1, :].contiguous()
    return F.cross_entropy(logits.view(-1, 8), tokens[..., 1:].contiguous().view(-1))


@_function(ONE, _row)
def norms_over_the_changing_axis(w: Tensor, x: Tensor) -> Any:
    layer, unit = F.layer_norm(x, (x.shape[1],)), F.normalize(x, dim=1)
    return layer, unit, x.std(1), x.var(0), F.instance_norm(x[None]), x / x.norm()


@_function(TWO, lambda b, n: [floats(b, n, 8), floats(n, b, 8)])
def einsum_of_two_changing_sizes(w: Tensor, x: Tensor, y: Tensor) -> Any:
    pairs = torch.einsum("bnd,nbd->bn", x, y)
    return pairs, torch.einsum("bnd,mbd->nm", x, y), torch.einsum("bnd,nce->bcd", x, y)


@_function(ONE, _row)
def flip_and_roll(w: Tensor, x: Tensor) -> Any:
    return x.flip(1) * x, x.roll(2, 1) + x, x.roll(-3, 1), x.flip(0, 1).cumsum(1)


@_function(ONE, _row)
def unfold(w: Tensor, x: Tensor) -> Any:
    return x.unfold(1, 4, 1).sum(2), x.unfold(1, 3, 2).mean(1), F.unfold(x[None, None], (3, 3)).sum(2)


@_function(ONE, lambda n: [floats(2, 3, n)])
def interpolation(w: Tensor, x: Tensor) -> Any:
    fixed = F.interpolate(x, size=10, mode="linear", align_corners=True)
    return F.interpolate(x, scale_factor=2), F.interpolate(x, scale_factor=2, mode="linear"), fixed


@_function(IMAGES, _image)
def interpolation_of_images(w: Tensor, x: Tensor) -> Any:
    twice = F.interpolate(x, scale_factor=2, mode="bilinear")
    return twice, F.interpolate(x, size=(7, 5), mode="bilinear"), F.adaptive_avg_pool2d(x, (2, 2))


@_function(IMAGES, _image)
def pools(w: Tensor, x: Tensor) -> Any:
    averages = F.avg_pool2d(x, 3, 2, 1), F.avg_pool2d(x, 2, ceil_mode=True)
    return (
        *averages,
        F.max_pool2d(x, 2).sum((2, 3)),
        F.max_pool2d(x, 3, 2, 1),
        F.adaptive_max_pool2d(x, (2, 3)),
    )


@_function(ONE, _row)
def paddings(w: Tensor, x: Tensor) -> Any:
    modes = [F.pad(x[None], (2, 3), mode=mode) for mode in ("reflect", "replicate", "circular")]
    return F.pad(x, (2, 3)), *modes


@_function(ONE, _row)
def padded_to_a_multiple(w: Tensor, x: Tensor) -> Any:
    return F.pad(x, (0, -x.shape[1] % 8)).view(3, -1, 8).sum(2)


@_function(EVEN, _row)
def halves(w: Tensor, x: Tensor) -> Any:
    a, b = x.chunk(2, 1)
    return a * b, a - b.flip(1), F.glu(x, 1)


@_function(ONE, _row)
def halves_of_odd_sizes(w: Tensor, x: Tensor) -> Any:
    a, b = x.chunk(2, 1)
    return a.sum(1) - b.sum(1), b * 2, x[:, : x.shape[1] // 2], x[:, 1::2], x[:, -3:], x[:, 2:-2]


@_function(ONE, _square)
def triangles(w: Tensor, x: Tensor) -> Any:
    return x.tril(), x.triu(1), x.diagonal(dim1=1, dim2=2), torch.diag_embed(x[:, 0]), x.tril(-1).sum(1)


@_function(TWO, lambda a, b: [floats(a), floats(b)])
def pairs(w: Tensor, x: Tensor, y: Tensor) -> Any:
    distances = torch.cdist(x[:, None], y[:, None])
    return torch.outer(x, y), torch.cartesian_prod(x, y), distances, torch.meshgrid(x, y, indexing="ij")[1]


@_function(ONE, lambda n: [floats(3, n), integers(7, n)])
def indices(w: Tensor, x: Tensor, at: Tensor) -> Any:
    sums = torch.zeros(3, 7, device=x.device).scatter_add(1, at.expand(3, -1), x)
    return x[:, at], x.index_select(1, at), torch.zeros_like(x).index_add(1, at, x), sums


@_function(ONE, lambda n: [floats(n, 4), integers(5, n)])
def sums_by_class(w: Tensor, x: Tensor, at: Tensor) -> Any:
    zeros = torch.zeros(5, 4, device=x.device)
    largest = zeros.scatter_reduce(0, at[:, None].expand(-1, 4), x, "amax", include_self=False)
    return zeros.index_add(0, at, x), F.one_hot(at, 5).float().sum(0), largest


@_function(ONE, lambda n: [floats(n, 4), floats(n, 4, seed=3)])
def losses(w: Tensor, x: Tensor, y: Tensor) -> Any:
    divergence = F.kl_div(x.log_softmax(0), y.softmax(0), reduction="batchmean")
    return (
        F.mse_loss(x, y), F.smooth_l1_loss(x, y), divergence, F.triplet_margin_loss(x, y, x.flip(0)),
        F.binary_cross_entropy_with_logits(x, y.sigmoid()), F.cosine_similarity(x, y, 0), F.huber_loss(x, y),
    )  # fmt: skip


@_function(ONE, _row)
def statistics(w: Tensor, x: Tensor) -> Any:
    scans = x.cummax(1).values, x.cumprod(1), x.prod(1)
    return *scans, x.quantile(0.3, 1), x.cov(), x.aminmax(dim=1).max, torch.diff(x, n=2, dim=1)


@_function(ONE, _row, False)
def positions_of_extremes(w: Tensor, x: Tensor) -> Any:
    counts = (x > 0).sum(1), x.count_nonzero(1), torch.searchsorted(x.sort(1).values, x)
    return *counts, x.argmax(1), x.argmin(), x.min(1).indices, x.isfinite().all()


@_function(ONE, lambda n: [floats(2, n, 8)])
def rotary_positions(w: Tensor, x: Tensor) -> Any:
    steps = torch.arange(x.shape[1], device=x.device).float()
    angles = torch.outer(steps, 100 ** (-torch.arange(0, 8, 2, device=x.device).float() / 8)).repeat(1, 2)
    turned = x * angles.cos() + torch.cat([-x[..., 4:], x[..., :4]], -1) * angles.sin()
    return (turned @ turned.transpose(1, 2)).softmax(-1) @ x


@_function(ONE, lambda n: [floats(2, n, 8)])
def interleaved_positions(w: Tensor, x: Tensor) -> Any:
    table = torch.zeros(x.shape[1], 8, device=x.device)
    angles = torch.arange(x.shape[1], device=x.device)[:, None] * torch.logspace(0, -3, 4, device=x.device)
    table[:, 0::2], table[:, 1::2] = angles.sin(), angles.cos()
    return (x + table) @ w


@_function(ONE, _row, False)
def writes(w: Tensor, x: Tensor) -> Any:
    y = x.clone()
    y[:, 0], y[y > 1] = 1, 0
    y[:, -1] *= 2
    y[:, 1:-1].add_(y[:, 2:].clone())
    z = torch.zeros_like(y)
    z[:, : x.shape[1] // 2] = y[:, : x.shape[1] // 2]
    return y, z.copy_(z.flip(1))


@_function(ONE, lambda n: [floats(32, 8), torch.ones(1, 32, 32).tril(), floats(2, n, 8)])
def slices_of_fixed_tables(w: Tensor, places: Tensor, causal: Tensor, x: Tensor) -> Any:
    n = x.shape[1]
    y = x + places[:n] + 2 * places[1 : n + 1]
    return (y @ y.transpose(1, 2)).masked_fill(causal[:, :n, :n] == 0, float("-inf")).softmax(-1) @ y @ w


@_function(ONE, lambda n: [floats(32, 8), floats(2, n, 8)])
def slices_of_many_kinds(w: Tensor, table: Tensor, x: Tensor) -> Any:
    n = x.shape[1]
    of_table = table[:n] + table[-n:] * table[3 : n + 3], table[n:].sum(0), table[n - 2 :: 2].sum(0)
    inside = x[:, 1:], x[:, :-2], x[:, -3:], x[:, 1:-1], x[:, 2:5], x[:, :100] @ w
    return *of_table, *inside, x[:, : n // 2].sum(1), x[:, 1::2].sum(1)


@_function(EVEN, lambda n: [floats(2, n, 8)])
def windows_of_four(w: Tensor, x: Tensor) -> Any:
    y = x.view(2, -1, 4, 8)
    return ((y @ y.transpose(-1, -2)).softmax(-1) @ y).reshape(x.shape) @ w


@_function(PATCHES, lambda h, w: [floats(1, 3, h, w)])
def patches(w: Tensor, x: Tensor) -> Any:
    b, c, height, width = x.shape
    cut = x.view(b, c, height // 4, 4, width // 4, 4).permute(0, 2, 4, 1, 3, 5).reshape(b, -1, 48)
    return cut.mean(1), F.pixel_unshuffle(x, 4).sum(1), F.pixel_shuffle(x[:, :1].expand(-1, 4, -1, -1), 2)


@_function(ONE, lambda n: [floats(2, n, 8), (integers(5, 2, n) == 0).long()])
def documents_in_one_row(w: Tensor, x: Tensor, starts: Tensor) -> Any:
    document = starts.cumsum(1)
    other = document[:, None] != document[:, :, None]
    mixed = (x @ x.transpose(1, 2)).masked_fill(other, float("-inf")).softmax(-1) @ x
    last = starts.shape[1] - 1 - starts.flip(1).argmax(1)
    return mixed, x[torch.arange(2, device=x.device), last]


@_function(TWO, lambda b, n: [floats(b, n, 8), integers(2, b, n)])
def last_tokens(w: Tensor, x: Tensor, mask: Tensor) -> Any:
    last = mask.sum(1).clamp(min=1) - 1
    return x[torch.arange(x.shape[0], device=x.device), last] @ w, x.gather(
        1, last[:, None, None].expand(-1, 1, 8)
    )


@_function(TWO, _rows)
def linear_algebra_of_a_batch(w: Tensor, x: Tensor) -> Any:
    square = x.transpose(1, 2) @ x + torch.eye(8, device=x.device)
    return torch.linalg.cholesky(square), torch.linalg.solve(square, x.sum(1)), square.logdet()


@_function(ONE, _row, False)
def nucleus(w: Tensor, x: Tensor) -> Any:
    values, order = x.sort(1, descending=True)
    gone = values.softmax(1).cumsum(1) > 0.8
    gone[:, 1:] = gone[:, :-1].clone()
    gone[:, 0] = False
    return x.masked_fill(torch.zeros_like(gone).scatter(1, order, gone), -1e9)


@_function(ONE, lambda n: [integers(9, 3, n)], False)
def integer_arithmetic(w: Tensor, x: Tensor) -> Any:
    scans = x.cumsum(1), x.prod(1), torch.diff(x, dim=1)
    return *scans, x % 3, x.sort(1, stable=True)[0], x.max(1)[0], (x << 2) & 5, x.bool().all(1)


@_function(TWO, _rows)
def sizes_as_values(w: Tensor, x: Tensor) -> Any:
    b, n, d = x.shape
    mixed = x.permute(1, 0, 2).reshape(n, b * d) @ torch.ones(b * d, 1, device=x.device)
    return x.reshape(b * n, d) / (b * n), x.reshape(b, n * d).sum(1) / n, mixed, x.sum() / x.numel()


@_function(ONE, lambda n: [floats(2, 8, n)])
def convolutions_by_channel(w: Tensor, x: Tensor) -> Any:
    causal = F.conv1d(F.pad(x, (2, 0)), w[:, None, :3], groups=8)
    same = F.conv1d(x, w[:, None, :4], padding="same", groups=8)
    return causal, same, F.conv1d(x, w[:, :, None]), F.lp_pool1d(x, 2, 3), F.avg_pool1d(x, 4, 1, 2)


@_function(ONE, _row, False)
def sizes_of_results_that_values_decide(w: Tensor, x: Tensor) -> Any:
    return x[x > 0], x.nonzero(), x.masked_select(x < 0).sum()


@_function(TWO, lambda a, b: [floats(a, b)])
def matrices_turned(w: Tensor, x: Tensor) -> Any:
    flat = x.T.contiguous().view(-1).cumsum(0)
    return torch.rot90(x), flat, torch.kron(x[:2], w[:2, :2]), x.movedim(0, 1) @ x, torch.block_diag(x, x)
