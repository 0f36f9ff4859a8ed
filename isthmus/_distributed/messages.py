"""Messages from one rank to another, asynchronous ones too: send, recv.

They go through gloo and the host, since an XLA program needs all of its devices to take part.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.futures import Future

from isthmus._distributed.agreement import explained
from isthmus._distributed.rank_group import RankGroup, collective, kinds_of

Tensor = torch.Tensor


class Messages(RankGroup):
    """The messages of a group."""

    @collective
    def send(self, tensors: list[Tensor], dst: int, tag: int) -> Any:
        """Send tensors to one rank."""
        line = f"send to rank {self._ranks[dst]}: {kinds_of(tensors)}"
        staged = [tensor.detach().cpu().contiguous() for tensor in tensors]
        inner = self._cpu.send(staged, dst, tag)
        # The staged copy lives as long as the message.
        return Message(self._ranks[self._own], line, inner, tensors, functools.partial(staged.clear))

    @collective
    def recv(self, tensors: list[Tensor], src: int, tag: int) -> Any:
        """Receive tensors from one rank."""
        return self._receive(
            tensors, f"rank {self._ranks[src]}", lambda staged: self._cpu.recv(staged, src, tag)
        )

    @collective
    def recv_anysource(self, tensors: list[Tensor], tag: int) -> Any:
        """Receive tensors from whichever rank sends some."""
        return self._receive(tensors, "any rank", lambda staged: self._cpu.recv_anysource(staged, tag))

    def _receive(self, tensors: list[Tensor], source: str, begin: Callable[[list[Tensor]], Any]) -> Message:
        staged = [torch.empty(tensor.shape, dtype=tensor.dtype) for tensor in tensors]
        line = f"recv from {source}: {kinds_of(tensors)}"

        def arrive() -> None:
            with torch.no_grad():
                for tensor, data in zip(tensors, staged, strict=True):
                    tensor.detach().copy_(data)

        return Message(self._ranks[self._own], line, begin(staged), tensors, arrive)


class Message(dist.Work):
    """A message on its way: ``inner`` is gloo's work, ``arrive`` is called once when it is over."""

    def __init__(self, rank: int, line: str, inner: Any, tensors: Any, arrive: Callable[[], None]) -> None:
        super().__init__()
        self._rank, self._line, self._inner, self._tensors = rank, line, inner, tensors
        self._arrive: Callable[[], None] | None = arrive
        self._future: Future[Any] | None = None

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        """Wait for the message, for as long as the group allows or ``timeout`` says."""
        if self._arrive is None:
            return True
        with explained(self._rank, self._line):
            _ = self._inner.wait(timeout) if timeout > timedelta(0) else self._inner.wait()
        arrive, self._arrive = self._arrive, None
        arrive()
        if self._future is not None:
            self._future.set_result(self._tensors)
        return True

    def synchronize(self) -> None:
        """Wait for the message."""
        self.wait()

    def is_completed(self) -> bool:
        """Return whether the message has arrived; if so its tensor has been written."""
        if self._arrive is not None and self._inner.is_completed():
            self.wait()
        return self._arrive is None

    def is_success(self) -> bool:
        """Return whether the message has arrived."""
        return self.is_completed()

    def get_future(self) -> Future[Any]:
        """Return a future that is done once the message was waited for."""
        if self._future is None:
            self._future = Future()
            if self._arrive is None:
                self._future.set_result(self._tensors)
        return self._future

    def result(self) -> Any:
        """Return the tensors of the message."""
        return self._tensors

    def source_rank(self) -> int:
        """Return which rank of the group the message came from."""
        return int(self._inner._source_rank())

    _source_rank = source_rank
