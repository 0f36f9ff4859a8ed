"""The backend where torch has an accelerator of its own: it works on torch's tensors, without the device."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
PROGRAM = """
import copy, torch
import _isthmus_autoload
_isthmus_autoload.rival = lambda: "cuda"  # as on a machine with a GPU

model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.GELU(), torch.nn.LayerNorm(8), torch.nn.Linear(8, 2))
other, x = copy.deepcopy(model), torch.randn(3, 4)
for each, run in ((model, torch.compile(model, backend="isthmus")), (other, other)):
    optimizer = torch.optim.AdamW(each.parameters())
    for _ in range(3):
        run(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
for got, want in zip(model.parameters(), other.parameters(), strict=True):
    torch.testing.assert_close(got, want)
print(torch._C._get_privateuse1_backend_name())
import isthmus
print(isthmus.metrics.counts()["compilations"] > 0, isthmus.metrics.fallbacks())
"""


def test_training_without_the_device() -> None:
    environment = {**os.environ, "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
    ran = subprocess.run(
        [sys.executable, "-c", PROGRAM], cwd=ROOT, env=environment, capture_output=True, text=True
    )
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.split("\n")[:2] == ["privateuseone", "True {}"]
