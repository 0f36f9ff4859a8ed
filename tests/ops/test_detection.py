"""torchvision's ops for detection: defined here by their published schemas, since torchvision is not installed."""

from __future__ import annotations

import contextlib
import copy
import importlib.util
import math
from typing import Any

import pytest
import torch

import isthmus
from isthmus._runtime import counters
from tests.changing_sizes import Detector, floats
from tests.interpreters import forked_early
from tests.lazy.helpers import setting

SCHEMAS = [
    "nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "roi_align(Tensor input, Tensor rois, float spatial_scale, SymInt pooled_height, SymInt pooled_width,"
    " int sampling_ratio, bool aligned) -> Tensor",
    "_roi_align_backward(Tensor grad, Tensor rois, float spatial_scale, SymInt pooled_height,"
    " SymInt pooled_width, SymInt batch_size, SymInt channels, SymInt height, SymInt width,"
    " int sampling_ratio, bool aligned) -> Tensor",
    "roi_pool(Tensor input, Tensor rois, float spatial_scale, SymInt pooled_height, SymInt pooled_width)"
    " -> (Tensor, Tensor)",
    "_roi_pool_backward(Tensor grad, Tensor rois, Tensor argmax, float spatial_scale, SymInt pooled_height,"
    " SymInt pooled_width, SymInt batch_size, SymInt channels, SymInt height, SymInt width) -> Tensor",
]
ops = torch.ops.torchvision
pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("torchvision") is not None, reason="the real torchvision defines these ops"
)


@pytest.fixture(scope="module", autouse=True)
def torchvision() -> Any:
    """Define the ops after the device is up, as a late ``import torchvision`` does."""
    torch.zeros(1, device="jax")
    library = torch.library.Library("torchvision", "DEF")
    for schema in SCHEMAS:
        library.define(schema)
    yield library
    library._destroy()


def on_device(op: Any, *args: Any) -> Any:
    """Run an op on the device, and only there."""
    counters.clear()
    found = op(*[a.to("jax") if isinstance(a, torch.Tensor) else a for a in args])
    assert not counters.fallbacks
    return [f.cpu() for f in found] if isinstance(found, (list, tuple)) else found.cpu()


# Non-maximum suppression


def overlap(a: list[float], b: list[float]) -> float:
    width = min(a[2], b[2]) - max(a[0], b[0])
    height = min(a[3], b[3]) - max(a[1], b[1])
    shared = max(width, 0.0) * max(height, 0.0)
    whole = (a[2] - a[0]) * (a[3] - a[1]) + (b[2] - b[0]) * (b[3] - b[1]) - shared
    return shared / whole if whole else math.nan


def nms(boxes: torch.Tensor, scores: torch.Tensor, threshold: float) -> torch.Tensor:
    kept: list[int] = []
    for i in scores.argsort(descending=True, stable=True).tolist():
        if not any(overlap(boxes[k].tolist(), boxes[i].tolist()) > threshold for k in kept):
            kept.append(i)
    return torch.tensor(kept, dtype=torch.int64)


