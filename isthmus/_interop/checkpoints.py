"""State of torch programs as the nested pytrees that JAX programs read and write with orbax, and back.

torch's dotted names become nested dicts, and keys that are numbers become strings: ``{"0.weight": w}`` is
``{"0": {"weight": w}}``.
"""

from __future__ import annotations

import copy
import errno
import importlib
import os
import shutil
from collections import OrderedDict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
import torch
from torch import Tensor

from isthmus._interop.arrays import from_jax, to_jax
from isthmus._runtime import checksums, files
from isthmus.errors import DamagedFile, IsthmusError, first_line

_MARKS = ("_CHECKPOINT_METADATA", "_METADATA", checksums.LIST)
"""What tells a checkpoint from other folders: orbax writes the first two, Isthmus the last."""
_PLAIN = (bool, int, float, str, np.ndarray, jax.Array)


def save(path: str | os.PathLike[str], state: Any, *, force: bool = False) -> None:
    """Write state as an orbax checkpoint: a folder that plain orbax reads.

    The folder gets its name when it is whole and on the disk, and until then the old one keeps it: a full disk or a
    killed process loses nothing. It has checksums, which ``load`` checks.

    Arguments:
        path: the folder.
        state: dicts and lists of tensors, arrays, numbers and strings; a module, an optimizer or any other object with
            a ``state_dict`` may stand for it. Tied tensors of one dict are written once, under their first name.
        force: whether to replace a checkpoint that is there.

    Example:
        >>> import tempfile, torch, isthmus
        >>> model, path = torch.nn.Linear(2, 1).to("jax"), tempfile.mkdtemp() + "/step-100"
        >>> isthmus.checkpoint.save(path, {"model": model, "step": 100})
        >>> isthmus.checkpoint.load(path, {"model": model})["step"]
        100
    """
    tree, folder = to_tree(state), _folder(path)
    if "://" in folder or jax.process_count() > 1:
        # Nothing is renamed there, or not by one process alone: orbax itself replaces what is there.
        _write(folder, tree, force)
        return
    target = Path(folder)
    _check_free(files.whole(target), force)
    target.parent.mkdir(parents=True, exist_ok=True)
    with files.staging(target) as stage:
        new = stage / "new"
        _write(str(new), tree, False)
        if target.exists():
            shutil.copymode(target, new)
        checksums.seal(new)
        _check_free(target, force)  # again: this took a while
        files.swap(new, target)


def load(path: str | os.PathLike[str], into: Any = None) -> Any:
    """Read an orbax checkpoint.

    Arguments:
        path: the folder.
        into: an object with ``load_state_dict``, a tensor, or a dict of these by their names in the checkpoint. They
            are filled after everything was read and checked.

    Returns:
        The rest of the checkpoint, with arrays as tensors on "jax".

    Example:
        >>> import tempfile, torch, isthmus
        >>> path = tempfile.mkdtemp() + "/state"
        >>> isthmus.checkpoint.save(path, {"x": torch.arange(3.0), "name": "run 1"})
        >>> state = isthmus.checkpoint.load(path)
        >>> state["x"].tolist(), state["name"]
        ([0.0, 1.0, 2.0], 'run 1')
    """
    tree = _read(_folder(path))
    return from_jax(tree if into is None else _fill(tree, into, "the checkpoint"))


def _check_free(folder: Path, force: bool) -> None:
    """Raise unless a checkpoint may be put at a path: nothing is there, or a checkpoint that may be replaced."""
    if not os.path.lexists(folder) or (folder.is_dir() and not any(folder.iterdir())):
        return
    if not force:
        raise ValueError(
            f"isthmus.checkpoint.save: {folder} already exists; force=True replaces a checkpoint"
        )
    if not any((folder / name).exists() for name in _MARKS):
        raise IsthmusError(
            f"isthmus.checkpoint.save: {folder} is no checkpoint, and is not replaced\n"
            f"  to go on     name another folder, or remove this one yourself"
        )


def _orbax() -> Any:
    try:
        return importlib.import_module("orbax.checkpoint")
    except ImportError as error:
        raise ImportError("isthmus.checkpoint needs orbax: pip install orbax-checkpoint") from error


def _folder(path: str | os.PathLike[str]) -> str:
    """Return a path as orbax wants it, absolute; addresses of other file systems are."""
    given = os.fspath(path)
    return given if "://" in given else str(Path(given).resolve())


