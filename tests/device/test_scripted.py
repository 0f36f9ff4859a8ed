"""Modules of ``torch.jit`` on the device are saved with their weights and loaded wherever they are wanted."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn


class Tied(nn.Module):
    """Two layers with one weight, a buffer, and statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(3, 3), nn.Linear(3, 3)
        self.second.weight = self.first.weight
        self.norm = nn.BatchNorm1d(3)
        self.register_buffer("shift", torch.arange(3.0))

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.second(self.first(x))) + self.shift


class Plain(nn.Module):
    """A tensor that is no buffer."""

    def __init__(self, device: str) -> None:
        super().__init__()
        self.layer, self.shift = nn.Linear(3, 3).to(device), torch.ones(3, device=device)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) + self.shift


@pytest.mark.filterwarnings("ignore:.*torch.jit")
@pytest.mark.parametrize("how", ["traced", "scripted"])
@pytest.mark.parametrize("where", ["file", "memory", "method"])
def test_a_saved_module_has_its_weights(how: str, where: str, tmp_path: Path) -> None:
    x = torch.randn(4, 3)
    module = Tied().eval()
    with torch.no_grad():  # a graph would hold the parameters where they are
        want = module(x)
    module.to("jax")
    made = torch.jit.script(module) if how == "scripted" else torch.jit.trace(module, x.to("jax"))
    path = tmp_path / "module.pt"
    if where == "file":
        torch.jit.save(made, path)
    elif where == "method":
        made.save(str(path))
    else:
        held = io.BytesIO()
        torch.jit.save(made, held)
        path.write_bytes(held.getvalue())
    assert {t.device.type for t in made.state_dict().values()} == {"jax"}
    torch.testing.assert_close(made(x.to("jax")).detach().cpu(), want)
    for place in (None, "cpu", "jax", torch.device("jax")):
        loaded = torch.jit.load(path, map_location=place)
        device = "jax" if str(place) == "jax" else "cpu"
        assert {t.device.type for t in loaded.state_dict().values()} == {device}
        torch.testing.assert_close(loaded(x.to(device)).detach().cpu(), want)
        assert all(p.requires_grad for p in loaded.parameters())


@pytest.mark.filterwarnings("ignore:.*torch.jit")
def test_what_cannot_be_written_is_refused(tmp_path: Path) -> None:
    made = torch.jit.script(Plain("jax"))
    with pytest.raises(RuntimeError, match="neither a parameter nor a buffer"):
        torch.jit.save(made, tmp_path / "module.pt")
    assert not (tmp_path / "module.pt").exists()
    torch.jit.save(torch.jit.script(Plain("cpu")), tmp_path / "module.pt")  # others are torch's
    assert torch.jit.load(tmp_path / "module.pt")(torch.ones(1, 3)).shape == (1, 3)
