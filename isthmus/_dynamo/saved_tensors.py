"""What forward keeps for backward, as one tensor: it holds the arrays, and nobody else can tell what is in it.

torch hands every value that backward needs from one program to the other as a tensor, and each costs some microseconds
to make, to save, to look at and to free. A graph keeps many: a dozen for each layer of a transformer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from isthmus._device.core.buffer import Buffer, Signature, new_tensor, wrap_strided
from isthmus._device.core.strided import read
from isthmus._device.core.transfers import array_of
from isthmus._device.torch_glue.private import is_fake
from isthmus._dynamo.layout import root_of
from isthmus._graph.layout import Spec, contiguous_strides
from isthmus.errors import IsthmusError

Array = Any
_FEWEST = 4  # a graph that keeps fewer gains nothing


@dataclass(frozen=True)
class Part:
    """One value that is kept: which array shows it, and how."""

    index: int
    spec: Spec
    start: int

    def read(self, arrays: Sequence[Array]) -> Array:
        """Return the value."""
        return read(arrays[self.index], self.spec.size, self.spec.stride, self.start)


@dataclass(frozen=True)
class Contents:
    """What a kept tensor holds: the signatures of its arrays, and the values they show."""

    arrays: tuple[Signature, ...]
    parts: tuple[Part, ...]
    traced, nbytes = False, 0

    def split(self, shardings: Sequence[Any]) -> Contents:
        """Return the same contents with arrays that are split like this."""
        pairs = zip(self.arrays, shardings, strict=True)
        return Contents(
            tuple([Signature.intern(a.shape, a.dtype, sharding=sharding) for a, sharding in pairs]),
            self.parts,
        )

    @property
    def shape(self) -> Any:
        """Refuse to be read by an op."""
        raise lost()


class Kept(Buffer):
    """The buffer of a kept tensor: ``held`` is a tuple of arrays, ``signature`` its contents."""

    __slots__ = ()


def token(arrays: tuple[Array, ...], contents: Contents) -> Tensor:
    """Return the tensor that holds these arrays."""
    return new_tensor((0,), None, torch.uint8, Kept(arrays, contents))  # type: ignore[arg-type]


def contents_of(tensor: Any) -> Contents | None:
    """Return what a kept tensor holds, or None for another argument."""
    buffer = getattr(tensor.untyped_storage(), "_buffer", None) if isinstance(tensor, Tensor) else None
    return buffer.signature if type(buffer) is Kept else None  # type: ignore[return-value]


_library = torch.library.Library("isthmus", "FRAGMENT")
_library.define("keep(Tensor[] values) -> Tensor")
_library.define("kept(Tensor token, int index, int[] size, int[] stride, ScalarType dtype) -> Tensor")


def _keep(values: Sequence[Tensor]) -> Tensor:
    """Keep tensors, where a graph is run node by node."""
    arrays = tuple(array_of(value) for value in values)
    specs = [Spec(tuple(v.shape), contiguous_strides(tuple(v.shape)), v.dtype) for v in values]
    parts = tuple(Part(n, spec, 0) for n, spec in enumerate(specs))
    return token(arrays, Contents(tuple(map(Signature.of, arrays)), parts))


def _kept(tensor: Tensor, index: int, size: Any, stride: Any, dtype: torch.dtype) -> Tensor:
    """Return a kept value, where a graph is run node by node."""
    contents = contents_of(tensor)
    if contents is None:
        raise lost()
    value = contents.parts[index].read(tensor.untyped_storage()._buffer.held)  # type: ignore[attr-defined]
    return wrap_strided(value, tuple(value.shape), contiguous_strides(tuple(value.shape)), dtype)


def lost() -> IsthmusError:
    """Return what to raise where a kept tensor is read, or another has taken its place."""
    return IsthmusError(
        "what a compiled forward keeps for backward is in one tensor that cannot be read or copied, as a hook on saved "
        "tensors tries to (torch.autograd.graph.save_on_cpu?) that was not there when the function was compiled\n"
        '  to go on     torch.compile(..., options={"keep": "apart"}) shows hooks every tensor that is saved'
    )


_library.impl("keep", _keep, "PrivateUse1")
_library.impl("kept", _kept, "PrivateUse1")
_library.impl("keep", lambda values: values[0].new_empty((0,), dtype=torch.uint8), "Meta")
_library.impl(
    "kept",
    lambda token, index, size, stride, dtype: token.new_empty_strided(size, stride, dtype=dtype),
    "Meta",
)
KEEP, KEPT = torch.ops.isthmus.keep.default, torch.ops.isthmus.kept.default


def together(forward: GraphModule, backward: GraphModule, visible: int) -> None:
    """Let what forward keeps beside its ``visible`` results travel to backward as one tensor."""
    (output,) = forward.graph.find_nodes(op="output")
    results = list(output.args[0])
    chosen = _choose(results[:visible], results[visible:])
    takers = {node.name: node for node in backward.graph.find_nodes(op="placeholder")}
    if len(chosen) < _FEWEST or not all(node.name in takers for node in chosen):
        return
    example = chosen[0].meta["val"].new_empty((0,), dtype=torch.uint8)
    with forward.graph.inserting_before(output):
        kept = forward.graph.call_function(KEEP, (chosen,))
    kept.meta["val"] = example
    places = [at for at, node in enumerate(results) if at < visible or node not in chosen[1:]]
    output.args = ([kept if results[at] is chosen[0] and at >= visible else results[at] for at in places],)
    if "desc" in output.meta:
        output.meta["desc"] = [output.meta["desc"][at] for at in places]
    _take(backward, [takers[node.name] for node in chosen], example)
    for module in (forward, backward):
        module.recompile()


def _choose(shown: Sequence[Any], kept: Sequence[Any]) -> list[Node]:
    """Return what is kept and new: neither an argument nor a result, nor a view of one."""
    roots = {root_of(node) for node in shown if isinstance(node, Node)}
    nodes = [node for node in kept if isinstance(node, Node) and node.op == "call_function"]
    return [
        node
        for node in dict.fromkeys(nodes)
        if _is_plain(node.meta.get("val"))
        and not node.meta.get("saved_tensor_with_no_vc_check")
        and root_of(node).op == "call_function"
        and root_of(node) not in roots
    ]


def _is_plain(value: Any) -> bool:
    """Return whether a node's value is a tensor of ours whose layout is known."""
    if not is_fake(value) or value.device.type != "jax" or value.is_conj() or value.is_neg():
        return False
    return all(type(n) is int for n in (*value.shape, *value.stride(), value.storage_offset()))


def _take(backward: GraphModule, takers: list[Node], example: Tensor) -> None:
    """Replace arguments of backward by one, from which they are taken."""
    graph = backward.graph
    with graph.inserting_before(takers[0]):
        kept = graph.placeholder("kept")
    kept.meta = {**takers[0].meta, "val": example}
    kept.meta.pop("tensor_meta", None)
    first = next(node for node in graph.nodes if node.op != "placeholder")
    for index, taker in enumerate(takers):
        value = taker.meta["val"]
        with graph.inserting_before(first):
            taken = graph.call_function(
                KEPT, (kept, index, list(value.shape), list(value.stride()), value.dtype)
            )
        taken.meta = dict(taker.meta)
        taker.replace_all_uses_with(taken)
        graph.erase_node(taker)
