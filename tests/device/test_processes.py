"""Other processes: a "jax" tensor made, held or returned in one is a clear error, never somebody who waits for ever."""

from __future__ import annotations

import json
import multiprocessing
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, Dataset

import isthmus

ROOT = Path(__file__).parents[2]
FORKED, SHARED = "in a forked subprocess", "cannot be shared with another process"
forks = pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no forks")


class Makes(Dataset[torch.Tensor]):
    """Items are made on the device, in the worker."""

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.ones(2, device="jax") * index


class Holds(Makes):
    """Items were made before the workers were."""

    def __init__(self) -> None:
        self.items = torch.ones(4, 2, device="jax")

    def __getitem__(self, index: int) -> torch.Tensor:
        return self.items[index]


class OnHost(Makes):
    """Items are on the CPU, as they should be."""

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.ones(2) * index


KINDS: dict[str, type[Makes]] = {"makes": Makes, "holds": Holds, "host": OnHost}


def load(kind: str, how: str) -> Any:
    """Return what a loader with a worker gives."""
    loader = DataLoader(KINDS[kind](), batch_size=2, num_workers=1, multiprocessing_context=how)
    return [batch.tolist() for batch in loader]


def use(queue: Any, action: str) -> None:
    """Use the device in a process, and send what came of it."""
    actions = {
        "op": lambda: (torch.ones(3, device="jax") + 1).tolist(),
        "the same op": lambda: (torch.zeros(3, device="jax") + 1).tolist(),  # the parent has compiled it
        "arange": lambda: torch.arange(3, device="jax").tolist(),
        "transfer": lambda: torch.ones(3).to("jax").tolist(),
        "wait": torch.jax.synchronize,  # type: ignore[attr-defined]
        "lazy": lambda: _lazily(),
        "random": lambda: torch.randn(3, device="jax").tolist(),
    }
    try:
        queue.put(actions[action]())
    except RuntimeError as error:
        queue.put(str(error))


def _lazily() -> Any:
    with isthmus.lazy():
        return (torch.ones(3, device="jax") * 2).tolist()


def send(queue: Any) -> None:
    """Send a tensor of the device."""
    queue.put({"x": [torch.ones(2, device="jax")]})
    time.sleep(3)  # multiprocessing pickles on another thread, which dies with the process


def receive(how: str) -> Any:
    """Receive a tensor of the device from another process."""
    context = multiprocessing.get_context(how)
    queue = context.Queue()
    child = context.Process(target=send, args=(queue,))
    child.start()
    try:
        return queue.get(timeout=60)
    finally:
        child.join(30)


def in_child(action: str) -> Any:
    """Return what a forked child came to."""
    context = multiprocessing.get_context("fork")
    queue = context.SimpleQueue()
    child = context.Process(target=use, args=(queue, action))
    child.start()
    child.join(60)
    if child.exitcode is None:
        child.kill()
        return "it hangs"
    return queue.get()


def attempt(function: str, *args: str) -> list[Any]:
    """Return ["came", value] or ["raised", type, message] of one of the functions above."""
    try:
        return ["came", globals()[function](*args)]
    except Exception as error:
        return ["raised", type(error).__name__, str(error)]


def outcomes(calls: list[list[str]], used: bool) -> list[list[Any]]:
    """Return the outcome of each call, in a process of its own: its workers are forked from one with few threads."""
    lines = [
        "import json, sys, torch",
        "from tests.device.test_processes import attempt",
        "if __name__ == '__main__':",
        "    calls, used = json.loads(sys.argv[1])",
        "    if used: (torch.zeros(3, device='jax') + 1).tolist(), torch.arange(3, device='jax')",
        "    print(json.dumps([attempt(*call) for call in calls]))",
    ]
    ran = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", "\n".join(lines), json.dumps([calls, used])],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr[-3000:]
    return json.loads(ran.stdout.splitlines()[-1])


ON_HOST = ["came", [[[0, 0], [1, 1]], [[2, 2], [3, 3]]]]
ACTIONS = ["op", "the same op", "arange", "transfer", "wait", "lazy", "random"]


@forks
def test_forked_after_jax_started() -> None:
    calls = [["load", "makes", "fork"], ["load", "holds", "fork"], ["load", "host", "fork"]]
    makes, holds, host, *others = outcomes([*calls, *[["in_child", a] for a in ACTIONS]], used=True)
    for outcome in (makes, holds):
        assert outcome[:2] == ["raised", "RuntimeError"], outcome
        assert FORKED in outcome[2]
        assert "multiprocessing_context='spawn'" in outcome[2]
    assert host == ON_HOST
    for action, outcome in zip(ACTIONS, others, strict=True):
        assert outcome[0] == "came", outcome
        assert isinstance(outcome[1], str), (action, outcome)
        assert FORKED in outcome[1]


@forks
def test_forked_before_jax_started() -> None:
    """The child may start JAX for itself; what it returns cannot leave it."""
    makes, receives = outcomes([["load", "makes", "fork"], ["receive", "fork"]], used=False)
    for outcome in (makes, receives):
        assert outcome[:2] == ["raised", "RuntimeError"], outcome
        assert SHARED in outcome[2]


def test_spawned() -> None:
    makes, holds = outcomes([["load", "makes", "spawn"], ["load", "holds", "spawn"]], used=True)
    for outcome in (makes, holds):
        assert outcome[:2] == ["raised", "RuntimeError"], outcome
        assert SHARED in outcome[2]


@pytest.mark.slow
@pytest.mark.parametrize("how", ["spawn", "forkserver"])
@pytest.mark.parametrize("used", [True, False])
def test_other_ways_to_start_a_process(how: str, used: bool) -> None:
    calls = [["load", "makes", how], ["receive", how], ["load", "holds", how], ["load", "host", how]]
    *refused, host = outcomes(calls, used)
    for outcome in refused:
        assert outcome[:2] == ["raised", "RuntimeError"], outcome
        assert SHARED in outcome[2]
    assert host == ON_HOST


def test_what_is_sent_at_once_is_refused_at_once() -> None:
    ours, theirs = multiprocessing.get_context("spawn").Pipe()
    with pytest.raises(RuntimeError, match=SHARED):
        ours.send(torch.ones(2, device="jax"))
    ours.close()
    theirs.close()
    assert not torch.jax._is_in_bad_fork()  # type: ignore[attr-defined]
