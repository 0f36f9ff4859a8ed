"""``Resharded``: what a buffer holds while its array, gathered from the parts of a parameter, is gone.

``fully_shard`` shows gathered parameters while a module's forward runs. Autograd saves those that backward needs, and
so would keep whole copies of all weights until then. So each gathered buffer gets a ``Resharded`` when forward is over:
it has the parameter's parts alone, and the array is gathered again when backward reads the buffer.

It is a marker (``donation.MARKERS``), as ``Slack`` is: no program takes it for an array, and a read or a write of the
buffer settles it first. The parts are those that forward saw: as long as the marker has them, an optimizer's update of
the parameter is a copy and does not overwrite them.
"""

from __future__ import annotations

from typing import Any

import jax

from isthmus._runtime import counters, placement

Array = jax.Array


class Resharded:
    """The parts of an array, and how the array is split once it is gathered again."""

    __slots__ = ("parts", "sharding")

    def __init__(self, parts: Array, sharding: placement.Sharding) -> None:
        self.parts, self.sharding = parts, sharding

    def exact(self) -> Array:
        """Return the gathered array."""
        counters.count("parameters gathered again")
        return placement.move(self.parts, self.sharding)

    def is_deleted(self) -> bool:
        """Return whether the parts are gone."""
        return bool(self.parts.is_deleted())


def reshard(buffer: Any, gathered: Any, parts: Array) -> None:
    """Drop a buffer's array, to be gathered from ``parts`` when it is next read.

    Nothing happens where the buffer holds another array than ``gathered``: forward has written to it.
    """
    if buffer.held is gathered:
        buffer.held = Resharded(parts, buffer.signature.sharding)
