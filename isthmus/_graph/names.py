"""Overloads by name: one this torch does not have becomes a ``Missing``, never an import error."""

from __future__ import annotations

from typing import ClassVar

import torch

from isthmus._graph.private import Op, OpOverload


class Missing:
    """The name of an overload that this version of torch does not have."""

    by_name: ClassVar[dict[str, Missing]] = {}

    def __init__(self, name: str) -> None:
        self.name = name
        Missing.by_name[name] = self

    def __repr__(self) -> str:
        return f"Missing({self.name})"

    # Tables by op are read and written under the name alone, whichever access made the object.
    def __eq__(self, other: object) -> bool:
        return isinstance(other, Missing) and other.name == self.name

    def __hash__(self) -> int:
        return hash(self.name)


class _Packet:
    def __init__(self, namespace: str, name: str) -> None:
        self._namespace, self._name = namespace, name

    # Said to be an op, so that tables of ops are typed as such; the registry drops the entries of a ``Missing``.
    def __getattr__(self, overload: str) -> Op:
        packet = getattr(getattr(torch.ops, self._namespace), self._name, None)
        op = getattr(packet, overload, None) if packet is not None else None
        return op if isinstance(op, OpOverload) else Missing(f"{self._namespace}.{self._name}.{overload}")  # type: ignore[return-value]


class _Namespace:
    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, packet: str) -> _Packet:
        return _Packet(self._name, packet)


def overload_named(name: str) -> Op | Missing:
    """Return the overload that torch's dispatcher calls ``name``, such as ``aten::add.Tensor`` or ``aten::silu``."""
    namespace, _, rest = name.partition("::")
    packet, _, overload = rest.partition(".")
    return getattr(_Packet(namespace, packet), overload or "default")  # type: ignore[no-any-return]


aten = _Namespace("aten")
"""``aten.add.Tensor`` is torch's overload, or a ``Missing`` that carries the name."""

prims = _Namespace("prims")
"""The same for the primitive ops that torch's decompositions end in."""
