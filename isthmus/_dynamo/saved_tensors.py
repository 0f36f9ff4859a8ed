"""What forward saves for backward, as one tensor of the device: it holds the arrays of all residuals.

torch hands every value that backward needs from one program to the other as a tensor, and each costs some microseconds
to make, to save, to look at and to free. A graph saves many: a dozen for each layer of a transformer. A graph of
tensors of the CPU or of CUDA saves them in one tensor of the device as well, and none of them has to cross over.

``together`` rewrites the two FX graphs that torch's partitioner made::

    forward     return y, %a, %b, %c        ->  return y, isthmus::keep([%a, %b, %c])
    backward    f(%a, %b, %c, grad)         ->  f(%kept, grad), with %a = isthmus::kept(%kept, 0, size, stride, ...)

and the buffer behind that tensor (``SavedBuffer``) holds a tuple of arrays with ``Contents`` for its signature.
``_dynamo/specialization.py`` turns it back into array leaves. No op can read such a tensor, so values that the user can
reach (arguments, results, views of these) stay apart, and so does everything where hooks on saved tensors are set.
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
from isthmus._dynamo import dlpack
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

    def read(self, arrays: Sequence[Array]) -> Array:
        """Return the value."""
        return read(arrays[self.index], self.spec.size, self.spec.stride, self.spec.offset)


@dataclass(frozen=True)
class Contents:
    """What a kept tensor holds: the signatures of its arrays, and the values they show."""

    arrays: tuple[Signature, ...]
    parts: tuple[Part, ...]
    # What entries ask of a signature: it is no tracer, and has no bytes of its own.
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


class SavedBuffer(Buffer):
    """The buffer of a kept tensor: ``held`` is a tuple of arrays, ``signature`` its contents."""

    __slots__ = ()


def token(arrays: tuple[Array, ...], contents: Contents) -> Tensor:
    """Return the tensor that holds these arrays."""
    return new_tensor((0,), None, torch.uint8, SavedBuffer(arrays, contents))  # type: ignore[arg-type]


def contents_of(tensor: Any) -> Contents | None:
    """Return the contents of a kept tensor, or None for another argument."""
    buffer = getattr(tensor.untyped_storage(), "_buffer", None) if isinstance(tensor, Tensor) else None
    return buffer.signature if type(buffer) is SavedBuffer else None  # type: ignore[return-value]


_library = torch.library.Library("isthmus", "FRAGMENT")
_library.define("keep(Tensor[] values) -> Tensor")
_library.define(
    "kept(Tensor token, int index, int[] size, int[] stride, ScalarType dtype, Device device) -> Tensor"
)


def _keep(values: Sequence[Tensor]) -> Tensor:
    """Keep tensors, where a graph is run node by node."""
    arrays = tuple(array_of(v) if v.device.type == "jax" else dlpack.arrive(v.contiguous()) for v in values)
    specs = [Spec(tuple(v.shape), contiguous_strides(tuple(v.shape)), v.dtype) for v in values]
    parts = tuple(Part(n, spec) for n, spec in enumerate(specs))
    return token(arrays, Contents(tuple(map(Signature.of, arrays)), parts))


def _kept(
    tensor: Tensor, index: int, size: Any, stride: Any, dtype: torch.dtype, device: torch.device
) -> Tensor:
    """Return a kept value, where a graph is run node by node."""
    contents = contents_of(tensor)
    if contents is None:
        raise lost()
    value = contents.parts[index].read(tensor.untyped_storage()._buffer.held)  # type: ignore[attr-defined]
    layout = (tuple(value.shape), contiguous_strides(tuple(value.shape)))
    if device.type == "jax":
        return wrap_strided(value, *layout, dtype)
    if dlpack.waits({device.type}):
        value.block_until_ready()
    return dlpack.Departures()(value, *layout, device)


def lost() -> IsthmusError:
    """Return the error for a kept tensor that is read, or has been replaced by another."""
    return IsthmusError(
        "what a compiled forward keeps for backward is in one tensor that cannot be read or copied, as a hook on saved "
        "tensors tries to (torch.autograd.graph.save_on_cpu?) that was not there when the function was compiled\n"
        '  to go on     torch.compile(..., options={"keep": "apart"}) shows hooks every tensor that is saved'
    )


for _key in ("PrivateUse1", "CPU", "CUDA"):
    _library.impl("keep", _keep, _key)
_library.impl("kept", _kept, "PrivateUse1")
_library.impl("keep", lambda values: values[0].new_empty((0,), dtype=torch.uint8), "Meta")
_library.impl(
    "kept",
    lambda token, index, size, stride, dtype, device: token.new_empty_strided(size, stride, dtype=dtype),
    "Meta",
)
KEEP, KEPT = torch.ops.isthmus.keep.default, torch.ops.isthmus.kept.default


def together(forward: GraphModule, backward: GraphModule, visible: int) -> None:
    """Let what forward keeps beside its ``visible`` results travel to backward as one tensor."""
    (output,) = forward.graph.find_nodes(op="output")
    results = list(output.args[0])
    # Only values that nothing else can see: see the module.
    chosen = _choose(results[:visible], results[visible:])
    takers = {node.name: node for node in backward.graph.find_nodes(op="placeholder")}
    if len(chosen) < _FEWEST or not all(node.name in takers for node in chosen):
        return
    example = chosen[0].meta["val"].new_empty((0,), dtype=torch.uint8)
    with forward.graph.inserting_before(output):
        kept = forward.graph.call_function(KEEP, (chosen,))
    kept.meta["val"] = example
    places = [at for at, node in enumerate(results) if at < visible or node not in chosen[1:]]
    # The token in the place of the first residual, the others are gone.
    output.args = ([kept if results[at] is chosen[0] and at >= visible else results[at] for at in places],)
    # torch describes each output; descriptions move with them.
    if "desc" in output.meta:
        output.meta["desc"] = [output.meta["desc"][at] for at in places]
    _take(backward, [takers[node.name] for node in chosen], example)
    for module in (forward, backward):
        module.recompile()


def _choose(shown: Sequence[Any], kept: Sequence[Any]) -> list[Node]:
    """Return the saved values that are new: neither an argument nor a result, nor a view of one."""
    roots = {root_of(node) for node in shown if isinstance(node, Node)}
    nodes = [node for node in kept if isinstance(node, Node) and node.op == "call_function"]
    plain = [node for node in dict.fromkeys(nodes) if _is_plain(node.meta.get("val"))]
    return [
        node
        for node in plain
        if node.meta["val"].device == plain[0].meta["val"].device
        and not node.meta.get("saved_tensor_with_no_vc_check")
        and root_of(node).op == "call_function"
        and root_of(node) not in roots
    ]


def _is_plain(value: Any) -> bool:
    """Return whether a node's value is a tensor whose layout is known."""
    if not is_fake(value) or value.is_conj() or value.is_neg():
        return False
    return all(type(n) is int for n in (*value.shape, *value.stride(), value.storage_offset()))


def _take(backward: GraphModule, takers: list[Node], example: Tensor) -> None:
    """Replace arguments of backward by one, from which they are taken."""
    graph = backward.graph
    with graph.inserting_before(takers[0]):
        kept = graph.placeholder("kept")
    kept.meta = {**takers[0].meta, "val": example}
    kept.meta.pop("tensor_meta", None)
    # After all placeholders: FX keeps those in front.
    first = next(node for node in graph.nodes if node.op != "placeholder")
    for index, taker in enumerate(takers):
        value = taker.meta["val"]
        with graph.inserting_before(first):
            taken = graph.call_function(
                KEPT, (kept, index, list(value.shape), list(value.stride()), value.dtype, value.device)
            )
        taken.meta = dict(taker.meta)
        taker.replace_all_uses_with(taken)
        graph.erase_node(taker)
