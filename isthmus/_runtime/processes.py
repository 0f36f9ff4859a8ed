"""What the processes that run one program do together: the first of them acts, and all of them learn how it went.

Processes are one program where tensors live on a mesh across them (``placement.home``). Ranks of ``torch.distributed``
are not: each has tensors of its own, and acts alone. Each call here is a collective, which every process must make.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import numpy as np

from isthmus._runtime import placement
from isthmus.errors import IsthmusError

# Every process must offer as many bytes: those of a path, or of an error.
_BYTES = 4096


def are_one() -> bool:
    """Return whether there are other processes, and one program over all of them."""
    return placement.home is not None and jax.process_count() > 1


def by_first(act: Callable[[], str]) -> str:
    """Return what ``act`` returns in the first process; where it raises there, every process raises."""
    if not are_one():
        return act()
    from jax.experimental import multihost_utils

    failure: Exception | None = None
    said = ""
    if jax.process_index() == 0:
        try:
            said = f"+{act()}"
        except Exception as error:  # raised below, once the others know of it
            failure, said = error, f"-{type(error).__name__}: {error}"
    data = np.zeros(_BYTES, np.uint8)
    text = said.encode()[:_BYTES]
    data[: len(text)] = np.frombuffer(text, np.uint8)
    told = bytes(multihost_utils.broadcast_one_to_all(data)).rstrip(b"\0").decode(errors="replace")
    if failure is not None:
        raise failure
    if told[:1] == "-":
        raise IsthmusError(f"the first process failed: {told[1:]}")
    return told[1:]


def agree(holds: bool, otherwise: str) -> None:
    """Raise in every process unless ``holds`` is true in all of them."""
    if are_one():
        from jax.experimental import multihost_utils

        holds = bool(np.asarray(multihost_utils.process_allgather(np.array(holds))).all())
    if not holds:
        raise IsthmusError(otherwise)