def random_boxes(count: int, dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(count)
    corner = torch.rand(count, 2, generator=generator, dtype=dtype) * 10
    extent = torch.rand(count, 2, generator=generator, dtype=dtype) * 5 + 0.1
    # Scores that repeat: the order of equal ones is part of the answer.
    scores = torch.randint(0, max(count // 2, 1), (count,), generator=generator).to(dtype)
    return torch.cat([corner, corner + extent], 1), scores


@pytest.mark.parametrize("threshold", [0.0, 0.3, 0.7, 1.0])
@pytest.mark.parametrize("count", [0, 1, 60])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_nms(count: int, threshold: float, dtype: torch.dtype) -> None:
    boxes, scores = random_boxes(count, dtype)
    assert on_device(ops.nms, boxes, scores, threshold).tolist() == nms(boxes, scores, threshold).tolist()


@pytest.mark.parametrize("mode", ["lazy", "eager"])
def test_nms_of_the_boxes_of_images_of_many_sizes(mode: str) -> None:
    """A detector with ranges of sizes: its boxes, which are padded, and the ones that are kept of them."""
    torch.manual_seed(0)
    detector = Detector().eval()
    ours = copy.deepcopy(detector).to("jax")
    for size in ((16, 16), (24, 16), (24, 20), (32, 32), (18, 22)):
        images = floats(1, 3, *size)
        recording = isthmus.lazy() if mode == "lazy" else contextlib.nullcontext()
        with setting("shapes", "auto"), torch.no_grad(), recording:
            boxes, scores = detector.every_box(images)
            expected = nms(boxes[0], scores[0], 0.4)
            boxes, scores = ours.every_box(images.to("jax"))
            kept = ops.nms(boxes[0], scores[0], 0.4)
            assert kept.tolist() == expected.tolist()
            torch.testing.assert_close(boxes[0][kept].cpu(), detector.every_box(images)[0][0][expected])


def test_nms_at_the_threshold_keeps_both() -> None:
    boxes = torch.tensor([[0.0, 0, 2, 1], [1, 0, 3, 1], [0, 0, 0, 0], [0, 0, 0, 0]])
    scores = torch.tensor([0.9, 0.8, 0.7, 0.6])
    third = float(torch.tensor(1.0) / torch.tensor(3.0))  # above 1/3, as float32 has it
    assert on_device(ops.nms, boxes, scores, third).tolist() == [0, 1, 2, 3]
    assert on_device(ops.nms, boxes, scores, 1 / 3).tolist() == [0, 2, 3]


@pytest.mark.parametrize(
    ("boxes", "scores", "message"),
    [
        (torch.zeros(4), torch.zeros(1), "2d tensor, got 1D"),
        (torch.zeros(2, 5), torch.zeros(2), "4 elements in dimension 1, got 5"),
        (torch.zeros(2, 4), torch.zeros(2, 1), "1d tensor, got 2D"),
        (torch.zeros(2, 4), torch.zeros(3), "got 2 and 3"),
    ],
)
def test_nms_refuses(boxes: torch.Tensor, scores: torch.Tensor, message: str) -> None:
    with pytest.raises(RuntimeError, match=message):
        ops.nms(boxes.to("jax"), scores.to("jax"), 0.5)


# Regions of interest

ROIS = torch.tensor(
    [
        [0, 1.3, 2.1, 9.7, 8.2],
        [1, 0.0, 0.0, 4.0, 11.0],
        [1, -3.0, -4.5, 30.0, 25.0],  # beyond the image on every side
        [0, 5.0, 5.0, 5.2, 5.1],  # smaller than a pixel
        [0, 7.0, 7.0, 3.0, 2.0],  # inside out
    ]
)
Corners = list[tuple[int, int, float]]


def interpolated(y: float, x: float, height: int, width: int) -> Corners:
    if not (-1 <= y <= height and -1 <= x <= width):
        return []
    sides = []
    for at, length in ((max(y, 0.0), height), (max(x, 0.0), width)):
        low = min(int(at), length - 1)
        sides.append([(low, 1.0)] if low == length - 1 else [(low, 1 - (at - low)), (low + 1, at - low)])
    return [(row, column, down * right) for row, down in sides[0] for column, right in sides[1]]


def samples(
    roi: list[float], size: tuple[int, int], scale: float, bins: int, ratio: int, aligned: bool
) -> Any:
    """Yield (row of bins, column of bins, pixels with their weights) for one region."""
    x1, y1, x2, y2 = (v * scale - (0.5 if aligned else 0.0) for v in roi[1:])
    height, width = (v if aligned else max(v, 1.0) for v in (y2 - y1, x2 - x1))
    down, across = (ratio if ratio > 0 else math.ceil(v / bins) for v in (height, width))
    count = max(down * across, 1)
    for p in range(bins):
        for q in range(bins):
            corners: Corners = []
            for i in range(down):
                for j in range(across):
                    y = y1 + p * height / bins + (i + 0.5) * height / bins / down
                    x = x1 + q * width / bins + (j + 0.5) * width / bins / across
                    corners += interpolated(y, x, *size)
            yield p, q, [(row, column, weight / count) for row, column, weight in corners]


def roi_align(
    image: torch.Tensor, rois: torch.Tensor, scale: float, bins: int, ratio: int, aligned: bool
) -> Any:
    out = torch.zeros(len(rois), image.shape[1], bins, bins, dtype=torch.float64)
    for k, roi in enumerate(rois.double().tolist()):
        for p, q, corners in samples(roi, tuple(image.shape[2:]), scale, bins, ratio, aligned):
            for row, column, weight in corners:
                out[k, :, p, q] += image[int(roi[0]), :, row, column].double() * weight
    return out


def roi_align_backward(
    grad: torch.Tensor, rois: torch.Tensor, shape: Any, scale: float, bins: int, ratio: int, aligned: bool
) -> torch.Tensor:
    out = torch.zeros(shape, dtype=torch.float64)
    for k, roi in enumerate(rois.double().tolist()):
        for p, q, corners in samples(roi, tuple(shape[2:]), scale, bins, ratio, aligned):
            for row, column, weight in corners:
                out[int(roi[0]), :, row, column] += grad[k, :, p, q].double() * weight
    return out


@pytest.mark.parametrize("aligned", [False, True])
@pytest.mark.parametrize("ratio", [-1, 0, 2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_roi_align_and_its_gradient(dtype: torch.dtype, ratio: int, aligned: bool) -> None:
    image = torch.randn(2, 3, 12, 10, dtype=dtype)
    rois = ROIS.to(dtype)
    found = on_device(ops.roi_align, image, rois, 0.8, 3, 3, ratio, aligned)
    assert found.dtype == dtype
    want = roi_align(image, rois, 0.8, 3, ratio, aligned).to(dtype)
    torch.testing.assert_close(found, want, rtol=1e-4, atol=1e-5)
    grad = torch.randn_like(found)
    back = on_device(ops._roi_align_backward, grad, rois, 0.8, 3, 3, *image.shape, ratio, aligned)
    want = roi_align_backward(grad, rois, image.shape, 0.8, 3, ratio, aligned).to(dtype)
    torch.testing.assert_close(back, want, rtol=1e-4, atol=1e-5)


def test_roi_align_without_regions() -> None:
    image, none = torch.randn(2, 3, 12, 10), torch.zeros(0, 5)
    assert on_device(ops.roi_align, image, none, 1.0, 2, 4, -1, True).shape == (0, 3, 2, 4)
    grad = torch.zeros(0, 3, 2, 4)
    back = on_device(ops._roi_align_backward, grad, none, 1.0, 2, 4, *image.shape, -1, True)
    assert back.shape == image.shape
    assert not back.any()


def test_roi_align_counts_points_where_the_bins_divide_the_region() -> None:
    """14 / 7 is 2 points to a bin; the reciprocal of 7, rounded, makes it more than 2, and so 3."""
    image, rois = torch.randn(1, 1, 20, 20), torch.tensor([[0.0, 0, 0, 14, 14], [0, 2, 3, 9, 17]])
    found = on_device(ops.roi_align, image, rois, 1.0, 7, 7, -1, False)
    torch.testing.assert_close(found, roi_align(image, rois, 1.0, 7, -1, False).float())


def test_roi_align_in_half_precision() -> None:
    image, rois = torch.randn(2, 3, 12, 10).half(), ROIS[:2]
    found = on_device(ops.roi_align, image, rois.half(), 1.0, 2, 2, 2, True)
    want = roi_align(image, rois.half(), 1.0, 2, 2, True).half()
    torch.testing.assert_close(found, want, rtol=2e-3, atol=2e-3)


def edges(first: float, last: float, bins: int, length: int) -> list[range]:
    begin, end = (math.floor(abs(v) + 0.5) * (1 if v >= 0 else -1) for v in (first, last))
    step = max(end - begin + 1, 1) / bins
    cut = [(math.floor(p * step) + begin, math.ceil((p + 1) * step) + begin) for p in range(bins)]
    return [range(min(max(low, 0), length), min(max(high, 0), length)) for low, high in cut]


def roi_pool(image: torch.Tensor, rois: torch.Tensor, scale: float, bins: int) -> Any:
    height, width = image.shape[2:]
    out = torch.zeros(len(rois), image.shape[1], bins, bins)
    which = torch.full(out.shape, -1, dtype=torch.int32)
    for k, (batch, x1, y1, x2, y2) in enumerate((rois * torch.tensor([1, *[scale] * 4])).tolist()):
        for p, rows in enumerate(edges(y1, y2, bins, height)):
            for q, columns in enumerate(edges(x1, x2, bins, width)):
                for c in range(image.shape[1]):
                    pixels = [
                        (float(image[int(batch), c, y, x]), -(y * width + x)) for y in rows for x in columns
                    ]
                    if pixels:
                        out[k, c, p, q], which[k, c, p, q] = max(pixels)[0], -max(pixels)[1]
    return out, which


def test_roi_pool_and_its_gradient() -> None:
    image = torch.randn(2, 3, 12, 10)
    found, which = on_device(ops.roi_pool, image, ROIS, 0.5, 3, 3)
    want, where = roi_pool(image, ROIS, 0.5, 3)
    torch.testing.assert_close(found, want)
    torch.testing.assert_close(which, where)
    grad = torch.randn_like(found)
    back = on_device(ops._roi_pool_backward, grad, ROIS, which, 0.5, 3, 3, *image.shape)
    expected = torch.zeros_like(image)
    for k in range(len(ROIS)):
        flat = expected[int(ROIS[k, 0])].view(3, -1)
        for c in range(3):
            inside = where[k, c] >= 0
            flat[c].index_put_((where[k, c][inside].long(),), grad[k, c][inside], accumulate=True)
    torch.testing.assert_close(back, expected)


_EARLY = """
import torch
library = torch.library.Library("torchvision", "DEF")
library.define("nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
library.define("roi_align(Tensor input, Tensor rois) -> Tensor")  # not the schema we know
library.impl("roi_align", lambda input, rois: input, "CPU")
import isthmus
from isthmus._ops.registry import refused
isthmus.config.fallback = "cpu"
boxes = torch.tensor([[0.0, 0, 2, 2], [0, 0, 2, 2], [5, 5, 6, 6]], device="jax")
assert torch.ops.torchvision.nms(boxes, torch.ones(3, device="jax"), 0.5).tolist() == [0, 2]
assert "torchvision.nms.default" not in isthmus.metrics.fallbacks()
assert torch.ops.torchvision.roi_align(boxes, boxes).tolist() == boxes.tolist()
assert "lacks: " in refused["torchvision.roi_align.default"]
assert not hasattr(torch.ops.torchvision, "roi_pool")
"""


def test_torchvision_imported_first_and_with_a_schema_that_changed() -> None:
    done = forked_early(_EARLY)
    assert done.returncode == 0, done.stderr
