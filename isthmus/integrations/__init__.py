"""What makes libraries find the device: one table of changes, each applied when its library is imported.

accelerate, transformers and their like look for devices by name, in fixed lists, and take the CPU when none of those is
there. ``TABLE`` says for each library which name Isthmus changes, in which release that was checked, and what upstream
would have to say instead. ``watch`` has each change made when the module that it is for has run
(``_after_import.py``), so ``import torch`` loads nothing of it. A changed function asks ``offered`` at each call and is
the library's own wherever the answer is no:

    ISTHMUS_LIBRARIES=on python train.py        # Accelerator() and Trainer(...) take "jax"

``isthmus.config.libraries``: with "auto" the device is offered where JAX has an accelerator and torch has none of its
own. JAX on a CPU is slower than torch there in eager mode, so it is offered by "on" alone. With "off", read when a
library is imported, nothing is changed.

What can go wrong: a new release of a library has other names. The change is then left out with a warning, the library
works as it would without Isthmus, and ``isthmus doctor`` says so.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import entry_points
from types import ModuleType

import _isthmus_autoload
from isthmus import _after_import, _upstream, config
from isthmus.errors import first_line


@dataclass(frozen=True)
class Change:
    """A name of a library's that Isthmus changes after the import of its module."""

    library: str
    module: str
    name: str
    function: str
    """The function of ``isthmus.integrations.<library>`` that makes the change; it takes the module."""
    checked: str
    """The release of the library that the change was checked with."""
    reason: str
    upstream: str
    """What the library would have to say itself for the change to be needless."""


TABLE: tuple[Change, ...] = (
    Change(
        "accelerate",
        "accelerate.state",
        "PartialState.default_device",
        "default_device",
        "1.15.0",
        "the list of devices ends with the CPU",
        "before the last `else`: `elif torch.accelerator.is_available(): "
        "return torch.accelerator.current_accelerator()`",
    ),
    Change(
        "accelerate",
        "accelerate.checkpointing",
        "save_accelerator_state, load_accelerator_state",
        "random_states",
        "1.15.0",
        "the random state of the device is neither saved nor restored",
        "`torch.get_device_module(device).get_rng_state_all()` for `PartialState().device`, whatever its type",
    ),
    Change(
        "accelerate",
        "accelerate.utils.dataclasses",
        "DynamoBackend",
        "dynamo_backend",
        "1.15.0",
        'the backends of torch.compile are an enumeration without "isthmus"',
        "accept every name in `torch.compiler.list_backends(exclude_tags=())`",
    ),
    Change(
        "accelerate",
        "accelerate.utils.modeling",
        "get_max_memory",
        "max_memory",
        "1.15.0",
        'device_map="auto" counts the memory of devices it knows by name',
        "`torch.accelerator.device_count()` and `torch.accelerator.get_memory_info(i)` in the last branch",
    ),
    Change(
        "transformers",
        "transformers.training_args",
        "TrainingArguments._setup_devices, is_torch_bf16_gpu_available",
        "training_arguments",
        "5.22.2",
        "the Trainer has a list of devices of its own beside accelerate's, and refuses bf16=True for others",
        "return `self.distributed_state.device` where the list ends; bf16 is supported where "
        "`torch.amp.is_autocast_available(device.type)` says so",
    ),
    Change(
        "transformers",
        "transformers.trainer",
        "Trainer._save_rng_state, Trainer._load_rng_state",
        "random_states",
        "5.22.2",
        "a checkpoint has no random state of the device",
        "`torch.get_device_module(self.args.device)` in place of a branch for each device",
    ),
    Change(
        "transformers",
        "transformers.pipelines.base",
        "Pipeline.__init__",
        "pipeline",
        "5.22.2",
        "an index of a device means the CPU where none of the listed devices is there",
        "`torch.device(device)`, which is the index of `torch.accelerator`'s device",
    ),
    Change(
        "sentence_transformers",
        "sentence_transformers.util.environment",
        "get_device_name",
        "device_name",
        "6.2.0",
        "the list of devices ends with the CPU",
        "before the last `return`: the type of `torch.accelerator.current_accelerator()` where there is one",
    ),
    *(
        Change(
            "safetensors",
            module,
            "safe_open",
            "opening",
            "0.8.0",
            "Rust code refuses a device whose name it does not know, though it is the one asked for",
            "hand a name that is not listed to `torch.Tensor.to`",
        )
        for module in ("safetensors", "safetensors.torch")
    ),
    Change(
        "stable_baselines3",
        "stable_baselines3.common.utils",
        "get_device",
        "device",
        "2.9.2",
        '"auto" means CUDA or the CPU',
        '"auto" means `torch.accelerator.current_accelerator()` where there is one',
    ),
    Change(
        "fastai",
        "fastai.torch_core",
        "default_device",
        "default_device",
        "2.8.12",
        "the list of devices ends with the CPU",
        "before the last `return`: the type of `torch.accelerator.current_accelerator()` where there is one",
    ),
    Change(
        "pykeops",
        "pykeops.common.keops_io.LoadKeOps",
        "LoadKeOps.genred",
        "reduction",
        "2.3",
        "C++ code is handed addresses, which tensors of this device do not have: the process ends",
        "refuse tensors that are neither on the CPU nor on CUDA, or compute on copies of them",
    ),
    *(
        change
        for package in ("lightning.pytorch", "pytorch_lightning", "lightning.fabric", "lightning_fabric")
        for change in (
            Change(
                "lightning",
                f"{package}.accelerators",
                "AcceleratorRegistry" if "pytorch" in package else "ACCELERATOR_REGISTRY",
                "accelerators",
                "2.6.6",
                "accelerators are registered by code alone: packages cannot offer one",
                "load accelerators from an entry point, as callbacks are",
            ),
            Change(
                "lightning",
                f"{package}.trainer.connectors.accelerator_connector"
                if "pytorch" in package
                else f"{package}.connector",
                "_choose_auto_accelerator, _choose_strategy, _check_and_init_precision",
                "connector",
                "2.6.6",
                "a registered accelerator gets the CPU's strategy and CUDA's autocast",
                "take `self._parallel_devices[0]` and its type where the name of the accelerator is not listed",
            ),
        )
    ),
)
"""Every change, by library."""

