"""``torch.distributed`` on device "jax" by two and four processes; each test starts one job that makes many checks."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.distributed import launch

pytestmark = pytest.mark.timeout(600)


def test_two_ranks(tmp_path: Path) -> None:
    assert launch.failures("tests.distributed.quick", tmp_path, timeout=580) == {"passed": 23}


def test_four_ranks_in_short(tmp_path: Path) -> None:
    only = "check_groups,check_hsdp"
    said = launch.failures("tests.distributed.four", tmp_path, world=4, timeout=280, only=only)
    assert said == {"passed": 2}


@pytest.mark.slow
def test_training(tmp_path: Path) -> None:
    assert launch.failures("tests.distributed.training", tmp_path, timeout=560) == {"passed": 19}


@pytest.mark.slow
def test_compiled_collectives(tmp_path: Path) -> None:
    assert launch.failures("tests.distributed.compiled", tmp_path, timeout=280) == {"passed": 4}


@pytest.mark.slow
def test_four_ranks(tmp_path: Path) -> None:
    assert launch.failures("tests.distributed.four", tmp_path, world=4, timeout=500) == {"passed": 6}


@pytest.mark.slow
@pytest.mark.parametrize(("saving", "loading"), [(2, 4), (4, 2)])
def test_checkpoint_of_another_number_of_ranks(saving: int, loading: int, tmp_path: Path) -> None:
    for world, name in ((saving, "check_save"), (loading, "check_load")):
        folder = tmp_path / name
        folder.mkdir()
        said = launch.failures(
            "tests.distributed.resharding",
            folder,
            world,
            timeout=280,
            only=name,
            CHECKPOINT=str(tmp_path / "kept"),
        )
        assert said == {"passed": 1}
