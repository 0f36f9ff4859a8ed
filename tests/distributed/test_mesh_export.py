"""A program exported from a split model keeps its shardings, and says what it needs where there is no such mesh."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

import isthmus
from isthmus._export import loader
from isthmus.errors import ExportError
from tests.distributed.mesh_process import run


@pytest.mark.timeout(300)
def test_a_split_model_is_exported_with_its_shardings(tmp_path: Path) -> None:
    (refused,) = run("mesh_export", "write", str(tmp_path), timeout=140)
    assert "executables are for one device" in refused
    (said,) = run("mesh_export", "read", str(tmp_path), timeout=140)
    assert (said["gathers"], said["moves"]) == (True, False)
    assert said["sizes"] == {
        "up.weight": 16 * 64 // 8,
        "up.bias": 64 // 8,
        "down.weight": 16 * 64 // 8,
        "again.bias": 64 // 4,
        "calls": 8,
    }
    with pytest.raises(ExportError, match=r"init_device_mesh\(\(4, 2\), \('dp', 'tp'\)\).*8 devices"):
        isthmus.load(tmp_path / "split.isthmus")
    with pytest.raises(ValueError, match=r"split over 8 devices, .*JAX has 1"):
        loader.load(tmp_path / "split.isthmus")
    # Nothing of this one is split, so that it runs on one device as well.
    x = np.load(tmp_path / "expected.npz")["x"]
    assert isthmus.load(tmp_path / "whole")(torch.from_numpy(x)).shape == (8, 4)
