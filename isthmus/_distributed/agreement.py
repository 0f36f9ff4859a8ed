"""Makes sure that all ranks of a group call the same collective, before any of them waits inside XLA for the others.

Each rank sends one line of text about its call to all others, through gloo on the CPU::

    all_reduce(sum) float32[3]

Lines that differ become an error on every rank that says who called what; a rank that does not come in time, or whose
process has ended, becomes an error that names this rank, the collective, and the other's last words. XLA's own
collectives on the CPU have a time-out of seconds and no check at all.

On the CPU this happens for every collective. Elsewhere it would stop the host at each, so it happens when a
collective is compiled for new shapes, and always with TORCH_DISTRIBUTED_DEBUG=DETAIL.
"""

from __future__ import annotations

import hashlib
from datetime import timedelta
from typing import Any

import torch
from torch.distributed import distributed_c10d as c10d

from isthmus._distributed import start
from isthmus.errors import CollectiveError

# A line longer than this ends with its hash, so that lines that differ late still differ.
_BYTES = 512


def agree(gloo: Any, rank: int, ranks: tuple[int, ...], line: str, timeout: timedelta | None) -> None:
    """Return when every rank of the group has called the collective that ``line`` describes."""
    lines = [_decoded(each) for each in gather(gloo, ranks[rank], line, _encoded(line), timeout)]
    if len(set(lines)) > 1:
        calls = "\n".join(f"  rank {ranks[n]:<9}{text}" for n, text in enumerate(lines))
        raise CollectiveError(
            f"rank {ranks[rank]}: the ranks of a group called different collectives, or with other shapes\n{calls}"
        )


def gather(
    gloo: Any, own: int, line: str, data: torch.Tensor, timeout: timedelta | None
) -> list[torch.Tensor]:
    """Return the CPU tensor ``data`` of every rank; ``own`` is this process's rank, ``line`` its call, for errors."""
    received = [torch.empty_like(data) for _ in range(gloo.size())]
    options = c10d.AllgatherOptions()  # type: ignore[attr-defined]
    if timeout is not None:
        options.timeout = timeout
    with explained(own, line):
        gloo.allgather([received], [data], options).wait()
    return received


class explained:  # lower case, as it is used: ``with explained(rank, line):``
    """Says, of an error of gloo's in this block, which rank and collective it is, and why the other one left."""

    def __init__(self, rank: int, line: str) -> None:
        self.rank, self.line = rank, line

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if not isinstance(error, RuntimeError) or isinstance(error, CollectiveError):
            return
        text, words = str(error), start.last_words()
        if "imed out" in text or "imeout" in text:
            what = "no answer from another rank in time"
        else:
            what = "the connection to another rank is closed"
        because = f"\n  because      {words}" if words else ""
        raise CollectiveError(
            f"rank {self.rank}: {what}, in {self.line}{because}\n  gloo says    {text.splitlines()[0]}"
        ) from error


def _encoded(line: str) -> torch.Tensor:
    data = line.encode()
    if len(data) > _BYTES:
        digest = f"... {hashlib.sha256(data).hexdigest()[:16]}".encode()
        data = data[: _BYTES - len(digest)] + digest
    return torch.frombuffer(bytearray(data.ljust(_BYTES)), dtype=torch.uint8)


def _decoded(data: torch.Tensor) -> str:
    return bytes(data.tolist()).decode(errors="replace").rstrip()
