"""Every patch of torch, JAX and Python, in one table: what is replaced, when, in which versions, and why so.

``replace`` is the only function of the package that puts something else where torch or JAX keeps a name of its own, and
it refuses what has no row here. The modules that know the replacement call it:

    patches.replace("torch.Tensor", "data_ptr", lambda theirs: ...)

People who only have Isthmus installed get the rows ``IMPORT`` and no others; those are names that torch itself reaches
without a tensor of the device, and each either fails or ends the process without its row. The rest waits for the first
tensor on "jax" (``TENSOR``), the first graph of the backend (``COMPILE``), the first process group (``GROUP``),
the first mesh (``MESH``), or a call (``CALL``, taken back at its end).

A name that this torch does not have is skipped, and what its reason says is then not so, and nothing else. ``skipped``
keeps these for ``isthmus doctor``, unless the row is ``optional``: not every supported version has that name.
Loading this file loads neither torch nor JAX.
"""

from __future__ import annotations

import importlib
import inspect
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

IMPORT = "import"
TENSOR = "tensor"
COMPILE = "compile"
GROUP = "group"
MESH = "mesh"
CALL = "call"


@dataclass(frozen=True)
class Patch:
    """A name of torch's or JAX's that Isthmus replaces, or a registry of theirs that it adds to."""

    owner: str
    name: str
    when: str
    reason: str
    optional: bool = False
    """Whether some supported version lacks the name, so that its absence is no fault."""
    adds: bool = False
    """Whether the name is a registry of theirs whose entries change, while the name stays what it is."""
    versions: str = "every supported version"
    """Which versions have the name, or need the patch."""

    def __str__(self) -> str:
        return f"{self.owner}.{self.name}"


_ACCELERATOR = (
    "_accelerator_isAllocatorInitialized", "_accelerator_emptyCache", "_accelerator_emptyHostCache",
    "_accelerator_getDeviceStats", "_accelerator_resetAccumulatedStats", "_accelerator_resetPeakStats",
    "_accelerator_getMemoryInfo", "_accelerator_getDeviceCapability", "_accelerator_synchronizeDevice",
)  # fmt: skip
_MEASURED = ("nbytes", "__len__", "data_ptr")
_COPIED = ("cpu", "clone", "copy_", "resize_", "fill_", "__setitem__", "_set_from_file", "_swap_data_ptr_")
_READ = ("__getitem__", "__iter__", "tolist", "_write_file", "_byteswap")
_SHARED = ("is_shared", "share_memory_", "_share_fd_cpu_", "_share_filename_cpu_")

