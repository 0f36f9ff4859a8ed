"""Which tier answers an op, and the file and line of its lowering: ``isthmus where``, ``isthmus ops``, docs/ops.md."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from isthmus._device.core import decompose
from isthmus._device.kernels import register
from isthmus._device.torch_glue import registration
from isthmus._device.torch_glue.private import has_kernel, op_names
from isthmus._graph.private import OpOverload
from isthmus._graph.schema import functional_of, mutating_of, schema_of
from isthmus._ops.registry import place_of_function, registry
from isthmus._runtime.user_frames import Place

# Importing kernels registers them, and torch then never asks for the rest of the device: its patches, autocast.
registration.load()
_OPS = Path(__file__).parent / "_ops"
_RUNS_ON_CPU = (
    "CPU",
    "CompositeImplicitAutograd",
    "CompositeExplicitAutograd",
    "CompositeExplicitAutogradNonFunctional",
)
# The tiers that run an op, from the fastest to the slowest.
TIERS = ("lowered", "device", "view", "composite", "decomposed", "cpu")
LOWERED, DEVICE, VIEW, COMPOSITE, DECOMPOSED, CPU = TIERS


@dataclass(frozen=True)
class Answer:
    """How one overload runs on the device."""

    op: OpOverload
    tier: str
    place: Place | None
    """The line a reader should open."""
    through: OpOverload


def answer(op: OpOverload) -> Answer:
    """Return which tier runs ``op`` and where its code is."""
    functional = functional_of(op) or op
    own = register._own.get(op.name().removeprefix("aten::"))
    if own is not None:
        return Answer(op, DEVICE, place_of_function(own), op)
    if functional in registry:
        return Answer(op, LOWERED, _place_of_lowering(functional), functional)
    if schema_of(op).returns_aliases:
        return Answer(op, VIEW, None, op)
    if _is_composite(op):
        return Answer(op, COMPOSITE, None, op)
    if decompose.function_for(functional) is not None:
        return Answer(op, DECOMPOSED, None, functional)
    return Answer(op, CPU, None, op)


def _is_composite(op: OpOverload) -> bool:
    # Some functional forms merely allocate and call their out= form: that is the op itself, not a composite.
    wraps_out = any(has_kernel(other, "CPU") for other in mutating_of(op))
    explicit = has_kernel(op, "CompositeExplicitAutograd") and not wraps_out
    return explicit or has_kernel(op, "CompositeImplicitAutograd")


def overloads(name: str) -> list[OpOverload]:
    """Return the overloads that a name may stand for: ``softmax``, ``aten::add.Tensor``, ``torch.ops.mylib.myop``."""
    parts = name.replace("::", ".").removeprefix("torch.ops.").removeprefix("torch.").split(".")
    known = set(op_names())
    has_namespace = len(parts) > 1 and any(full.startswith(f"{parts[0]}::") for full in known)
    namespace = parts.pop(0) if has_namespace else "aten"
    packets = [parts[0]] if len(parts) > 1 or parts[0].startswith("_") else [parts[0], f"_{parts[0]}"]
    candidates = [op for packet in packets for op in _packet(namespace, packet, known)]
    return [op for op in candidates if len(parts) == 1 or (schema_of(op).overload or "default") == parts[1]]


def families() -> dict[str, list[OpOverload]]:
    """Return the lowered overloads by the file that lowers them."""
    by_family: dict[str, list[OpOverload]] = {}
    for op in registry:
        place = _place_of_lowering(op)
        inside = place.path.is_relative_to(_OPS)
        by_family.setdefault(place.path.stem if inside else "elsewhere", []).append(op)
    return {family: sorted(by_family[family], key=str) for family in sorted(by_family)}


def tiers() -> dict[str, list[OpOverload]]:
    """Return every functional ATen overload torch runs on a CPU by the tier that answers it here."""
    by_tier: dict[str, list[OpOverload]] = {}
    known = set(op_names())
    for name in sorted(packet_names("aten")):
        for op in _packet("aten", name, known):
            if not schema_of(op).mutated and any(has_kernel(op, key) for key in _RUNS_ON_CPU):
                by_tier.setdefault(answer(op).tier, []).append(op)
    return by_tier


def packet_names(namespace: str) -> set[str]:
    """Return the name of every op in a namespace."""
    names = [name.split("::") for name in op_names()]
    return {rest.split(".")[0] for space, rest in names if space == namespace}


def _packet(namespace: str, name: str, known: set[str]) -> Iterator[OpOverload]:
    packet = getattr(getattr(torch.ops, namespace), name, None)
    for overload in packet.overloads() if packet is not None else ():
        op = getattr(packet, overload)
        if op.name() in known:
            yield op


def _place_of_lowering(op: OpOverload) -> Place:
    """Return the line that registers ``op``; where that reads a table, the row of the table that names it."""
    place = registry[op].place
    source = place.path.read_text(encoding="utf-8").splitlines() if place.path.is_relative_to(_OPS) else []
    named = [number for number, text in enumerate(source, 1) if re.search(rf"\b{re.escape(str(op))}\b", text)]
    return place if place.line in named or not named else Place(place.file, named[0])
