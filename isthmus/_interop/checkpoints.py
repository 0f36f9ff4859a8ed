"""``isthmus.checkpoint.save`` and ``load``: the state of torch programs in orbax checkpoints, which JAX programs share.

torch's dotted names become nested dicts, as Flax has them, and keys that are numbers become strings::

    state_dict   {"0.weight": w, "0.bias": b}
    checkpoint   {"0": {"weight": w, "bias": b}}

``save`` goes state -> ``to_tree`` -> orbax. The folder is written beside its place, sealed with checksums, and swapped
with the old one (``_runtime/files.py``, ``_runtime/checksums.py``), so that no crash leaves a broken checkpoint.

``load`` goes orbax -> ``_fill``. The tree in the file has lost what orbax cannot store: dotted names, integer keys,
tuples, which tensors are tied, tensors without elements. The target, which has all of them, is the template
(``_flat``, ``_complete``, ``_like``). Everything is read and checked before the target is changed.

Arrays are numpy arrays between orbax and torch, never ``jax.Array``s: those would lose int64 while JAX's 64-bit types
are off.
"""

from __future__ import annotations

import contextlib
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

from isthmus._device.core.buffer import Buffer, Signature, buffer_of, set_buffer, wrap
from isthmus._interop.arrays import from_jax, to_jax
from isthmus._runtime import checksums, files, placement, processes
from isthmus._runtime.host_arrays import from_numpy
from isthmus.errors import DamagedFile, IsthmusError, first_line

_MARKERS = ("_CHECKPOINT_METADATA", "_METADATA", checksums.LIST)
"""Files that only a checkpoint has: orbax writes the first two, Isthmus the last."""
_LEAVES = (bool, int, float, str, np.ndarray, jax.Array)


def save(path: str | os.PathLike[str], state: Any, *, force: bool = False) -> None:
    """Write state as an orbax checkpoint, a folder that orbax reads without Isthmus.

    Arguments:
        path: the folder. On other file systems (``gs://...``) orbax writes it alone, without the guarantees below.
        state: tensors, arrays, numbers and strings in dicts and lists. Modules, optimizers and other objects with a
            ``state_dict`` may stand for it anywhere. Tied tensors of one dict are written once, under their first name.
        force: replace a checkpoint at ``path``; without it, one that is there is an error.

    The folder gets its name when it is complete and on the disk, and until then the old one keeps it: a full disk or a
    killed process loses nothing. It has checksums, which ``load`` checks.

    Example:
        >>> import tempfile, torch, isthmus
        >>> path = tempfile.mkdtemp() + "/step-1"
        >>> isthmus.checkpoint.save(path, {"weights": torch.ones(2, device="jax"), "step": 1})
        >>> isthmus.checkpoint.load(path)["step"]
        1
    """
    tree, folder = to_tree(state), _folder(path)
    if "://" in folder:
        # Object stores cannot rename a folder: orbax replaces it.
        _write(folder, tree, force)
        return
    target = Path(folder)

    def begin() -> str:
        _check_free(files.whole(target), force)
        target.parent.mkdir(parents=True, exist_ok=True)
        return str(staged.enter_context(files.staging(target)) / "new")

    def finish() -> str:
        # The mode of the folder that is replaced.
        if target.exists():
            shutil.copymode(target, new)
        checksums.seal(new)
        _check_free(target, force)  # again: another process may have written here in the meantime
        files.swap(new, target)
        return ""

    # The folder is written beside its place and exchanged: by the first process, of those that share a mesh.
    with contextlib.ExitStack() as staged:
        new = Path(processes.by_first(begin))
        processes.agree(
            new.parent.is_dir(),
            f"isthmus.checkpoint.save: {target.parent} is not the same folder in every process",
        )
        _write(str(new), tree, False)
        processes.by_first(finish)


