"""Modules of ``torch.jit``: saved with their weights, and loaded to the device.

torch's C++ reads and writes the memory behind a storage, and a "jax" storage has none. So parameters and buffers are
put on the CPU while a module is saved, and back after, and a module is loaded on the CPU and then moved. What cannot
be moved, a constant in the code or an attribute that is no buffer, is refused: a file without it is worth nothing.
"""

from __future__ import annotations

import functools
import io
import os
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from isthmus._device.torch_glue import patches
from isthmus._device.torch_glue.private import in_cpp, scripted_tensors
from isthmus._graph.private import storage_id
from isthmus._runtime import files


def install_loading() -> None:
    """Let ``torch.jit.load`` put a module on the device."""
    patches.replace("torch.jit", "load", _loader)


def install_saving() -> None:
    """Let modules with tensors of the device be saved."""
    # A traced module is a ScriptModule, a scripted one a RecursiveScriptModule, which has methods of its own.
    for owner in ("torch.jit._script.RecursiveScriptModule", "torch.jit._script.ScriptModule"):
        patches.replace(owner, "save_to_buffer", _saver_to_buffer)
        patches.replace(owner, "save", _saver)


def _saver_to_buffer(theirs: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(theirs)
    def save_to_buffer(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not _is_ours(self):
            return theirs(self, *args, **kwargs)
        with _on_cpu(self):
            data = theirs(self, *args, **kwargs)
        _check(data)
        return data

    return save_to_buffer


def _saver(theirs: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(theirs)
    def save(self: Any, f: Any, **kwargs: Any) -> Any:
        if not _is_ours(self):
            return theirs(self, f, **kwargs)
        files.write(os.fspath(f), self.save_to_buffer(**kwargs))
        return None

    return save


def _loader(theirs: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(theirs)
    def load(f: Any, map_location: Any = None, *args: Any, **kwargs: Any) -> Any:
        if map_location is None or torch.device(map_location).type != "jax":
            return theirs(f, map_location, *args, **kwargs)
        module = theirs(f, "cpu", *args, **kwargs)
        for owner, name, tensor in list(_tensors(module)):
            owner.setattr(name, _moved(tensor, torch.device(map_location)))
        return module

    return load


def _is_ours(module: Any) -> bool:
    return any(tensor.device.type == "jax" for _, _, tensor in _tensors(module))


def _tensors(module: Any) -> Iterator[tuple[Any, str, Tensor]]:
    """Yield the parameters and buffers of a module, each with what holds it and its name there."""
    for part in module.modules():
        inner = in_cpp(part)
        if inner is None:
            continue
        yield from (
            (inner, name, tensor) for name, tensor in scripted_tensors(inner) if isinstance(tensor, Tensor)
        )


def _moved(tensor: Tensor, device: torch.device) -> Tensor:
    there = tensor.detach().to(device)
    if isinstance(tensor, torch.nn.Parameter):
        return torch.nn.Parameter(there, tensor.requires_grad)
    return there.requires_grad_(tensor.requires_grad)


@contextmanager
def _on_cpu(module: Any) -> Iterator[None]:
    """Put what a module holds on the CPU inside this block; tensors that are one stay one."""
    before = [entry for entry in _tensors(module) if entry[2].device.type == "jax"]
    copies: dict[Any, Tensor] = {}
    try:
        for owner, name, tensor in before:
            key = (storage_id(tensor), tensor.storage_offset(), tensor.shape, tensor.stride())
            if key not in copies:
                copies[key] = _moved(tensor, torch.device("cpu"))
            owner.setattr(name, copies[key])
        yield
    finally:
        for owner, name, tensor in before:
            owner.setattr(name, tensor)


def _check(data: bytes) -> None:
    """Raise if a saved module names tensors that were still on the device."""
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        # Examples of a traced module's inputs, which nothing needs, are in a third.
        pickles = [name for name in archive.namelist() if name.endswith(("/data.pkl", "/constants.pkl"))]
        if any(b"jax:" in archive.read(name) for name in pickles):
            raise RuntimeError(
                "torch.jit.save: the module holds a tensor on device 'jax' that is neither a parameter nor a buffer "
                "(an attribute, or a constant of a traced function), which torch cannot write; make it a buffer, or "
                "move the module to the CPU before it is scripted or traced"
            )
