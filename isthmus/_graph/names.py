"""Overloads by name: one this torch does not have becomes a ``Missing``, never an import error."""

from __future__ import annotations

from typing import Any, ClassVar

import torch

from isthmus._graph.private import OpOverload


class Missing:
    """The name of an overload that this version of torch does not have."""

    found: ClassVar[dict[str, Missing]] = {}

    def __init__(self, name: str) -> None:
        self.name = name
        Missing.found[name] = self

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

    def __getattr__(self, overload: str) -> OpOverload | Missing:
        packet = getattr(getattr(torch.ops, self._namespace), self._name, None)
        op = getattr(packet, overload, None) if packet is not None else None
        return op if isinstance(op, OpOverload) else Missing(f"{self._namespace}.{self._name}.{overload}")


class _Namespace:
    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, packet: str) -> Any:
        return _Packet(self._name, packet)


def overload_named(name: str) -> OpOverload | Missing:
    """Return the overload that torch's dispatcher calls ``name``, such as ``aten::add.Tensor`` or ``aten::silu``."""
    namespace, _, rest = name.partition("::")
    packet, _, overload = rest.partition(".")
    return getattr(_Packet(namespace, packet), overload or "default")  # type: ignore[no-any-return]


aten: Any = _Namespace("aten")
"""``aten.add.Tensor`` is torch's overload, or a ``Missing`` that carries the name."""

prims: Any = _Namespace("prims")
"""The same for the primitive ops that torch's decompositions end in."""
