"""Values that cross between the CPU and the device, and what it means for two of them to be equal."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._pytree import tree_leaves, tree_map

_WIDE = {
    torch.float16: torch.float64,
    torch.bfloat16: torch.float64,
    torch.float32: torch.float64,
    torch.complex64: torch.complex128,
}


class Mismatch(AssertionError):
    """The device's answer is not the CPU's."""


def to_jax(value: Any) -> Any:
    """Return a copy of any argument on the device: tensors with their strides, devices by name."""
    return tree_map(_to_jax, value)


def _to_jax(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return _twin(value, "jax")
    is_cpu = isinstance(value, torch.device) and value.type == "cpu"
    return torch.device("jax") if is_cpu or (isinstance(value, str) and value == "cpu") else value


def copied(value: Any) -> Any:
    """Return any argument with its tensors copied, so that a call may write to them."""
    return tree_map(lambda v: _twin(v, "cpu") if isinstance(v, torch.Tensor) else v, value)


def _twin(tensor: torch.Tensor, device: str) -> torch.Tensor:
    """Return a copy on a device, with the elements its storage holds beside those it shows."""
    if tensor.layout != torch.strided or tensor.device.type != "cpu":
        return tensor
    with torch.no_grad():
        if tensor.is_conj() or tensor.is_neg():
            made = tensor.resolve_conj().resolve_neg().to(device, copy=True)
        else:
            count = tensor.untyped_storage().nbytes() // tensor.element_size()
            made = tensor.detach().as_strided((count,), (1,), 0).to(device, copy=True)
            made = made.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())
    return made.detach().requires_grad_(tensor.requires_grad)


def widened(value: Any) -> Any:
    """Return any argument with its real and complex tensors and dtypes in double precision."""
    return tree_map(_widened, value)


def _widened(value: Any) -> Any:
    if isinstance(value, torch.Tensor) and value.dtype in _WIDE:
        with torch.no_grad():
            return value.detach().to(_WIDE[value.dtype]).requires_grad_(value.requires_grad)
    return _WIDE.get(value, value) if isinstance(value, torch.dtype) else value


PLACES = {"cpu": copied, "jax": to_jax, "wide": widened}


def leaves(result: Any) -> list[Any]:
    """Return what a result holds, flat."""
    return [leaf for leaf in tree_leaves(result) if leaf is not None]


def weights(tensor: torch.Tensor) -> torch.Tensor:
    """Return fixed numbers in the shape and dtype of ``tensor``, on its device: a cotangent or tangent."""
    angle = torch.arange(tensor.numel(), dtype=torch.float64).reshape(tensor.shape) * 0.7 + 0.3
    made = torch.polar(torch.ones_like(angle), angle) if tensor.is_complex() else torch.cos(angle)
    return made.to(tensor.dtype).to(tensor.device)


def gradients(
    outputs: list[torch.Tensor], inputs: list[torch.Tensor], create_graph: bool = False
) -> list[Any]:
    """Return the gradients of ``inputs`` for a fixed cotangent, None where there is none."""
    if not outputs:
        return []
    cotangents = [weights(t) for t in outputs]
    return list(
        torch.autograd.grad(outputs, inputs, cotangents, create_graph=create_graph, allow_unused=True)
    )


def names_a_device(value: Any) -> bool:
    """Return whether an argument says where a result is to be."""
    return any([isinstance(v, (torch.Tensor, torch.device)) or v == "cpu" for v in leaves(value)])


def compare_forms(got: list[Any], want: list[Any], device: str) -> None:
    """Compare everything but values: number of results, kinds, devices, shapes, dtypes."""
    if len(got) != len(want):
        raise Mismatch(f"{len(got)} results, CPU gives {len(want)}")
    for g, w in zip(got, want, strict=True):
        if not isinstance(w, torch.Tensor):
            if type(g) is not type(w):
                raise Mismatch(f"{type(g)}, CPU gives {type(w)}")
            continue
        if g.device.type != (device if w.device.type == "cpu" else w.device.type):
            raise Mismatch(f"result on {g.device}")
        if g.shape != w.shape or g.dtype != w.dtype:
            raise Mismatch(f"{tuple(g.shape)} {g.dtype}, CPU gives {tuple(w.shape)} {w.dtype}")


def compare_values(got: list[Any], want: list[Any], truth: Any) -> None:
    """Compare values; ``truth`` returns the same results computed in double precision, or None.

    A result counts as right when it is close to the CPU's, or as near to the true one as the CPU's is: half
    types that are accumulated wider here than on the CPU differ from it and are better.
    """
    true = None
    for i, (g, w) in enumerate(zip(got, want, strict=True)):
        problem = _difference(g, w)
        if problem:
            true = truth() if true is None else true
            if not true or not _as_near(g, w, true[i]):
                raise Mismatch(f"result {i}: {problem}")


def _difference(got: Any, want: Any) -> str:
    if not isinstance(want, torch.Tensor):
        same = got == want or (got != got and want != want)
        return "" if same or _close(got, want) else f"{got}, CPU gives {want}"
    try:
        torch.testing.assert_close(got, want, equal_nan=True, check_stride=False)
    except AssertionError as error:
        return " ".join(str(error).split())[:240]
    return ""


def _close(got: Any, want: Any) -> bool:
    if not isinstance(want, (float, complex)):
        return False
    return abs(got - want) <= 1e-5 + 1.3e-6 * abs(want)


def _as_near(got: Any, want: Any, true: Any) -> bool:
    """Return whether the largest error is at most four times the CPU's, and some roundings of the largest value."""
    if not isinstance(want, torch.Tensor) or want.dtype not in _WIDE or true.shape != want.shape:
        return False
    wide = _WIDE[want.dtype]
    got, want_, true = got.to(wide), want.to(wide), true.to(wide)
    rounded = true.to(want.dtype).to(wide)
    same = (got == want_) | (got == rounded) | (got.isnan() & (want_.isnan() | true.isnan()))
    if same.all():
        return True
    rest = ~same
    if not (got[rest].isfinite().all() and true[rest].isfinite().all()):
        return False
    size = true[rest].abs()
    eps = torch.finfo(want.dtype).eps
    err = (want_[rest] - true[rest]).abs()
    allowed = 4 * torch.nan_to_num(err, nan=0.0, posinf=0.0).max() + 4 * eps * size + 32 * eps * size.max()
    return bool(((got[rest] - true[rest]).abs() <= allowed).all())
