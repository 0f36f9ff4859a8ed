"""``parallelize_module``: tensor, sequence and expert parallelism by torch's own style objects.

A style says how a module's weights are split and how its inputs and outputs are laid out. Here weights are split where
they are (``shard_``), and layouts are constraints at the module's borders (``redistribute``), so that XLA finds the
collectives that torch's DTensor would run: one all-reduce after a ``ColwiseParallel``, ``RowwiseParallel`` pair::

    parallelize_module(block, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})

Shapes stay global, so model code does not divide numbers of heads by the size of the mesh. ``use_local_output`` means
nothing here.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from fnmatch import fnmatch
from typing import Any, TypeVar

from torch import Tensor, nn
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    PrepareModuleInputOutput,
    PrepareModuleOutput,
    RowwiseParallel,
    SequenceParallel,
)
from torch.distributed.tensor.placement_types import Placement

from isthmus._device.core.buffer import buffer_of
from isthmus._device.torch_glue.private import parameters_of
from isthmus._distributed.fully_shard import ShardingWarning
from isthmus._distributed.mesh import DeviceMesh, check_current
from isthmus._distributed.shown import Part, Shown
from isthmus._distributed.tensors import redistribute, shard_, shardings_by_dim, text_of_axes

Module = TypeVar("Module", bound=nn.Module)
Layout = Placement | None


class ExpertParallel(ParallelStyle):
    """Split every parameter of a module of stacked experts, ``[experts, ...]``, along dim 0.

    Inputs and outputs that are stacked alike are split alike, so that tokens travel to their experts.
    """

    def _apply(self, module: nn.Module, device_mesh: Any) -> nn.Module:
        return _apply(self, "", module, device_mesh)


def parallelize_module(
    module: Module, device_mesh: DeviceMesh, parallelize_plan: ParallelStyle | Mapping[str, ParallelStyle]
) -> Module:
    """Split the weights of a module by a plan; return the module.

    Arguments:
        module: on "jax".
        device_mesh: a dim of the mesh, such as ``mesh["tp"]``.
        parallelize_plan: a style of ``torch.distributed.tensor.parallel``, or a style by name of submodule, in which
            ``*`` stands for any name: ``{"layers.*.up": ColwiseParallel()}``.
    """
    check_current(device_mesh)
    if device_mesh.ndim != 1:
        raise ValueError(f"parallelize_module takes one dim of a mesh, not {device_mesh}: pass mesh[name]")
    if isinstance(parallelize_plan, ParallelStyle):
        _apply(parallelize_plan, "", module, device_mesh)
        return module
    modules = dict(module.named_modules())
    for pattern, style in parallelize_plan.items():
        found = [name for name in modules if _matches(name, pattern)]
        if not found:
            warnings.warn(
                f"parallelize_module: no submodule is called {pattern!r}", UserWarning, stacklevel=2
            )
        for name in found:
            _apply(style, name, modules[name], device_mesh)
    return module


def _matches(name: str, pattern: str) -> bool:
    mine, its = name.split("."), pattern.split(".")
    return len(mine) == len(its) and all(fnmatch(a, b) for a, b in zip(mine, its, strict=True))


def _apply(style: Any, name: str, module: nn.Module, mesh: DeviceMesh) -> nn.Module:
    kind = type(style)
    if kind is ColwiseParallel:
        # nn.Linear's weight is (out, in): dim 0 are the columns of its matrix. An embedding is (tokens, width).
        dims = {"weight": 1} if isinstance(module, nn.Embedding) else {"weight": 0, "bias": 0}
        _split(module, name, mesh, dims)
        _borders(module, mesh, _pairs(style.input_layouts, (Replicate(),)), (style.output_layouts[0],))
    elif kind is RowwiseParallel:
        embeds = isinstance(module, nn.Embedding)
        _split(module, name, mesh, {"weight": 0 if embeds else 1})
        # Token ids are needed whole by every part of the vocabulary; a linear layer takes the part its rows multiply.
        wanted = (Replicate(),) if embeds else (Shard(-1),)
        _borders(module, mesh, _pairs(style.input_layouts, wanted), (style.output_layouts[0],))
    elif kind is SequenceParallel:
        _borders(
            module, mesh, _pairs(style.sequence_sharding, style.sequence_sharding), style.sequence_sharding
        )
    elif kind is PrepareModuleInput:
        _inputs(module, mesh, style)
    elif kind is PrepareModuleOutput:
        _borders(module, mesh, (), style.desired_output_layouts)
    elif kind is PrepareModuleInputOutput:
        _inputs(module, mesh, style.prepare_module_input)
        _borders(module, mesh, (), style.prepare_module_output.desired_output_layouts)
    elif kind is ExpertParallel:
        _split(module, name, mesh, dict.fromkeys(dict(module.named_parameters(recurse=False)), 0))
        for child_name, child in module.named_children():
            _apply(style, f"{name}.{child_name}", child, mesh)
    else:
        raise TypeError(
            f"isthmus.distributed.parallelize_module knows the styles of torch.distributed.tensor.parallel and "
            f"ExpertParallel, not {kind.__name__}: split weights by shard_ and activations by redistribute"
        )
    return module


def _split(module: nn.Module, path: str, mesh: DeviceMesh, dims: Mapping[str, int]) -> None:
    """Split parameters, and their gradients when they come."""
    group: list[Part] = []
    for name, dim in dims.items():
        parameter = parameters_of(module).get(name)
        if parameter is None:
            continue
        buffer_of(parameter)  # raises where it is not on "jax"
        # ``jax.device_put`` refuses a dim that the devices do not divide.
        if parameter.shape[dim] % mesh.size():
            warnings.warn(
                f"parallelize_module: dim {dim} of {path}.{name} {tuple(parameter.shape)} cannot be shared evenly by "
                f"{mesh.size()} devices; the parameter stays replicated",
                ShardingWarning,
                stacklevel=4,
            )
            continue
        shard_(parameter, mesh, [Shard(dim)])
        text = text_of_axes(shardings_by_dim(parameter))
        group.append((module, name, text, text))
    # Whatever the module computes sees the parameters constrained, and so do their gradients.
    Shown(group).install(module)


Pair = tuple[Layout, Layout]
"""How an input arrives, and how the module wants it."""


def _pairs(given: Sequence[Layout], wanted: Sequence[Layout]) -> tuple[Pair, ...]:
    return tuple(zip(given, wanted, strict=True))


def _inputs(module: nn.Module, mesh: DeviceMesh, style: Any) -> None:
    named = {
        key: (style.input_kwarg_layouts.get(key), wanted)
        for key, wanted in style.desired_input_kwarg_layouts.items()
    }
    _borders(module, mesh, _pairs(style.input_layouts or (), style.desired_input_layouts or ()), (), named)


def _borders(
    module: nn.Module,
    mesh: DeviceMesh,
    inputs: Sequence[Pair],
    outputs: Sequence[Layout],
    named: Mapping[str, Pair] | None = None,
) -> None:
    """Lay out what goes into a module and comes out of it."""

    def enter(_: nn.Module, args: Any, kwargs: Any) -> Any:
        laid = [_laid(arg, mesh, *pair) for arg, pair in zip(args, inputs, strict=False)]
        known = {key: _laid(kwargs[key], mesh, *pair) for key, pair in (named or {}).items() if key in kwargs}
        return (*laid, *args[len(laid) :]), {**kwargs, **known}

    def leave(_: nn.Module, args: Any, output: Any) -> Any:
        if isinstance(output, Tensor):
            return _laid(output, mesh, outputs[0], outputs[0])
        laid = [_laid(o, mesh, layout, layout) for o, layout in zip(output, outputs, strict=False)]
        return type(output)([*laid, *output[len(laid) :]])

    if inputs or named:
        module.register_forward_pre_hook(enter, with_kwargs=True)
    if any(layout is not None for layout in outputs):
        module.register_forward_hook(leave)


def _laid(value: Any, mesh: DeviceMesh, given: Layout, wanted: Layout) -> Any:
    """Return an activation as the module wants it; its gradient goes back as the activation came."""
    if not isinstance(value, Tensor) or value.device.type != "jax" or wanted is None:
        return value
    if not value.is_floating_point():
        return value  # token ids are small, and how they are split says how the batch is
    return redistribute(value, mesh, [wanted], gradient=[given or wanted])
