"""What a graph returns: arguments, views of them, new storages and views of those, aliased as eager aliases them.

A program returns new arrays; a compiled function returns what eager would: ``x.t()`` of an argument is a view of that
very tensor, two halves of one result share memory. ``Returns`` decides once per specialization which new storages the
program has to return (``stored``) and how each result is made of arguments and new tensors (``steps``)::

    def f(x): y = x + 1; return y[0], y[1], x.t()
    stored   [y]                                    one array
    steps    view of new 0, view of new 0, view of argument 0

What forward saves for backward is one tensor that holds all arrays (``saved_tensors.py``, ``_keep``).

What can go wrong: an argument may be laid out otherwise than when torch traced the graph. A view of it is then computed
and stored like a new result: its values are right, and it shares no memory with the argument.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import jax
import torch
from torch import Tensor
from torch.fx import GraphModule
from torch.fx import Node as FxNode

from isthmus._device.core.buffer import Signature, maker
from isthmus._device.torch_glue.private import restrided, restriding
from isthmus._device.torch_glue.registration import load
from isthmus._dynamo import dlpack
from isthmus._dynamo.convert import Conversion
from isthmus._dynamo.layout import root_of
from isthmus._dynamo.saved_tensors import KEEP, Contents, Part, token
from isthmus._graph import view_calls
from isthmus._graph.layout import Spec, channels_last_strides, packed_strides, storage_shape
from isthmus._graph.nodes import Node
from isthmus._runtime.compiler import platform
from isthmus._runtime.dtypes import to_jax_dtype

_aten = torch.ops.aten
# Ops whose first argument and first result are images, (batch, channels, height, width).
_ON_IMAGES = {
    _aten.convolution.default,
    _aten._native_batch_norm_legit_functional.default,
    _aten._native_batch_norm_legit_no_training.default,
    _aten._native_batch_norm_legit.no_stats,
    _aten.native_batch_norm.default,
    _aten.max_pool2d_with_indices.default,
    _aten.avg_pool2d.default,
    _aten._adaptive_avg_pool2d.default,
}
_Wrap = Callable[[list[Any], list[Any]], Any]
Shardings = Sequence[Any] | None


def _viewed(tensor: Tensor, view: Spec) -> Tensor:
    """Return a view of a tensor's storage, whose offset is counted from the tensor's; ``restriding`` is in force."""
    return restrided(tensor, view.size, view.stride, tensor.storage_offset() + view.offset)


class Returns:
    """The results of one specialized graph: the new storages its program returns, and the tensors made of them.

    ``stored`` has the node of each new storage, or a tuple of nodes for the tensor that holds what forward saves;
    ``steps`` make each result from the arguments of a call and the new tensors.
    """

    def __init__(
        self, module: GraphModule, placeholders: Sequence[FxNode], args: Sequence[Any], conversion: Conversion
    ) -> None:
        (output,) = [fx for fx in module.graph.nodes if fx.op == "output"]
        returned = output.args[0]
        self.single = not isinstance(returned, (list, tuple))
        self.nodes = [returned] if self.single else list(returned)
        self.places = {fx: at for at, fx in enumerate(placeholders)}
        self.symbols, self.values = conversion.symbols, conversion.values
        # An argument may be laid out otherwise than torch foresaw; a view of it is then computed like anything else.
        # Arguments whose strides are those of the trace.
        self.foreseen = {
            fx
            for fx, arg in zip(placeholders, args, strict=True)
            if isinstance(arg, Tensor) and self.symbols.spec(fx, tuple(arg.shape)) == Spec.of(arg)
        }
        self.roots: list[FxNode] = []
        self.specs: list[Spec | Contents] = []
        self.stored: list[Node | tuple[Node, ...]] = []
        self.has_views = False
        self.steps = [self._step(fx) for fx in self.nodes]
        del self.values  # only needed until here, and large

    @property
    def count(self) -> int:
        """How many new storages there are."""
        return len(self.specs)

    def _step(self, fx: Any) -> _Wrap:
        """Return how one result is made of the arguments and the new tensors."""
        if not isinstance(fx, FxNode):
            return lambda args, fresh: fx
        # A constant result.
        if fx.target is KEEP:
            return self._keep(fx)
        if fx.target is torch.ops.aten.copy_.default:
            # The argument that was written to is returned itself, not a copy of its new value.
            fx = fx.args[0]  # its new value is what the argument now holds
        value = self.values[fx]
        if fx in self.places:
            at = self.places[fx]
            return lambda args, fresh: args[at]
        if not isinstance(value, Node) or not isinstance(fx.meta.get("val"), Tensor):
            # The same at every call of this specialization.
            # A size, a number: known since the arguments are.
            return lambda args, fresh: value
        root = root_of(fx)
        view = self._view(fx, root)
        if root in self.foreseen and view is not None:
            at = self.places[root]
            self.has_views = True
            return lambda args, fresh: _viewed(args[at], view)
        # XLA's arrays have one dtype: a view of another one (``x.real``) shares memory with the views of its own dtype.
        base = root if view is not None else root_of(fx, of_dtype=True)
        part = self._view(fx, base)
        # An argument is no new storage, so the view itself is stored.
        if part is None or base in self.places:
            base = fx
        index = self._store(base)
        if base is fx or part is None:
            return lambda args, fresh: fresh[index]
        self.has_views = True
        return lambda args, fresh: _viewed(fresh[index], part)

    def _size(self, fx: FxNode) -> tuple[int, ...]:
        size: tuple[int, ...] = self.values[fx].type.size
        return size

    def _keep(self, fx: FxNode) -> _Wrap:
        """Return how the tensor that holds what backward needs is made."""
        saved: list[FxNode] = list(fx.args[0])  # type: ignore[arg-type]
        views = {each: self._view(each, root_of(each)) for each in saved}
        specs: dict[FxNode, Spec] = {}
        parts: list[Part] = []
        for each, view in views.items():
            root = root_of(each)
            spec = Spec.of(each.meta["val"])
            pieces = [self._size(n) for n in saved if root_of(n) is root]
            # One array may be cheaper than its views: several slices of a large one are saved each on its own.
            if view is None or _fits(self._size(root), pieces):
                root = each
                like = channels_last_strides(spec.size) if _is_image(each) else spec.stride
                specs[root] = spec = Spec(spec.size, packed_strides(spec.size, like), spec.dtype)
            else:
                spec = replace(spec, offset=view.offset)
                specs[root] = self.symbols.root_spec(root, self._size(root))
            parts.append(Part([*specs].index(root), spec))
        arrays = tuple(self._stored(root, spec) for root, spec in specs.items())
        index = len(self.stored)
        self.roots.append(fx)
        signatures = [Signature.intern(n.type.size, to_jax_dtype(n.type.dtype)) for n in arrays]
        self.specs.append(Contents(tuple(signatures), tuple(parts)))
        self.stored.append(arrays)
        return lambda args, fresh: fresh[index]

    def _store(self, root: FxNode) -> int:
        if root not in self.roots:
            spec = self.symbols.root_spec(root, self._size(root))
            self.roots.append(root)
            self.specs.append(spec)
            self.stored.append(self._stored(root, spec))
        return self.roots.index(root)

    def _stored(self, root: FxNode, spec: Spec) -> Node:
        return view_calls.chained(view_calls.store(spec), self.values[root])

    def _view(self, fx: FxNode, root: FxNode) -> Spec | None:
        """Return ``fx`` as a view of ``root``, its offset counted from the root's, or None where it must be stored."""
        mine, its = fx.meta["val"], root.meta["val"]
        if mine.dtype != its.dtype or mine.is_conj() or mine.is_neg():
            return None
        spec, whole = self.symbols.spec(fx, self._size(fx)), self.symbols.spec(root, self._size(root))
        # The root is stored without gaps, so strides of a view with gaps do not fit it.
        if root not in self.places and whole != self.symbols.root_spec(root, self._size(root)):
            return None
        start = self.symbols(mine.storage_offset()) - self.symbols(its.storage_offset())
        return replace(spec, offset=start)

    def makers(self, shardings: Shardings) -> list[Callable[[Any], Tensor]] | None:
        """Return the makers of results, each of one array, or None where some result is another thing."""
        # Then each result is a new storage as it is, and the fast path needs no steps.
        same = not self.single and self.nodes == self.roots
        return self._makers(shardings) if same else None

    def _makers(self, shardings: Shardings) -> list[Callable[[Any], Tensor]]:
        devices = [fx.meta["val"].device for fx in self.roots]
        places = shardings or [None] * len(devices)
        return [_maker(*each) for each in zip(self.specs, devices, places, strict=True)]

    def wrapper(self, shardings: Shardings) -> Callable[[list[Any], Sequence[Any]], Any]:
        """Return the function that makes the results of a call, given its arguments and the program's arrays.

        ``shardings`` say how the program splits the new storages; None on one device.
        """
        makers = self._makers(shardings)
        steps, has_views = self.steps, self.has_views
        foreign = any(isinstance(make, _Departure) for make in makers)

        def wrap(args: list[Any], outputs: Sequence[Any]) -> Any:
            if foreign:
                depart = dlpack.Departures()
                pairs = zip(makers, outputs, strict=False)
                fresh = [m.by(depart, o) if isinstance(m, _Departure) else m(o) for m, o in pairs]
            else:
                fresh = [make(output) for make, output in zip(makers, outputs, strict=False)]
            if not has_views:
                return [step(args, fresh) for step in steps]
            # One switch of torch's dispatch for all views of a call.
            with restriding():
                return [step(args, fresh) for step in steps]

        return (lambda args, outputs: wrap(args, outputs)[0]) if self.single else wrap


