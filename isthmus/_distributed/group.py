"""The c10d backend "jax": what ``torch.distributed`` calls for tensors on this device, and for CPU tensors beside them.

``init_process_group()`` or ``init_process_group("jax")`` calls ``create`` (through ``_isthmus_autoload.py``, so that
JAX is not loaded before), which joins JAX's processes (``start.py``) and returns a ``JaxGroup``. torch's own code,
DDP's C++ reducer among it, calls the methods of ``ProcessGroup`` on it: how they run is in ``rank_group.py``.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from isthmus._device.torch_glue import patches, registration
from isthmus._distributed import compiled_collectives, dtensor_strategies, start, unused_parameters
from isthmus._distributed.exchanges import Exchanges
from isthmus._distributed.gathers import Gathers
from isthmus._distributed.messages import Messages
from isthmus._distributed.rank_group import collective
from isthmus._distributed.reductions import Reductions


class JaxGroup(Reductions, Gathers, Exchanges, Messages):
    """A group of ranks, one device each."""

    @collective
    def barrier(self, opts: Any = None) -> Any:
        """Wait until every rank is here; the decorator sends it to gloo, as it has no tensor."""


def create(options: Any) -> JaxGroup:
    """Return the group that torch asks for; all its ranks call this at the same time."""
    ranks = list(options.global_ranks_in_group)
    if not ranks:  # torch lists no ranks for the group of all of them, which comes first
        ranks = list(range(options.group_size))
        start.join(options.store, options.group_rank, options.group_size, options.timeout)
    registration.load()
    compiled_collectives.install()
    dtensor_strategies.install()
    unused_parameters.install()
    for name in ("_maybe_attach_flight_recorder", "_get_split_source"):
        patches.replace("torch.distributed.distributed_c10d", name, _unless_ours)
    patches.replace(unused_parameters.DDP, "_check_comm_hook", _with_hooks_of_bfloat16)
    return JaxGroup(options.store, options.group_rank, ranks, options.timeout)


def _unless_ours(theirs: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function of torch's on groups, which does nothing and returns None for those of this backend."""

    def ours(group: Any, *args: Any, **kwargs: Any) -> Any:
        return None if isinstance(group, JaxGroup) else theirs(group, *args, **kwargs)

    return ours


def _with_hooks_of_bfloat16(theirs: Callable[..., Any]) -> Callable[..., Any]:
    """Return DDP's check of a communication hook without its look for NCCL: XLA reduces bfloat16 everywhere."""

    def check(self: Any, hook: Any) -> None:
        if unused_parameters.is_ours(self) and hook.__name__.startswith("bf16_compress"):
            checked = functools.wraps(hook)(lambda *args: hook(*args))
            checked.__name__ = "hook"  # torch knows those hooks by their names
            hook = checked
        theirs(self, hook)

    return check
