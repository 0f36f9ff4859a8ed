"""safetensors: files of the device's tensors, and files loaded to it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.integrations.support import need

pytestmark = need("safetensors")
TENSORS = {
    "matrix": torch.randn(3, 4), "whole": torch.arange(5), "half": torch.randn(6).bfloat16(),
    "empty": torch.empty(0, 3), "number": torch.tensor(2.5), "truth": torch.tensor([True, False]),
}  # fmt: skip


@pytest.fixture
def file(tmp_path: Path) -> Path:
    from safetensors.torch import save_file

    save_file(
        {name: x.to("jax") for name, x in TENSORS.items()}, tmp_path / "a.safetensors", {"made": "here"}
    )
    return tmp_path / "a.safetensors"


def assert_loaded(found: dict[str, Any], device: str) -> None:
    assert found.keys() == TENSORS.keys()
    for name, x in TENSORS.items():
        assert found[name].device.type == device
        assert found[name].dtype == x.dtype
        assert torch.equal(found[name].cpu(), x)


@pytest.mark.parametrize("device", ["jax", "jax:0", torch.device("jax"), "cpu", None], ids=str)
def test_load_file(file: Path, device: Any) -> None:
    from safetensors.torch import load_file

    loaded = load_file(file) if device is None else load_file(file, device=device)
    assert_loaded(loaded, torch.device(device or "cpu").type)


def test_safe_open_and_slices(file: Path) -> None:
    from safetensors import safe_open

    with safe_open(file, framework="pt", device="jax") as opened:
        assert_loaded({name: opened.get_tensor(name) for name in opened.keys()}, "jax")  # noqa: SIM118
        part = opened.get_slice("matrix")
        assert part.get_shape() == [3, 4]
        assert part[1:, :2].device.type == "jax"
        assert torch.equal(part[1:, :2].cpu(), TENSORS["matrix"][1:, :2])
        assert opened.metadata() == {"made": "here"}
        if hasattr(opened, "get_tensors"):
            assert_loaded(opened.get_tensors(), "jax")
    with safe_open(file, framework="np") as opened:
        assert opened.get_tensor("whole").tolist() == [0, 1, 2, 3, 4]


def test_models(tmp_path: Path) -> None:
    from safetensors.torch import load_model, save_model

    def model() -> torch.nn.Module:
        return torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4)).to("jax")

    one, other = model(), model()
    save_model(one, str(tmp_path / "model.safetensors"))
    assert load_model(other, tmp_path / "model.safetensors", device="jax") == (set(), [])
    for ours, theirs in zip(other.state_dict().values(), one.state_dict().values(), strict=True):
        assert ours.device.type == "jax"
        assert torch.equal(ours.cpu(), theirs.cpu())


def test_other_devices_and_missing_files_are_safetensors_own(file: Path) -> None:
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    with pytest.raises(SafetensorError, match="device nowhere is invalid"):
        load_file(file, device="nowhere")
    with pytest.raises(FileNotFoundError):
        load_file(file.with_name("none"), device="jax")