def _write(folder: str, tree: Any, force: bool) -> None:
    orbax = _orbax()
    with orbax.Checkpointer(orbax.PyTreeCheckpointHandler()) as checkpointer:
        checkpointer.save(folder, args=orbax.args.PyTreeSave(tree), force=force)


def _read(folder: str) -> Any:
    """Return a checkpoint as it was written, if it is as it was written."""
    orbax = _orbax()
    if "://" in folder:
        return _restored(orbax, folder)
    target = Path(folder)
    return files.steadily(lambda: _verified(orbax, target), lambda: files.identity(files.whole(target)))


def _verified(orbax: Any, target: Path) -> Any:
    folder = files.whole(target)
    version = files.identity(folder)
    if version is None:
        raise FileNotFoundError(errno.ENOENT, "isthmus.checkpoint.load: there is no checkpoint", str(target))
    checksums.verify(folder, target)
    try:
        found = _restored(orbax, str(folder))
        if files.identity(files.whole(target)) != version:
            raise IsthmusError(f"{target} was replaced after its checksums were read")
        return found
    except (OSError, MemoryError):
        raise
    except Exception as error:
        if not folder.is_dir() or not any((folder / name).exists() for name in _MARKS):
            raise IsthmusError(f"isthmus.checkpoint.load: {target} is no orbax checkpoint") from error
        reason = f"orbax cannot read it: {type(error).__name__}: {first_line(str(error))}"
        raise DamagedFile(target, "the checkpoint", reason, "load another one") from error


def _restored(orbax: Any, folder: str) -> Any:
    """Return what orbax reads, with arrays on the host, wherever they were."""
    with orbax.Checkpointer(orbax.PyTreeCheckpointHandler()) as checkpointer:
        described = checkpointer.metadata(folder).item_metadata.tree
        kinds = jax.tree.map(lambda leaf: _restored_as(orbax, leaf), described)
        return checkpointer.restore(folder, args=orbax.args.PyTreeRestore(restore_args=kinds))


def _restored_as(orbax: Any, leaf: Any) -> Any:
    # Only arrays of JAX have a sharding; numbers and strings come back as themselves.
    is_array = getattr(leaf, "sharding", None) is not None
    return orbax.RestoreArgs(restore_type=np.ndarray) if is_array else orbax.RestoreArgs()


def to_tree(state: Any, where: str = "the state") -> Any:
    """Return state as a nested pytree of arrays on the host, numbers and strings."""
    if hasattr(state, "state_dict"):
        state = state.state_dict()
    if isinstance(state, Mapping):
        return _nested(state, where)
    if isinstance(state, (list, tuple)):
        found = [to_tree(value, f"{where}.{n}") for n, value in enumerate(state)]
        return type(state)(*found) if hasattr(state, "_fields") else found
    if isinstance(state, Tensor):
        there = state.detach()
        return np.asarray(to_jax(there if there.device.type == "jax" else there.cpu()))
    if isinstance(state, np.generic):
        return np.asarray(state)
    if not jax.tree_util.all_leaves([state]):
        return jax.tree.map(lambda leaf: to_tree(leaf, where), state)
    if not isinstance(state, _PLAIN):
        raise IsthmusError(
            f"isthmus.checkpoint.save: {where} is a {type(state).__name__}; a checkpoint holds tensors, arrays, "
            f"numbers and strings, in dicts and lists"
        )
    return state


def _nested(state: Mapping[Any, Any], where: str) -> dict[str, Any]:
    """Return a dict as dicts in dicts; tied tensors are there once, those without elements not at all."""
    kept, seen = {}, set()
    for name, value in state.items():
        if isinstance(value, Tensor):
            if not value.numel() or _place(value) in seen:
                continue
            seen.add(_place(value))
        kept[name] = to_tree(value, f"{where}.{name}")
    return nest(kept)


def nest(flat: Mapping[Any, Any]) -> dict[str, Any]:
    """Return a dict with dotted names as dicts in dicts."""
    found: dict[str, Any] = {}
    for name, value in flat.items():
        *parts, last = str(name).split(".")
        inner: Any = found
        for part in parts:
            inner = inner.setdefault(part, {})
            if not isinstance(inner, dict):
                break
        if not isinstance(inner, dict) or last in inner:
            raise IsthmusError(f"isthmus.checkpoint: {name} is the name of two things")
        inner[last] = value
    return found


def _place(tensor: Tensor) -> Any:
    """Return what tensors that are the same memory have in common."""
    return tensor.device, tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype


