"""What asynchronous collectives return: torch's ``Work``, for results that are arrays already and for messages to come.

An array of JAX's can be used before it is computed, so a collective on the device is done once it is launched, and its
``Work`` is a finished future (``finished``). A message from one rank to another goes through gloo on the CPU;
``Message`` is its ``Work``, and ``wait`` puts what was received into the "jax" tensor.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.futures import Future

from isthmus._device.torch_glue.private import work_of_future
from isthmus._distributed.agreement import explained


def finished(tensors: Any) -> dist.Work:
    """Return the work of a collective that has been launched; its future holds ``tensors``."""
    future: Future[Any] = Future()
    future.set_result(tensors)
    return work_of_future(future)


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