def load(path: str | os.PathLike[str], into: Any = None) -> Any:
    """Read an orbax checkpoint, fill ``into`` from it, and return the rest.

    Arguments:
        path: the folder.
        into: an object with ``load_state_dict``, a tensor, or a dict of these by their names in the checkpoint. It is
            filled after everything was read and checked.

    Returns:
        The part of the checkpoint that ``into`` did not take, as a nested dict with tensors on "jax".

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
    if not any((folder / name).exists() for name in _MARKERS):
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
    """Return a path as orbax requires it: absolute, or a URL of another file system."""
    folder = os.fspath(path)
    return folder if "://" in folder else str(Path(folder).resolve())


def _checkpointer(orbax: Any) -> Any:
    """Return what reads and writes: in all processes of a mesh together, else in this one, whatever others do."""
    alone = jax.process_count() > 1 and not processes.are_one()
    own = jax.process_index()
    # The prefix keeps the barriers of one process apart from those of another.
    options = (
        orbax.options.MultiprocessingOptions(
            primary_host=own, active_processes={own}, barrier_sync_key_prefix=f"isthmus{own}"
        )
        if alone
        else orbax.options.MultiprocessingOptions()
    )
    return orbax.Checkpointer(
        orbax.PyTreeCheckpointHandler(multiprocessing_options=options), multiprocessing_options=options
    )


def _write(folder: str, tree: Any, force: bool) -> None:
    orbax = _orbax()
    # orbax leaves numbers, strings and host arrays to process 0, and would write a folder without them.
    if jax.process_index() and not processes.are_one():
        raise IsthmusError(
            f"isthmus.checkpoint.save in process {jax.process_index()} of {jax.process_count()}, which has tensors of "
            f"its own: orbax writes those of process 0 alone\n"
            f"  to go on     call it in rank 0 only, or torch.distributed.checkpoint.save in every rank"
        )
    with _checkpointer(orbax) as checkpointer:
        checkpointer.save(folder, args=orbax.args.PyTreeSave(tree), force=force)


def _read(folder: str) -> Any:
    """Return the tree of a checkpoint, after its checksums were verified."""
    orbax = _orbax()
    if "://" in folder:
        return _restored(orbax, folder)
    target = Path(folder)
    # Another process may swap the folder while it is read: then reading starts again.
    # The identity of the folder tells whether it was replaced meanwhile.
    return files.steadily(lambda: _verified(orbax, target), lambda: files.identity(files.whole(target)))


def _verified(orbax: Any, target: Path) -> Any:
    folder = files.whole(target)
    version = files.identity(folder)
    if version is None:
        raise FileNotFoundError(errno.ENOENT, "isthmus.checkpoint.load: there is no checkpoint", str(target))
    checksums.verify(folder, target)
    try:
        tree = _restored(orbax, str(folder))
        if files.identity(files.whole(target)) != version:
            raise IsthmusError(f"{target} was replaced after its checksums were read")
        return tree
    except (OSError, MemoryError):
        raise
    except Exception as error:
        if not folder.is_dir() or not any((folder / name).exists() for name in _MARKERS):
            raise IsthmusError(f"isthmus.checkpoint.load: {target} is no orbax checkpoint") from error
        reason = f"orbax cannot read it: {type(error).__name__}: {first_line(str(error))}"
        raise DamagedFile(target, "the checkpoint", reason, "load another one") from error


def _restored(orbax: Any, folder: str) -> Any:
    """Return the tree that orbax reads, with arrays as numpy arrays, wherever they were when they were written."""
    with _checkpointer(orbax) as checkpointer:
        # The metadata has the tree without its arrays.
        metadata = checkpointer.metadata(folder).item_metadata.tree
        restore_args = jax.tree.map(lambda leaf: _restore_args(orbax, leaf), metadata)
        return checkpointer.restore(folder, args=orbax.args.PyTreeRestore(restore_args=restore_args))


def _restore_args(orbax: Any, leaf: Any) -> Any:
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
        items = [to_tree(value, f"{where}.{n}") for n, value in enumerate(state)]
        return type(state)(*items) if hasattr(state, "_fields") else items
    if isinstance(state, Tensor):
        tensor = state.detach()
        # Through to_jax, since numpy has no bfloat16 of its own and torch refuses to convert it.
        array = to_jax(tensor if tensor.device.type == "jax" else tensor.cpu())
        # Of an array that is split over a mesh every process writes the parts that it has.
        return array if placement.sharding_of(array) is not None else np.asarray(array)
    if isinstance(state, np.generic):
        return np.asarray(state)
    if not jax.tree_util.all_leaves([state]):
        return jax.tree.map(lambda leaf: to_tree(leaf, where), state)
    if not isinstance(state, _LEAVES):
        raise IsthmusError(
            f"isthmus.checkpoint.save: {where} is a {type(state).__name__}; a checkpoint holds tensors, arrays, "
            f"numbers and strings, in dicts and lists"
        )
    return state


def _nested(state: Mapping[Any, Any], where: str) -> dict[str, Any]:
    """Return a dict as nested dicts; tied tensors are in it once, and tensors without elements not at all."""
    values, seen = {}, set()
    for name, value in state.items():
        if isinstance(value, Tensor):
            # orbax refuses arrays without elements.
            # Tied tensors are written once.
            if not value.numel() or _memory_of(value) in seen:
                continue
            seen.add(_memory_of(value))
        values[name] = to_tree(value, f"{where}.{name}")
    return nest(values)


def nest(flat: Mapping[Any, Any]) -> dict[str, Any]:
    """Return a dict with dotted names as nested dicts: ``{"a.b": 1}`` becomes ``{"a": {"b": 1}}``."""
    tree: dict[str, Any] = {}
    for name, value in flat.items():
        *parts, last = str(name).split(".")
        inner: Any = tree
        for part in parts:
            inner = inner.setdefault(part, {})
            if not isinstance(inner, dict):
                break
        if not isinstance(inner, dict) or last in inner:
            raise IsthmusError(f"isthmus.checkpoint: {name} is the name of two things")
        inner[last] = value
    return tree


def _memory_of(tensor: Tensor) -> Any:
    """Return a key that is equal for tied tensors: the same elements of the same memory."""
    return tensor.device, tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype


def _fill(tree: Any, into: Any, where: str) -> dict[str, Any]:
    """Put a tree into an object with ``load_state_dict``, a tensor or a dict of them; return the rest of the tree."""
    if isinstance(into, Tensor):
        _copy(tree, into, where)
        return {}
    if not isinstance(tree, Mapping):
        raise IsthmusError(
            f"isthmus.checkpoint.load: {where} is a {type(tree).__name__} in the checkpoint, not a dict"
        )
    if hasattr(into, "load_state_dict"):
        template = into.state_dict()
        # What ``save`` left out is taken from the target, or filled from the other names of a tied tensor.
        into.load_state_dict(_like(_complete(_flat(tree, template), template), template))
        if isinstance(into, torch.optim.Optimizer):
            follow_parameters(into)
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


def follow_parameters(optimizer: torch.optim.Optimizer) -> None:
    """Split an optimizer's state as its parameters are; ``load_state_dict`` leaves it whole on every device."""
    if placement.home is None:
        return
    for parameter, state in optimizer.state.items():
        if parameter.device.type != "jax":
            continue
        its = buffer_of(parameter).signature
        for value in state.values():
            if isinstance(value, Tensor) and value.device.type == "jax" and value.shape == parameter.shape:
                buffer = buffer_of(value)
                if buffer.signature.shape == its.shape and buffer.signature.sharding is not its.sharding:
                    moved = placement.move(buffer.value, its.sharding)
                    set_buffer(value, Buffer(moved, Signature.of(moved)))


