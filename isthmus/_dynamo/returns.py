"""What a graph returns: arguments, views of them, new storages and views of those, aliased as eager aliases them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from isthmus._device.core.buffer import Signature, maker
from isthmus._device.core.slots import store
from isthmus._device.torch_glue.private import restrided, restriding
from isthmus._device.torch_glue.registration import load
from isthmus._dynamo import dlpack
from isthmus._dynamo.layout import Symbols, root_of
from isthmus._dynamo.saved_tensors import KEEP, Contents, Part, token
from isthmus._graph.layout import Spec, packed_strides

_Wrap = Callable[[list[Any], list[Any]], Any]


@dataclass(frozen=True)
class View:
    """A layout on some storage; ``start`` is counted from where the viewed tensor starts."""

    size: tuple[int, ...]
    stride: tuple[int, ...]
    start: int

    def of(self, tensor: Tensor) -> Tensor:
        """Return this view of a tensor's storage; ``restriding`` is in force."""
        return restrided(tensor, self.size, self.stride, tensor.storage_offset() + self.start)


class Returns:
    """The results of one specialized graph: which arrays its program returns, and the tensors made of them."""

    def __init__(
        self, module: GraphModule, placeholders: Sequence[Node], args: Sequence[Any], symbols: Symbols
    ) -> None:
        (output,) = [node for node in module.graph.nodes if node.op == "output"]
        found = output.args[0]
        self.single = not isinstance(found, (list, tuple))
        self.nodes = [found] if self.single else list(found)
        self.places = {node: at for at, node in enumerate(placeholders)}
        self.symbols = symbols
        # An argument may be laid out otherwise than torch foresaw; a view of it is then computed like anything else.
        self.foreseen = {
            node
            for node, arg in zip(placeholders, args, strict=True)
            if isinstance(arg, Tensor) and symbols.spec(node, tuple(arg.shape)) == Spec.of(arg)
        }
        self.roots: list[Node] = []
        self.specs: list[Spec | Contents] = []
        self.steps: list[_Wrap] = []
        self.has_views = False

    @property
    def count(self) -> int:
        """How many new storages there are."""
        return len(self.specs)

    def arrays(self, values: dict[Node, Any]) -> list[Any]:
        """Return the new storages, given the value of every node; called while the program is traced."""
        self.roots, self.specs, self.steps, self.has_views = [], [], [], False
        stored: list[Any] = []
        for node in self.nodes:
            self.steps.append(self._step(node, values, stored))
        return stored

    def _step(self, node: Any, values: dict[Node, Any], stored: list[Any]) -> _Wrap:
        """Return how one result is made of the arguments and the new tensors."""
        if not isinstance(node, Node):
            return lambda args, fresh: node
        if node.target is KEEP:
            return self._keep(node, values, stored)
        if node.target is torch.ops.aten.copy_.default:
            node = node.args[0]  # what was written there is what the argument now holds
        value = values[node]
        if node in self.places:
            at = self.places[node]
            return lambda args, fresh: args[at]
        if value is None or not isinstance(node.meta.get("val"), Tensor):
            # A size, a number: known since the arguments are.
            return lambda args, fresh: value
        root = root_of(node)
        view = self._view(node, root, values)
        if root in self.foreseen and view is not None:
            at = self.places[root]
            self.has_views = True
            return lambda args, fresh: view.of(args[at])
        if view is None or root in self.places:
            root = node
        index = self._store(root, values[root], stored)
        if root is node or view is None:
            return lambda args, fresh: fresh[index]
        self.has_views = True
        return lambda args, fresh: view.of(fresh[index])

    def _keep(self, node: Node, values: dict[Node, Any], stored: list[Any]) -> _Wrap:
        """Return how the tensor that holds what backward needs is made."""
        nodes: list[Node] = list(node.args[0])  # type: ignore[arg-type]
        views = {each: self._view(each, root_of(each), values) for each in nodes}
        specs: dict[Node, Spec] = {}
        parts: list[Part] = []
        for each, view in views.items():
            root = root_of(each)
            spec = Spec.of(each.meta["val"])
            if view is None or _fits(values[root], [values[n] for n in nodes if root_of(n) is root]):
                root, spec, start = (
                    each,
                    Spec(spec.size, packed_strides(spec.size, spec.stride), spec.dtype),
                    0,
                )
                specs[root] = spec
            else:
                start = view.start
                specs[root] = self.symbols.root_spec(root, tuple(values[root].shape))
            parts.append(Part([*specs].index(root), spec, start))
        arrays = tuple(store(values[root], spec, root.target) for root, spec in specs.items())
        index = len(stored)
        self.roots.append(node)
        self.specs.append(Contents(tuple(Signature.of(array) for array in arrays), tuple(parts)))
        stored.append(arrays)
        return lambda args, fresh: fresh[index]

    def _store(self, root: Node, value: Any, stored: list[Any]) -> int:
        if root not in self.roots:
            spec = self.symbols.root_spec(root, tuple(value.shape))
            self.roots.append(root)
            self.specs.append(spec)
            stored.append(store(value, spec, root.target))
        return self.roots.index(root)

    def _view(self, node: Node, root: Node, values: dict[Node, Any]) -> View | None:
        """Return ``node`` as a view of ``root``, or None where it must be stored on its own."""
        shape, base = tuple(values[node].shape), tuple(values[root].shape)
        mine, its = node.meta["val"], root.meta["val"]
        if mine.dtype != its.dtype or mine.is_conj() or mine.is_neg():
            return None
        spec, whole = self.symbols.spec(node, shape), self.symbols.spec(root, base)
        if root not in self.places and whole != self.symbols.root_spec(root, base):
            return None
        start = self.symbols(mine.storage_offset()) - self.symbols(its.storage_offset())
        return View(spec.size, spec.stride, start)

    def makers(self) -> list[Callable[[Any], Tensor]] | None:
        """Return what makes each result of one array, or None where some result is another thing."""
        same = not self.single and self.nodes == self.roots
        return self._makers() if same else None

    def _makers(self) -> list[Callable[[Any], Tensor]]:
        devices = [node.meta["val"].device for node in self.roots]
        return [_maker(spec, device) for spec, device in zip(self.specs, devices, strict=True)]

    def wrapper(self) -> Callable[[list[Any], Sequence[Any]], Any]:
        """Return the function that makes the results of a call, given its arguments and the program's arrays."""
        makers = self._makers()
        steps, has_views = self.steps, self.has_views

        def wrap(args: list[Any], outputs: Sequence[Any]) -> Any:
            fresh = [make(output) for make, output in zip(makers, outputs, strict=False)]
            if not has_views:
                return [step(args, fresh) for step in steps]
            with restriding():
                return [step(args, fresh) for step in steps]

        return (lambda args, outputs: wrap(args, outputs)[0]) if self.single else wrap


def _fits(whole: Any, parts: Sequence[Any]) -> bool:
    """Return whether parts of an array take no more memory than the whole: backward then need not cut them out."""
    return bool(sum(part.size for part in parts) <= whole.size)


def _maker(spec: Spec | Contents, device: torch.device) -> Callable[[Any], Tensor]:
    if isinstance(spec, Contents):
        return lambda arrays: token(arrays, spec)
    if device.type == "jax":
        load()  # a graph may make the first tensor on the device, and no kernel runs
        return maker(spec, False)
    return lambda array: dlpack.depart(array, spec.size, spec.stride, device)