TABLE: tuple[Patch, ...] = (
    *(
        Patch(
            "torch._C",
            name,
            IMPORT,
            "torch.accelerator is this device as soon as it is registered, and asks here for an allocator and streams "
            "that a device in Python cannot have: an internal assert fails, or the process ends",
            optional=True,
            versions="torch 2.13 has them all; older ones lack some",
        )
        for name in _ACCELERATOR
    ),
    Patch(
        "torch.Tensor",
        "pin_memory",
        IMPORT,
        "a DataLoader pins CPU tensors wherever there is an accelerator, and torch asks this one, in C++, for memory",
    ),
    Patch(
        "torch.UntypedStorage",
        "__new__",
        IMPORT,
        "torch.UntypedStorage(8, device='jax') reads through a null pointer and ends the process; torch.load gets here",
    ),
    Patch(
        "torch",
        "Generator",
        IMPORT,
        "torch.Generator(device='jax') asks C++ for a generator that Python cannot provide, and may be the first use "
        "of the device",
    ),
    Patch(
        "torch._library.opaque_object",
        "_OPAQUE_TYPES",
        IMPORT,
        "Dynamo treats a generator of the device as one of torch's own",
        optional=True,
        adds=True,
        versions="torch 2.13 and later",
    ),
    Patch(
        "torch.jit",
        "load",
        IMPORT,
        "map_location='jax' reads a file into memory that is not there, and may be the first use of the device",
    ),
    *(
        Patch(
            f"torch.jit._script.{owner}",
            name,
            TENSOR,
            "torch's C++ writes the memory behind a storage, and a 'jax' storage has none: the file had no weights",
        )
        for owner in ("RecursiveScriptModule", "ScriptModule")
        for name in ("save_to_buffer", "save")
    ),
    *(
        Patch(
            "torch.UntypedStorage",
            name,
            TENSOR,
            "torch keeps no memory behind a 'jax' storage: what its methods read or write is in its buffer",
        )
        for name in (*_MEASURED, *_COPIED, *_READ)
    ),
    *(
        Patch(
            "torch.UntypedStorage",
            name,
            TENSOR,
            "a 'jax' storage cannot be shared between processes, and torch would share what is not there",
        )
        for name in _SHARED
    ),
    Patch(
        "torch.autograd.variable.Variable",
        "_execution_engine",
        TENSOR,
        "an exception in a hook must be taken from torch while it unwinds, or the process ends; this raises it again",
    ),
    Patch(
        "torch.Tensor",
        "data_ptr",
        TENSOR,
        "torch says 0 for every 'jax' tensor; safetensors and others tell tensors that share memory by it",
    ),
    Patch("torch.Tensor", "__dlpack__", TENSOR, "torch would hand out a null pointer as memory of the device"),
    Patch("torch.Tensor", "__dlpack_device__", TENSOR, "torch names no DLPack device for 'jax'"),
    Patch(
        "torch._tensor_str",
        "_tensor_str",
        TENSOR,
        "torch prints element by element, a program and a transfer each, on devices it does not know to be remote",
    ),
    Patch(
        "torch.nn.attention.flex_attention",
        "_validate_device",
        TENSOR,
        "torch names the devices that flex_attention serves inside a function",
    ),
    Patch(
        "torch._higher_order_ops.flex_attention",
        "py_impl",
        TENSOR,
        "torch has no kernel of flex_attention for autocast on this device, and a library cannot register one",
        adds=True,
    ),
    Patch(
        "torch._TorchCompileInductorWrapper",
        "__call__",
        TENSOR,
        "torch.compile(model) names no backend, and TorchInductor has no code generator for the device",
    ),
    Patch(
        "torch._inductor.compile_fx",
        "compile_fx",
        TENSOR,  # or as soon after as something imports the module
        "libraries whose backends change a graph hand it to TorchInductor, which has no code generator for the device",
    ),
    *(
        Patch(
            owner,
            "__torch_dispatch__",
            TENSOR,
            "linear is one op on this device; who counts or chooses by ops looks for the products that it is elsewhere",
        )
        for owner in (
            "torch.utils.checkpoint._CachingTorchDispatchMode",
            "torch.utils.checkpoint._CachedTorchDispatchMode",
            "torch.utils.flop_counter._FlopCounterMode",
        )
    ),
    Patch(
        "torch.utils.flop_counter",
        "register_flop_formula",
        TENSOR,
        "torch has no formula for the one op that attention is on a device from outside, which has CUDA's",
        adds=True,
    ),
    *(
        Patch(
            "torch.autograd.profiler.profile",
            name,
            TENSOR,
            "torch's profiler asks C++ what devices do, where a device in Python has nothing to register",
        )
        for name in ("_start_trace", "__exit__", "_parse_kineto_results")
    ),
    Patch(
        "torch._dynamo.variables.optimizer.OptimizerVariable",
        "_set_capturable",
        COMPILE,
        "an optimizer in a compiled function keeps its step counts on the device, as on CUDA",
        optional=True,
        versions="torch up to 2.13",
    ),
    Patch(
        "torch._dynamo.variables.optimizer.OptimizerVariable",
        "_safe_to_set_capturable",
        COMPILE,
        "an optimizer in a compiled function keeps its step counts on the device, as on CUDA",
        optional=True,
        versions="torch 2.14 and later",
    ),
    Patch(
        "torch._dynamo.codegen.PyCodegen",
        "make_call_generated_code",
        COMPILE,
        "the code that Dynamo writes around a graph of this backend marks its call for no profiler",
    ),
    Patch(
        "torch._dynamo.graph_bytecode_inputs",
        "index_to_bytecode_constructor",
        COMPILE,
        "the code that Dynamo writes around a graph looks up a stream at every call; where nothing names it, the entry "
        "is removed (_dynamo/private.py, spare_call)",
        adds=True,
        versions="a dict up to torch 2.14, a list since",
    ),
    Patch(
        "torch._dynamo.backends.registry",
        "_COMPILER_FNS",
        COMPILE,
        "threads that look this backend up at once each register it, and torch refuses all but the first",
    ),
    *(
        Patch(
            "torch.nn.parallel.distributed.DistributedDataParallel",
            name,
            GROUP,
            "torch's reducer notes unused parameters in pinned memory, for which a device in Python has no allocator",
        )
        for name in ("_ddp_init_helper", "_set_static_graph", "_post_forward")
    ),
    Patch(
        "torch.nn.parallel.distributed.DistributedDataParallel",
        "_check_comm_hook",
        GROUP,
        "torch lets no communication hook of bfloat16 in where there is no NCCL",
    ),
    Patch(
        "torch.distributed.distributed_c10d",
        "_maybe_attach_flight_recorder",
        GROUP,
        "the flight recorder asks a group for the name of its backend in C++, and a group in Python has none",
        optional=True,
        versions="torch 2.15 and later",
    ),
    Patch(
        "torch.distributed.distributed_c10d",
        "_get_split_source",
        GROUP,
        "new_group of torch 2.15 hands the default group's backend to C++ to be split, and one in Python is refused",
    ),
    *(
        Patch(
            f"torch.distributed.checkpoint.{owner}",
            name,
            MESH,
            "torch's planner lets one process alone read a plain tensor, and reading a split one is a collective",
        )
        for owner, name in (
            ("state_dict_saver", "DefaultSavePlanner"),
            ("state_dict_loader", "DefaultLoadPlanner"),
        )
    ),
    Patch(
        "torch.nn.Module",
        "__init__",
        CALL,
        "isthmus.jit has to know which modules a function makes itself, and torch has no hook for a new module",
    ),
    Patch(
        "torch.autograd.Function",
        "apply",
        CALL,
        "while JAX transforms torch code, a custom function's gradient is the one its backward defines",
    ),
    Patch(
        "jax.tree_util",
        "register_pytree_node",
        CALL,
        "JAX learns the containers that torch's pytrees know and a function returned, such as those of transformers",
        adds=True,
    ),
    Patch(
        "signal",
        "default_int_handler",
        TENSOR,
        "a Ctrl-C that Python handles while torch's C++ asks for the type of the device would end the process",
    ),
    Patch(
        "multiprocessing.reduction.ForkingPickler",
        "register",
        TENSOR,
        "a 'jax' storage sent to another process is refused; torch would send what is not there, or wait for ever",
        adds=True,
    ),
)  # fmt: skip