def _copy(value: Any, into: Tensor, where: str) -> None:
    if np.shape(value) != tuple(into.shape):  # copy_ would broadcast
        raise IsthmusError(
            f"isthmus.checkpoint.load: {where} is {np.shape(value)} in the checkpoint and {tuple(into.shape)} here"
        )
    with torch.no_grad():
        into.copy_(_tensor(np.asarray(value), into))


def _flat(tree: Mapping[str, Any], names: Any, prefix: str = "") -> dict[str, Any]:
    """Return a nested dict with dotted names; a dict whose own name is in ``names`` stays a value."""
    # Only at the top; inner calls get the set of names as it is.
    names = names if prefix else {str(name) for name in names}
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        name = f"{prefix}{key}"
        if isinstance(value, Mapping) and value and name not in names:
            flat |= _flat(value, names, f"{name}.")
        else:
            flat[name] = value
    return flat


def _complete(flat: dict[str, Any], template: Mapping[Any, Any]) -> dict[str, Any]:
    """Add the tensors that ``save`` left out: those without elements, and the other names of tied ones."""
    tied: dict[Any, list[str]] = {}
    for name, like in template.items():
        if isinstance(like, Tensor) and like.numel():
            tied.setdefault(_memory_of(like), []).append(str(name))
        elif isinstance(like, Tensor):
            flat.setdefault(str(name), np.asarray(to_jax(like.detach().cpu())))
    for names in tied.values():
        saved = [name for name in names if name in flat]
        for name in names if saved else ():
            # A checkpoint that another program wrote may have all names, with values that differ.
            if not _equal_bits(flat.setdefault(name, flat[saved[0]]), flat[saved[0]]):
                raise IsthmusError(
                    f"isthmus.checkpoint.load: {saved[0]} and {name} are one tensor here and differ in the checkpoint"
                )
    return flat