def _fill(tree: Any, into: Any, where: str) -> dict[str, Any]:
    """Put a tree into something and return what was not asked for."""
    if isinstance(into, Tensor):
        _copy(tree, into, where)
        return {}
    if not isinstance(tree, Mapping):
        raise IsthmusError(
            f"isthmus.checkpoint.load: {where} is a {type(tree).__name__} in the checkpoint, not a dict"
        )
    if hasattr(into, "load_state_dict"):
        template = into.state_dict()
        into.load_state_dict(_like(_complete(_flat(tree, template), template), template))
        return {}
    if not isinstance(into, Mapping):
        raise TypeError(
            f"isthmus.checkpoint.load: {where} is a {type(into).__name__}, which nothing can be loaded into"
        )
    flat = _complete(_flat(tree, into), into)
    missing = [str(name) for name in into if str(name) not in flat]
    if missing:
        raise KeyError(
            f"isthmus.checkpoint.load: {where} has no {', '.join(missing)}; it has {', '.join(tree)}"
        )
    rests = {
        str(name): _fill(flat.pop(str(name)), target, f"{where}.{name}") for name, target in into.items()
    }
    return nest({**flat, **{name: rest for name, rest in rests.items() if rest}})


def _copy(value: Any, into: Tensor, where: str) -> None:
    if np.shape(value) != tuple(into.shape):  # copy_ would broadcast
        raise IsthmusError(
            f"isthmus.checkpoint.load: {where} is {np.shape(value)} in the checkpoint and {tuple(into.shape)} here"
        )
    with torch.no_grad():
        into.copy_(from_jax(np.asarray(value)))


def _flat(tree: Mapping[str, Any], names: Any, prefix: str = "") -> dict[str, Any]:
    """Return a nested dict with dotted names; what ``names`` has is kept whole."""
    whole = names if prefix else {str(name) for name in names}
    found: dict[str, Any] = {}
    for key, value in tree.items():
        name = f"{prefix}{key}"
        if isinstance(value, Mapping) and value and name not in whole:
            found |= _flat(value, whole, f"{name}.")
        else:
            found[name] = value
    return found


def _complete(flat: dict[str, Any], template: Mapping[Any, Any]) -> dict[str, Any]:
    """Add the tensors that are not written, those without elements and the other names of tied ones."""
    tied: dict[Any, list[str]] = {}
    for name, like in template.items():
        if isinstance(like, Tensor) and like.numel():
            tied.setdefault(_place(like), []).append(str(name))
        elif isinstance(like, Tensor):
            flat.setdefault(str(name), np.asarray(to_jax(like.detach().cpu())))
    for names in tied.values():
        there = [name for name in names if name in flat]
        for name in names if there else ():
            if not _same(flat.setdefault(name, flat[there[0]]), flat[there[0]]):
                raise IsthmusError(
                    f"isthmus.checkpoint.load: {there[0]} and {name} are one tensor here and differ in the checkpoint"
                )
    return flat


def _same(a: Any, b: Any) -> bool:
    a, b = np.asarray(a), np.asarray(b)
    return a is b or (a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes())


def _like(value: Any, template: Any) -> Any:
    """Return a value that was read as what it was when it was written: tensors, tuples, keys that are numbers."""
    if isinstance(value, Mapping):
        return _dict_like(value, template if isinstance(template, Mapping) else {})
    if isinstance(value, list):
        inner = template if isinstance(template, (list, tuple)) else ()
        found = [_like(v, inner[n] if n < len(inner) else None) for n, v in enumerate(value)]
        return tuple(found) if isinstance(template, tuple) else found
    if not isinstance(value, np.ndarray):
        return value
    if isinstance(template, (bool, int, float)):
        return value.item()
    # What has no place yet and one element is an optimizer's count of steps, which torch keeps on the CPU.
    device = template.device if isinstance(template, Tensor) else ("jax" if value.ndim else "cpu")
    return from_jax(value).to(device)


def _dict_like(value: Mapping[str, Any], template: Mapping[Any, Any]) -> Any:
    keys = {str(key): key for key in template}
    found = {keys.get(k, k): _like(v, template.get(keys.get(k, k))) for k, v in value.items()}
    if {
        "state",
        "param_groups",
    } <= found.keys():  # of an optimizer that has not made a step: nobody knows its keys
        found["state"] = {int(k) if str(k).isdigit() else k: v for k, v in found["state"].items()}
    if type(template) in (dict, OrderedDict) or not template:
        return found
    made = copy.copy(template)
    made.clear()  # type: ignore[attr-defined]
    made.update(found)  # type: ignore[attr-defined]
    return made
