"""Hands the recorder to the device."""

from __future__ import annotations

from isthmus._device.core import mode
from isthmus._lazy.eager_ranges import finisher
from isthmus._lazy.node_builder import recording_entry
from isthmus._lazy.programs import materialise
from isthmus._lazy.trace import trace


def install() -> None:
    """Let the device record ops in lazy mode."""
    mode.current.materialise = materialise
    mode.current.hold = trace.hold
    mode.current.recording_entry = recording_entry
    mode.current.finisher = finisher