def _is_image(fx: FxNode) -> bool:
    """Return whether a saved value is better laid out with its channels last.

    XLA's convolutions on GPUs have them there, so between them nothing is transposed; a value that leaves a program has
    the layout of its spec, and one that enters the next as well. What is saved no one else looks at.
    """
    if platform() != "gpu" or fx.meta["val"].dim() != 4:
        return False
    root = root_of(fx)
    source = root.args[0] if root.target is operator.getitem else root
    if isinstance(source, FxNode) and source.target in _ON_IMAGES:
        return True
    return any(user.target in _ON_IMAGES and user.args[0] is one for one in (fx, root) for user in one.users)


def _fits(whole: tuple[int, ...], parts: Sequence[tuple[int, ...]]) -> bool:
    """Return whether parts of an array take no more memory than the whole: backward then need not slice it."""
    # Half of a tensor is saved as that half; all of its parts together as the whole.
    return sum(map(math.prod, parts)) <= math.prod(whole)


def _maker(spec: Spec | Contents, device: torch.device, sharding: Any) -> Callable[[Any], Tensor]:
    if isinstance(spec, Contents):
        contents = spec if sharding is None else spec.split(sharding)
        return lambda arrays: token(arrays, contents)
    if device.type == "jax":
        load()  # a graph may make the first tensor on the device, and no kernel runs
        return maker(spec, False, sharding)
    return _Departure(spec, device)


class _Departure:
    """What makes a result on another device than "jax"."""

    def __init__(self, spec: Spec, device: torch.device) -> None:
        self.spec, self.device = spec, device
        self.shape = storage_shape(spec.size, spec.stride)

    def __call__(self, array: jax.Array) -> Tensor:
        """Return the result that an array holds."""
        return self.by(dlpack.Departures(), array)

    def by(self, depart: dlpack.Departures, array: jax.Array) -> Tensor:
        """Return it as one of several."""
        tensor = depart(array, self.spec.size, self.spec.stride, self.device)
        # As it would arrive again: a storage of its own, of the same shape and dtype.
        if self.device.type == "cuda" and array.shape == self.shape and array.dtype != bool:
            dlpack.remember(tensor, array)
        return tensor
