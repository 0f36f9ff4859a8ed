"""What happens to a job when one of its ranks fails, or does things in the wrong order."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from tests.distributed import launch

START = """
import datetime, sys, time, torch, torch.distributed as dist
"""
DIES = """
dist.init_process_group(timeout=datetime.timedelta(seconds=120))
x = torch.ones(2, device="jax")
dist.all_reduce(x)
if dist.get_rank() == RANK:
    HOW
dist.all_reduce(x)
dist.all_reduce(x)
"""


@pytest.mark.parametrize(
    ("rank", "how", "words"),
    [
        (1, 'raise ValueError("no such word")', "rank 1 ended with ValueError: no such word"),
        pytest.param(0, 'raise ValueError("no such word")', "", marks=pytest.mark.slow),
        pytest.param(1, "sys.exit(3)", "the connection to another rank is closed", marks=pytest.mark.slow),
    ],
)
def test_a_rank_that_dies_ends_the_others(rank: int, how: str, words: str, tmp_path: Path) -> None:
    script = tmp_path / "dies.py"
    script.write_text(START + DIES.replace("RANK", str(rank)).replace("HOW", f"print(time.time()); {how}"))
    ended = launch.run([str(script)], world=2, timeout=150)
    over = time.time()
    failed_at = next(
        float(line) for line in ended[rank][1].splitlines() if line[:2] == "17" or line[:2] == "18"
    )
    assert over - failed_at < 30
    assert all(status != 0 for status, _ in ended)
    assert words in ended[1 - rank][1]
    if "raise" in how:
        assert "ValueError: no such word" in ended[rank][1]


def test_a_group_comes_before_the_first_tensor(tmp_path: Path) -> None:
    script = tmp_path / "late.py"
    script.write_text(START + 'torch.ones(2, device="jax"); dist.init_process_group()')
    ended = launch.run([str(script)], world=2, timeout=120)
    for status, output in ended:
        assert status == 1
        assert "RegistrationError: init_process_group() was called after the first tensor on 'jax'" in output
        assert "to fix it    call torch.distributed.init_process_group() at the top of the script" in output


def test_one_process_is_a_group_of_its_own(tmp_path: Path) -> None:
    script = tmp_path / "alone.py"
    lines = (
        'x = torch.ones(2, device="jax"); dist.init_process_group(); dist.all_reduce(x); print(x.tolist())'
    )
    script.write_text(START + lines)
    ((status, output),) = launch.run([str(script)], world=1, timeout=120)
    assert status == 0, output
    assert "[1.0, 1.0]" in output