def _equal_bits(a: Any, b: Any) -> bool:
    a, b = np.asarray(a), np.asarray(b)
    return a is b or (a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes())


def _like(value: Any, template: Any) -> Any:
    """Return a value of a checkpoint with the types of ``template``: tensors, tuples, keys that are numbers."""
    if isinstance(value, Mapping):
        # The template knows which keys were numbers and which containers were tuples.
        return _dict_like(value, template if isinstance(template, Mapping) else {})
    if isinstance(value, list):
        inner = template if isinstance(template, (list, tuple)) else ()
        items = [_like(v, inner[n] if n < len(inner) else None) for n, v in enumerate(value)]
        return tuple(items) if isinstance(template, tuple) else items
    if not isinstance(value, np.ndarray):
        return value
    if isinstance(template, (bool, int, float)):
        # ``lr`` and its like come back as Python numbers.
        return value.item()
    # A scalar without a template is an optimizer's step count before its first step, which torch keeps on the CPU.
    device = template.device if isinstance(template, Tensor) else ("jax" if value.ndim else "cpu")
    return _tensor(value, template).to(device)


def _tensor(value: np.ndarray[Any, Any], like: Any) -> Tensor:
    """Return an array of a checkpoint as a "jax" tensor, split over the mesh as ``like`` is if it is a tensor."""
    if placement.home is None or not isinstance(like, Tensor) or like.device.type != "jax":
        return from_jax(value)  # type: ignore[no-any-return]
    signature = buffer_of(like).signature
    fits = (
        signature.shape == value.shape and like.is_contiguous() and signature.sharding is not placement.OPEN
    )
    return wrap(from_numpy(value, signature.sharding if fits else None), like.dtype)


def _dict_like(value: Mapping[str, Any], template: Mapping[Any, Any]) -> Any:
    """Return a dict of a checkpoint with the keys and the class of ``template``."""
    keys = {str(key): key for key in template}
    items = {keys.get(k, k): _like(v, template.get(keys.get(k, k))) for k, v in value.items()}
    # The state of a torch optimizer has integer keys, and one that has made no step has none to compare with.
    if {"state", "param_groups"} <= items.keys():
        items["state"] = {int(k) if str(k).isdigit() else k: v for k, v in items["state"].items()}
    if type(template) in (dict, OrderedDict) or not template:
        return items
    # A subclass of dict may have attributes beside its items, so a copy of it is filled.
    out: Any = copy.copy(template)
    out.clear()
    out.update(items)
    return out