_rows = {(row.owner, row.name): row for row in TABLE}
_lock = threading.RLock()


@dataclass
class _Applied:
    owner: Any
    theirs: Any
    ours: Any
    inherited: bool


_applied: dict[Patch, _Applied] = {}
skipped: dict[Patch, str] = {}
"""Rows that could not be applied, and why."""


def row(owner: str, name: str) -> Patch:
    """Return the row of a name, or raise: a patch without a row is a mistake in this package."""
    if (owner, name) not in _rows:
        raise KeyError(
            f"{owner}.{name} has no row in isthmus._device.torch_glue.patches.TABLE: add one, with its reason"
        )
    return _rows[owner, name]


def replace(owner: str, name: str, make: Callable[[Any], Any]) -> None:
    """Put ``make(theirs)`` where torch keeps ``owner.name``; a second call does nothing, a missing name is skipped."""
    patch = row(owner, name)
    with _lock:
        # Under the lock, since two threads may make the first tensor.
        if patch in _applied:
            return
        try:
            place = object_at(owner)
            # Statically: a descriptor would be bound, and ``restore`` could not put it back.
            theirs = inspect.getattr_static(place, name)
            ours = make(theirs)
        except (AttributeError, ImportError) as error:
            if not patch.optional:
                skipped[patch] = str(error)
            return
        inherited = name not in vars(place)
        setattr(place, name, ours)
        # What a class makes of it, as it turns a function called __new__ into a static method.
        _applied[patch] = _Applied(place, theirs, inspect.getattr_static(place, name), inherited)
        skipped.pop(patch, None)


def restore(owner: str, name: str) -> None:
    """Put back what ``replace`` replaced, unless a third party has put something else there since."""
    with _lock:
        was = _applied.pop(row(owner, name), None)
        if was is None or inspect.getattr_static(was.owner, name, None) is not was.ours:
            return
        if was.inherited:
            delattr(was.owner, name)
        else:
            setattr(was.owner, name, was.theirs)


def register(owner: str, name: str, *args: Any) -> Any:
    """Call a registry of theirs that has a row, which keeps what it is given for the whole process; return its result.

    None where this version has no such registry.
    """
    patch = row(owner, name)
    assert patch.adds
    try:
        registry = getattr(object_at(owner), name)
    except (AttributeError, ImportError) as error:
        skipped[patch] = str(error)
        return None
    return registry(*args)


def applied(when: str | None = None) -> list[Patch]:
    """Return the rows in force, of all times or one."""
    return [patch for patch in TABLE if patch in _applied and when in (None, patch.when)]


def report() -> list[str]:
    """Return lines for people: how many patches are in force since when, and each that was skipped, with the reason."""
    since = {
        IMPORT: "import torch",
        TENSOR: "the first tensor",
        COMPILE: "the first graph",
        GROUP: "a process group",
        MESH: "a mesh",
        CALL: "a call",
    }
    counts = [f"{len(applied(when))} since {name}" for when, name in since.items() if applied(when)]
    lines = [", ".join(counts) or "none"]
    lines += [f"skipped {patch}: {error} ({patch.reason})" for patch, error in skipped.items()]
    return lines


def object_at(path: str) -> Any:
    """Return the module or class of a dotted name."""
    first, *rest = path.split(".")
    place, name = importlib.import_module(first), first
    for part in rest:
        name = f"{name}.{part}"
        place = getattr(place, part) if hasattr(place, part) else importlib.import_module(name)
    return place