failed: dict[str, str] = {}
"""Why a change could not be made, by the name it is for; ``isthmus doctor`` prints them."""


def offered() -> bool:
    """Return whether a library that looks for a device is to find "jax" now.

    Example:
        >>> import isthmus
        >>> isthmus.config.libraries = "on"
        >>> isthmus.integrations.offered()
        True
        >>> isthmus.config.libraries = "auto"
    """
    if config.current.libraries == "on":
        return True
    return config.current.libraries == "auto" and _isthmus_autoload.rival() is None and has_accelerator()


@functools.cache
def has_accelerator() -> bool:
    """Return whether JAX has a GPU or TPU; JAX is not loaded where none of its plug-ins is installed."""
    plugged = entry_points(group="jax_plugins") or importlib.util.find_spec("libtpu")
    if not plugged and importlib.util.find_spec("jax_plugins") is None:
        return False
    try:
        import jax

        return bool(jax.local_devices()[0].platform != "cpu")
    except Exception:  # a JAX that cannot start is the device's fault to report, when it is asked for
        return False


LIBRARIES = {
    "accelerate": ("accelerate",),
    "transformers": ("transformers",),
    "sentence_transformers": ("sentence-transformers",),
    "safetensors": ("safetensors",),
    "stable_baselines3": ("stable-baselines3",),
    "fastai": ("fastai",),
    "pykeops": ("pykeops",),
    "lightning": ("lightning", "pytorch-lightning", "lightning-fabric"),
}
"""The packages that hold the modules of each library of the table, the likeliest first."""


def installed(library: str) -> str | None:
    """Return the version of a library, or None."""
    return next(filter(None, map(_upstream.installed_version, LIBRARIES[library])), None)


def checked(library: str) -> str:
    """Return the release of a library that its changes were checked with."""
    return next(change.checked for change in TABLE if change.library == library)


def report() -> Iterator[tuple[str, str]]:
    """Yield for each installed library what ``isthmus doctor`` says of it: it is imported and asked for its device."""
    for library in LIBRARIES:
        found = installed(library)
        if found is None:
            continue
        tried = "" if found == checked(library) else f" (checked with {checked(library)})"
        try:
            taken = importlib.import_module(f"isthmus.integrations.{library}").takes()
        except (
            Exception
        ) as error:  # a broken library is its own fault, and no reason to call Isthmus unhealthy
            yield library, f"{found}{tried}: did not say: {_why(error)}"
            continue
        lost = [name for name in failed if any(c.name == name and c.library == library for c in TABLE)]
        advice = f"; {ADVICE[config.current.libraries]}" if taken == "cpu" and not lost else ""
        yield library, f"{found}{tried}: takes {taken!r}{advice}"
        for name in lost:
            yield library, f"{name} is not changed: {failed[name]}"


def _why(error: BaseException) -> str:
    """Return what failed when a library was imported, in the words of the first error where others came of it."""
    while error.__cause__ is not None:
        error = error.__cause__
    said = f"{type(error).__name__}: {first_line(str(error))}"
    if "operator torchvision::" in said:
        said += "; to fix it: install torchvision from where torch came from (docs/getting-started.md)"
    return said


ADVICE = {
    "auto": "JAX has no GPU or TPU here, or torch has its own; ISTHMUS_LIBRARIES=on gives it 'jax' all the same",
    "off": "ISTHMUS_LIBRARIES=off; with auto or on it can take 'jax'",
    "on": "import torch, or isthmus, before it",
}
"""What a user can do about a library that takes the CPU, by the setting."""


def _make(change: Change, module: ModuleType) -> None:
    if config.current.libraries == "off":
        return
    try:
        ours = importlib.import_module(f"isthmus.integrations.{change.library}")
        getattr(ours, change.function)(module)
    except Exception as error:  # the library must work as it would without us
        failed[change.name] = f"{type(error).__name__}: {first_line(str(error))}"
        warnings.warn(
            f"{change.library} {installed(change.library)} was left as it is: {change.name} could not be changed "
            f"({failed[change.name]}); Isthmus was checked with {change.library} {change.checked}",
            stacklevel=2,
        )


@functools.cache
def watch() -> None:
    """Wait for the libraries of the table, and change those that are imported already; a second call does nothing."""
    for change in TABLE:
        _after_import.call(change.module, functools.partial(_make, change))
