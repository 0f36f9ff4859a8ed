"""Every collective of ``torch.distributed`` on "jax" tensors, by two processes."""

from __future__ import annotations

from pathlib import Path

from tests.distributed import launch


def test_collectives(tmp_path: Path) -> None:
    said = launch.failures("tests.distributed.collectives", tmp_path)
    assert said == {"passed": 16}
