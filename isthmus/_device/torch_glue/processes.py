"""Tensors that are sent to other processes: refused where they are sent, or where they arrive.

A "jax" array lives in one process. A ``multiprocessing.Queue``, as under a ``DataLoader``, pickles on a thread of its
own and drops what cannot be pickled, so the process at the other end would wait for ever. There the error travels
in the tensor's place and is raised where it arrives; elsewhere it is raised at once.
"""

from __future__ import annotations

import threading
from multiprocessing.reduction import ForkingPickler
from typing import Any, NoReturn

import torch
import torch.multiprocessing  # registers torch's own reducers, which must be there first

from isthmus._device.torch_glue import patches

REFUSAL = "a tensor on device 'jax' cannot be shared with another process; send tensor.cpu() instead"
_FEEDER = "QueueFeederThread"  # what multiprocessing calls the thread of a queue


def install() -> None:
    """Take the place of torch's reducer of storages, for those of the device."""
    reducers: dict[Any, Any] = ForkingPickler._extra_reducers  # type: ignore[attr-defined]
    theirs = reducers.get(torch.UntypedStorage)
    if theirs is None or getattr(theirs, "of_isthmus", False):
        return

    def reduce_storage(storage: torch.UntypedStorage) -> Any:
        return theirs(storage) if storage.device.type != "jax" else _reduce()

    reduce_storage.of_isthmus = True  # type: ignore[attr-defined]
    owner = "multiprocessing.reduction.ForkingPickler"
    patches.register(owner, "register", torch.UntypedStorage, reduce_storage)


def _reduce() -> Any:
    if threading.current_thread().name != _FEEDER:
        raise RuntimeError(REFUSAL)
    return refuse, (REFUSAL,)


def refuse(message: str) -> NoReturn:
    """Raise what could not be raised where the tensor was sent."""
    raise RuntimeError(message)
