"""Executables kept on disk, so that a second process starts warm: found by a hash of what XLA is given."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
import pickle
import platform
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
from jax.experimental import serialize_executable

from isthmus import config
from isthmus._runtime import counters


def load(lowered: Any, donate: tuple[int, ...], options: Mapping[str, Any]) -> Any:
    """Return the executable that was saved for this program, or None."""
    path = _path(lowered, donate, options)
    if path is None or not path.exists():
        return None
    try:
        found = serialize_executable.deserialize_and_load(*pickle.loads(path.read_bytes()))
    except Exception:  # a file cut short, or of another build of XLA: compile again and replace it
        with contextlib.suppress(OSError):
            path.unlink()
        return None
    counters.count("loaded from disk")
    return found


def save(compiled: Any, lowered: Any, donate: tuple[int, ...], options: Mapping[str, Any]) -> None:
    """Keep an executable for the next process; one that cannot be kept is not an error."""
    path = _path(lowered, donate, options)
    if path is None:
        return
    try:
        content = pickle.dumps(serialize_executable.serialize(compiled))
        path.parent.mkdir(parents=True, exist_ok=True)
        # Written beside its place and moved there, so that no process ever reads half a file.
        handle, name = tempfile.mkstemp(dir=path.parent)
        with os.fdopen(handle, "wb") as file:
            file.write(content)
        os.replace(name, path)
    except Exception as error:
        counters.count(f"not saved to disk: {type(error).__name__}")


@functools.cache
def _host() -> str:
    """Return what programs for the CPU depend on: the instructions it has."""
    with contextlib.suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next((line for line in lines if line.startswith(("flags", "Features"))), "")
    return f"{platform.machine()} {platform.processor()}"


def _path(lowered: Any, donate: tuple[int, ...], options: Mapping[str, Any]) -> Path | None:
    if not config.cache:
        return None
    device = jax.local_devices()[0]
    version = (jax.__version__, device.device_kind, device.client.platform_version)
    parts = (version, _host(), config.xla_flags(), donate, lowered.in_tree, lowered.out_tree)
    text = f"{parts} {sorted(options.items())} {lowered.as_text()}"
    return Path(config.cache) / hashlib.sha256(text.encode()).hexdigest()
