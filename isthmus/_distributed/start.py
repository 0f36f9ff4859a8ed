"""Joins JAX's processes when the first group is made, and parts from them when this one ends.

``join`` is called by ``group.create`` in every process. Rank 0 chooses a port, torch's own store carries the address,
and ``jax.distributed.initialize`` makes the devices of all processes known to each other. JAX can do that only before
it has started, so ``init_process_group()`` comes before the first "jax" tensor.

A process that ends by an exception writes it into the store before it leaves (``endings.py``); the others find their
connection to it closed, read what happened there (``last_words``), and raise that.
"""

from __future__ import annotations

import atexit
import contextlib
import socket
import weakref
from datetime import timedelta
from typing import Any, ClassVar

import jax
from torch.distributed import distributed_c10d as c10d

from isthmus import config
from isthmus._distributed import endings
from isthmus.errors import RegistrationError

_ADDRESS, _FAILED = "isthmus/coordinator", "isthmus/failed"
_TOO_LATE = (
    "init_process_group() was called after the first tensor on 'jax' (or other work of JAX's), when this process had "
    "already started JAX on its own\n"
    "  to fix it    call torch.distributed.init_process_group() at the top of the script, before any tensor or module "
    "is moved to 'jax'"
)


class _Job:
    """What this process knows about the job it is part of."""

    store: Any = None
    rank = 0
    groups: ClassVar[weakref.WeakSet[Any]] = weakref.WeakSet()


def join(store: c10d.Store, rank: int, world: int, timeout: timedelta) -> None:
    """Make the devices of ``world`` processes known to each other; a second call checks that it is the same job."""
    if jax.distributed.is_initialized():
        if (jax.process_index(), jax.process_count()) != (rank, world):
            raise RegistrationError(
                f"JAX runs as process {jax.process_index()} of {jax.process_count()}, and torch as rank {rank} of "
                f"{world}: both must be the same processes"
            )
    elif world > 1:
        _initialize(store, rank, world, timeout)
    if _Job.store is None:
        atexit.register(_close)
        endings.watch(_tell)
    _Job.store, _Job.rank = store, rank


def _initialize(store: c10d.Store, rank: int, world: int, timeout: timedelta) -> None:
    launch = config.launch()
    if rank == 0:
        host = launch.address or socket.gethostname()
        with socket.socket() as free:
            free.bind(("", 0))
            store.set(_ADDRESS, f"{host}:{free.getsockname()[1]}")
    seconds = max(1, int(timeout.total_seconds()))
    # On the CPU every process has one device of its own; on a GPU it takes the one that its launcher means.
    local = None if launch.local_rank is None else [launch.local_rank]
    with endings.without_preemption_service():
        try:
            jax.distributed.initialize(
                store.get(_ADDRESS).decode(),
                world,
                rank,
                local_device_ids=local,
                cluster_detection_method="deactivate",
                initialization_timeout=seconds,
                # A process that has died is noticed by its connections. Heartbeats would end those that still work.
                heartbeat_timeout_seconds=seconds,
                shutdown_timeout_seconds=seconds,
            )
        except RuntimeError as error:
            if "must be called before" in str(error):
                raise RegistrationError(_TOO_LATE) from error
            raise


def _tell(words: str) -> None:
    _Job.store.set(_FAILED, f"rank {_Job.rank} ended with {words}"[:2000])


def _close() -> None:
    for group in list(_Job.groups):
        group.shutdown()  # ranks that wait for this one see their connection close


def note_group(group: Any) -> None:
    """Close a group's connections when this process ends."""
    _Job.groups.add(group)


def last_words() -> str:
    """Return why another rank has ended, as it wrote it into the store, or ""."""
    with contextlib.suppress(Exception):
        if _Job.store.check([_FAILED]):
            return str(_Job.store.get(_FAILED).decode())
    return ""


def is_debugging() -> bool:
    """Return whether TORCH_DISTRIBUTED_DEBUG=DETAIL asks for every collective to be checked."""
    return bool(c10d.get_debug_level() == c10d.DebugLevel.DETAIL)  # type: ignore[attr-defined]
