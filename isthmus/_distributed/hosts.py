"""``initialize``: several processes, one per host, become one JAX program with global devices.

Where the processes find each other comes from the environment: torchrun's variables (``RANK``, ``WORLD_SIZE``,
``MASTER_ADDR``), or what JAX itself recognises (SLURM, Open MPI, Cloud TPU, GKE). torchrun's own port is taken by its
store, so rank 0 chooses another one for JAX and tells it to the others through that store.
"""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Mapping
from datetime import timedelta
from typing import Any

import jax

from isthmus import config
from isthmus._distributed import endings
from isthmus._runtime import compiler
from isthmus.errors import IsthmusError

_ADDRESS = "isthmus/coordinator"


def initialize(
    coordinator_address: str | None = None,
    num_processes: int | None = None,
    process_id: int | None = None,
    *,
    timeout: float = 300,
) -> None:
    """Join the processes of several hosts; call it first, in every process. In a single process it does nothing.

    Arguments:
        coordinator_address: ``host:port`` of process 0, reachable by all; by default from torchrun's, SLURM's, Open
            MPI's or Cloud TPU's environment.
        num_processes: how many processes there are.
        process_id: which of them this is.
        timeout: seconds to wait for the others.
    """
    if jax.distributed.is_initialized():
        return
    plan = joining(config.cluster(), coordinator_address, num_processes, process_id, timeout)
    if plan is None:
        return
    if compiler.default_device.cache_info().currsize:
        raise IsthmusError(
            'isthmus.distributed.initialize: this process has used "jax" already, and its devices are those of one '
            "host; call initialize() before the first tensor"
        )
    # XLA's CPU client has collectives across processes only if one of these is chosen; other platforms ignore it.
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    # Where JAX finds the others by itself, SIGTERM may announce that the machine will be taken away, and JAX listens.
    with endings.without_preemption_service() if plan else contextlib.nullcontext():
        try:
            jax.distributed.initialize(**plan, initialization_timeout=int(timeout))
        except ValueError as error:
            if plan:
                raise
            raise IsthmusError(
                f"isthmus.distributed.initialize: {', '.join(config.cluster())} in the environment names a launcher of "
                f"several processes, but JAX cannot tell from it where they meet ({error})\n"
                f"  to go on     initialize(coordinator_address='host:port', num_processes=..., process_id=...)"
            ) from error
    endings.watch(lambda words: None)


def joining(
    environment: Mapping[str, str],
    address: str | None,
    count: int | None,
    rank: int | None,
    timeout: float,
) -> dict[str, Any] | None:
    """Return what ``jax.distributed.initialize`` is called with, or None for a single process."""
    if address is not None:
        return {"coordinator_address": address, "num_processes": count, "process_id": rank}
    if {"RANK", "WORLD_SIZE", "MASTER_ADDR"} <= environment.keys():
        rank, count = int(environment["RANK"]), int(environment["WORLD_SIZE"])
        if count == 1:
            return None
        address = _agreed(environment["MASTER_ADDR"], rank, timeout)
        return {"coordinator_address": address, "num_processes": count, "process_id": rank}
    if not {"RANK", "WORLD_SIZE", "MASTER_ADDR"} & environment.keys() and environment:
        return {}  # JAX knows the others; on a TPU virtual machine it asks the metadata server as well
    if count is not None or rank is not None:
        raise ValueError(
            "isthmus.distributed.initialize: num_processes and process_id need coordinator_address"
        )
    return None


def _agreed(host: str, rank: int, timeout: float) -> str:
    """Return the address that rank 0 chose, which torchrun's store tells the others."""
    from torch.distributed.rendezvous import rendezvous

    store, _, _ = next(iter(rendezvous("env://", timeout=timedelta(seconds=timeout))))
    if rank == 0:
        with socket.socket() as free:
            free.bind(("", 0))
            store.set(_ADDRESS, f"{host}:{free.getsockname()[1]}")
    return str(store.get(_ADDRESS).decode())
