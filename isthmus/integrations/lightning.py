"""lightning: ``Trainer(accelerator="jax")`` and ``Fabric(accelerator="jax")``, with every precision flag.

Lightning 2.6 has a registry of accelerators and no entry point for it, so ``accelerator="jax"`` is registered when its
package of accelerators has been imported. Its connectors then choose strategy and precision from names of accelerators
that are written there; for "jax" they take the CPU's strategy and CUDA's autocast, which ``connector`` changes. A
Trainer has one device, as it has one process; several are a mesh of devices (docs/mesh.md).
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
from types import ModuleType
from typing import Any

import torch

from isthmus.integrations import offered


def accelerators(module: ModuleType) -> None:
    """Register the accelerator "jax" with the package of accelerators of Lightning or Fabric."""

    class JAXAccelerator(module.Accelerator):  # type: ignore[misc, name-defined]
        """The device "jax": whatever JAX computes on."""

        def setup_device(self, device: torch.device) -> None:
            if device.type != "jax":
                raise ValueError(f"accelerator='jax' was given {device}, which is another device")
            torch.get_device_module("jax").set_device(device)

        def get_device_stats(self, device: Any) -> dict[str, Any]:
            return dict(torch.get_device_module("jax").memory_stats(device))

        def teardown(self) -> None:
            torch.get_device_module("jax").empty_cache()

        @staticmethod
        def parse_devices(devices: Any) -> list[int]:
            """Return the index of the one device: a list or text names an index, a number how many."""
            if isinstance(devices, str):
                listed = [int(part) for part in devices.split(",") if part.strip()]
                devices = listed if "," in devices else listed[0]
            found = list(range(_count())) if devices == -1 else devices
            found = [0] if found == 1 else found
            if not isinstance(found, (list, tuple)) or len(found) != 1:
                raise ValueError(
                    f"accelerator='jax' takes one device, and devices={devices!r} asks for others; "
                    f"isthmus.distributed spreads a model over the devices of a process (docs/mesh.md)"
                )
            if not 0 <= found[0] < _count():
                raise ValueError(f"there is no device jax:{found[0]}; JAX has {_count()}")
            return list(found)

        @staticmethod
        def get_parallel_devices(devices: Any) -> list[torch.device]:
            return [torch.device("jax", index) for index in JAXAccelerator.parse_devices(devices)]

        @staticmethod
        def auto_device_count() -> int:
            return 1

        @staticmethod
        def is_available() -> bool:
            return True

        @staticmethod
        def name() -> str:
            return "jax"

    # Fabric's registry and Lightning's have different names.
    registry = getattr(module, "AcceleratorRegistry", None) or module.ACCELERATOR_REGISTRY
    registry.register("jax", JAXAccelerator, description="JAXAccelerator")
    module.JAXAccelerator = JAXAccelerator  # type: ignore[attr-defined]


def _count() -> int:
    return int(torch.get_device_module("jax").device_count())


def connector(module: ModuleType) -> None:
    """Let a connector choose a strategy and a precision for the device, and the device where it finds only the CPU."""
    connectors = getattr(module, "_AcceleratorConnector", None) or module._Connector
    choose_auto, strategy = connectors._choose_auto_accelerator, connectors._choose_strategy
    precision = connectors._check_and_init_precision

    @functools.wraps(choose_auto)
    def _choose_auto_accelerator() -> str:
        chosen: str = choose_auto()
        return "jax" if chosen == "cpu" and offered() else chosen

    @functools.wraps(strategy)
    def _choose_strategy(self: Any) -> Any:
        if _is_ours(self) and self._num_nodes_flag == 1:
            return module.SingleDeviceStrategy(device=self._parallel_devices[0])
        return strategy(self)

    @functools.wraps(precision)
    def _check_and_init_precision(self: Any) -> Any:
        flag = getattr(self, "_precision_flag", None) or getattr(self, "_precision_input", None)
        if _is_ours(self) and flag in ("16-mixed", "bf16-mixed"):
            return module.MixedPrecision(flag, "jax")
        return precision(self)

    connectors._choose_auto_accelerator = staticmethod(_choose_auto_accelerator)
    connectors._choose_strategy = _choose_strategy
    connectors._check_and_init_precision = _check_and_init_precision


def _is_ours(connector: Any) -> bool:
    flag = connector._accelerator_flag
    return bool(flag == "jax" or (not isinstance(flag, str) and flag.name() == "jax"))


def takes() -> str:
    """Return what ``accelerator="auto"``, the default of Lightning and Fabric, is."""
    for package in ("lightning", "pytorch_lightning", "lightning_fabric"):
        if importlib.util.find_spec(package) is not None:
            library = importlib.import_module(package)
            chosen = (
                library.Fabric() if hasattr(library, "Fabric") else library.Trainer(logger=False).strategy
            )
            return str(getattr(chosen, "device", None) or chosen.root_device).split(":")[0]
    raise ModuleNotFoundError("lightning")
