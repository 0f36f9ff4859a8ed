"""safetensors: ``load_file(path, device="jax")`` and ``safe_open(path, "pt", device="jax")``.

The file is read by Rust, which knows the devices by name and refuses others. Here it reads on the CPU, and each tensor
moves as it is asked for, so that a file larger than the host's memory still loads tensor by tensor.
"""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch


def opening(module: ModuleType) -> None:
    """Let ``safe_open`` take the device."""
    theirs: Callable[..., Any] = module.safe_open
    if isinstance(theirs, type) and issubclass(theirs, _Opened):
        return

    class safe_open(_Opened):
        def __new__(
            cls, filename: Any, framework: Any, device: Any = "cpu", *args: Any, **options: Any
        ) -> Any:
            if not _is_ours(device):
                return theirs(filename, framework, device, *args, **options)
            return super().__new__(cls)

        def __init__(
            self, filename: Any, framework: Any, device: Any = "cpu", *args: Any, **options: Any
        ) -> None:
            self._file, self._device = (
                theirs(filename, framework, "cpu", *args, **options),
                torch.device(device),
            )

    safe_open.__doc__, safe_open.__qualname__ = theirs.__doc__, "safe_open"
    module.safe_open = safe_open  # type: ignore[attr-defined]


def _is_ours(device: Any) -> bool:
    return str(device).partition(":")[0] == "jax"


class _Opened:
    """A file open on the CPU whose tensors are handed out on the device."""

    _file: Any
    _device: torch.device

    def __enter__(self) -> _Opened:
        self._file.__enter__()
        return self

    def __exit__(self, *error: Any) -> Any:
        return self._file.__exit__(*error)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)

    def get_tensor(self, name: str) -> torch.Tensor:
        """Return a tensor of the file."""
        return self._file.get_tensor(name).to(self._device)  # type: ignore[no-any-return]

    def get_tensors(self) -> dict[str, torch.Tensor]:
        """Return every tensor of the file."""
        return {name: tensor.to(self._device) for name, tensor in self._file.get_tensors().items()}

    def get_slice(self, name: str) -> _Slice:
        """Return a tensor of the file, to be read in part."""
        return _Slice(self._file.get_slice(name), self._device)


class _Slice:
    def __init__(self, part: Any, device: torch.device) -> None:
        self._part, self._device = part, device

    def __getitem__(self, index: Any) -> torch.Tensor:
        return self._part[index].to(self._device)  # type: ignore[no-any-return]

    def __getattr__(self, name: str) -> Any:
        return getattr(self._part, name)


def takes() -> str:
    """Return the type of the device that tensors are loaded to where "jax" is asked for."""
    import safetensors

    opened = safetensors.safe_open
    return "jax" if isinstance(opened, type) and issubclass(opened, _Opened) else "cpu"
