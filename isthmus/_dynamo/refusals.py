"""Calls in a graph that the CPU refuses: torch's Meta kernels, by which it was traced, miss many of its checks.

The CPU is asked about each op of a graph once per sizes and dtypes (``checks/cpu_refusals.py``): about those with
a lowering where they are lowered, about others where torch takes them apart. What it refuses is not compiled. It runs
op by op, and the device raises as it does without ``torch.compile``; so a doubt costs speed and no answer.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, Node

from isthmus._caches import LruCache
from isthmus._device.checks import cpu_refusals, scalar_checks
from isthmus._device.core.inference import Warnings
from isthmus._device.torch_glue.pytree import tree_flatten, tree_leaves, tree_map, tree_unflatten
from isthmus._dynamo.private import without_modes
from isthmus._graph.nodes import Node as Value
from isthmus._graph.private import OpOverload, storage_ids
from isthmus._graph.schema import schema_of
from isthmus._runtime.user_frames import warn_user

_LIMIT = 4096
# How large a tensor of a factory is when the CPU is asked about it: whether it refuses depends on signs and dtypes, not
# on the size.
_SIDE, _ELEMENTS = 3, 1000
_answers: LruCache[Any, tuple[Warnings, str | None]] = LruCache("refusals of nodes", _LIMIT)


class Refused(Exception):
    """The CPU refuses a call of a graph."""


def check(op: OpOverload, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
    """Raise ``Refused`` if the CPU refuses a call, and give its warnings; tensors are fake, or nodes of ``_graph``."""
    values = schema_of(op).ordered(args, kwargs)
    if op.namespace != "aten":
        # The CPU may be asked only where running the op twice does nothing.
        return  # a library's op may do anything
    if not all(map(_is_known, _sizes(values))):
        return  # sizes that depend on values: there is nothing to make a tensor of
    # Factories: nothing but numbers, which are made small before the CPU makes a tensor of them.
    if not any(isinstance(v, (Value, Tensor)) for v in _flat(values)):
        if _is_large(op, values):
            return
        values = tuple([min(n, _SIDE) for n in map(_known, v)] if _is_ints(v) else v for v in values)
    # AOTAutograd's modes would trace the question into the graph.
    with without_modes():
        _check(op, tree_map(_blank, values))


def _is_ints(value: Any) -> bool:
    return isinstance(value, (list, tuple)) and all([isinstance(n, (int, torch.SymInt)) for n in value])


def _is_large(op: OpOverload, values: Sequence[Any]) -> bool:
    """Return whether a factory's numbers, other than what it fills with, may mean more than a few elements."""
    numbers = [
        v for a, v in zip(schema_of(op).arguments, values, strict=True) if a.name not in ("fill_value", "s")
    ]
    return any([isinstance(v, (int, float)) and not abs(v) <= _ELEMENTS for v in numbers])


def _check(op: OpOverload, values: tuple[Any, ...]) -> None:
    parts = [(v.shape, v.dtype) if isinstance(v, Tensor) else repr(v) for v in _flat(values)]
    key = (op, *parts)
    known = _answers.get(key)
    if known is None:
        # By shapes and dtypes: values are not known here.
        heard, error = cpu_refusals.refusal(op, values, _has_suspicious_number(op, values))
        known = _answers[key] = heard, None if error is None else f"{op}: {type(error).__name__}: {error}"
    heard, answer = known
    if answer is not None:
        raise Refused(answer)
    # At each trace, at the user's line, as the CPU warns at each call.
    for category, text in heard:
        warn_user(category, text)


def _has_suspicious_number(op: OpOverload, values: tuple[Any, ...]) -> bool:
    schema = schema_of(op)
    named = schema.named(values)
    like = next((v for v in _flat(values) if isinstance(v, Tensor)), None)
    tests = scalar_checks.watched(schema).items()
    return any([test(named.get(name), like, named.get("dtype")) for name, test in tests])


def _flat(values: Any) -> list[Any]:
    return [item for v in values for item in (v if isinstance(v, (list, tuple)) else (v,))]


def _blank(value: Any) -> Any:
    """Return a tensor without values for a node of ``_graph`` or a tensor."""
    if isinstance(value, Value):
        return torch.empty(value.type.size, dtype=value.type.dtype, device="meta")
    if isinstance(value, Tensor):
        return torch.empty([_known(n) for n in value.shape], dtype=value.dtype, device="meta")
    return _known(value)


def _sizes(values: Any) -> list[Any]:
    flat = _flat(values)
    return [n for v in flat for n in (v.shape if isinstance(v, Tensor) else (v,))]


def _is_known(size: Any) -> bool:
    return not isinstance(size, torch.SymInt) or size.node.has_hint()


def _known(size: Any) -> Any:
    """Return a size as a number: of one that may vary, the one it was traced with."""
    return size.node.hint if isinstance(size, torch.SymInt) else size


def checking(op: OpOverload, decomposition: Callable[..., Any]) -> Callable[..., Any]:
    """Return a decomposition that is not used for calls the CPU refuses."""

    @functools.wraps(decomposition)
    def checked(*args: Any, **kwargs: Any) -> Any:
        check(op, args, kwargs)
        return decomposition(*args, **kwargs)

    return checked


def refuses_a_write(graph: Graph) -> bool:
    """Return whether the CPU refuses a write in a graph of Dynamo's.

    To a wrong ``out=``, or in place to what the call reads as well: AOTAutograd takes writes out of its graphs.
    """
    with without_modes():
        return any([_is_write(node) and _refused(node) for node in graph.nodes])


def _is_write(node: Node) -> bool:
    if node.op not in ("call_function", "call_method"):
        return False
    if not _is_torchs(node) or not cpu_refusals.may_be_asked(_name(node)):
        return False
    if node.kwargs.get("out") is not None:
        return True
    name = _name(node)
    # The same tensor as two arguments of a write.
    shared = len({id(n) for n in node.all_input_nodes}) < len(_nodes(node))
    return name.endswith("_") and not name.endswith("__") and shared


def _name(node: Node) -> str:
    return node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")


def _is_torchs(node: Node) -> bool:
    """Return whether a node calls torch itself: a function of the user's must not run more often than it is called."""
    if isinstance(node.target, str):
        return hasattr(Tensor, node.target)
    module = getattr(node.target, "__module__", None) or ""
    return module.split(".")[0] == "torch" or getattr(torch, _name(node), None) is node.target


def _nodes(node: Node) -> list[Node]:
    return [item for item in tree_leaves((node.args, node.kwargs)) if isinstance(item, Node)]


def _refused(node: Node) -> bool:
    """Return whether a node fails in the same words on zeros and on ones, small where its tensors are large."""
    if not all(isinstance(source.meta.get("example_value"), Tensor) for source in _nodes(node)):
        return False
    leaves, spec = tree_flatten((node.args, node.kwargs))
    blanks = {source: _blank(source.meta["example_value"]) for source in _nodes(node)}
    values = tuple(blanks[leaf] if isinstance(leaf, Node) else _known(leaf) for leaf in leaves)

    def call(made: Sequence[Any]) -> Any:
        args, kwargs = tree_unflatten(list(made), spec)
        if isinstance(node.target, str):
            return getattr(args[0], node.target)(*args[1:], **kwargs)
        return node.target(*args, **kwargs)  # type: ignore[operator]

    # On zeros and on ones: what is refused on both is refused for its sizes and dtypes.
    return cpu_refusals.refuses(call, values)


def writes_bytes_as_booleans(graph: Graph) -> bool:
    """Return whether a graph of Dynamo's views bytes as booleans or booleans as bytes, and may write through the view.

    AOTAutograd writes through a view by computing the viewed tensor anew, and XLA's booleans have no bytes but 0 and 1:
    bytes beside those written would change. Bytes that are read back from the booleans would, too, here or by who gets
    the view, and so would those written to booleans through a view of another dtype. A graph that only reads is
    compiled; a node counts as a write unless torch's naming says otherwise.
    """
    views = [node for node in graph.nodes if _is_dtype_view(node)]
    to_booleans = any([_dtype_argument(node) is torch.bool for node in views])
    from_booleans = any([_dtype_argument(node) is not torch.bool and _takes_booleans(node) for node in views])
    if to_booleans and (from_booleans or _returns_a_view(graph, views)):
        return True
    writes = [node for node in graph.nodes if not _is_pure(node)] if to_booleans or from_booleans else []
    return any([from_booleans or _takes_booleans(node) for node in writes])


def _returns_a_view(graph: Graph, views: list[Node]) -> bool:
    """Return whether a result shows memory that was made in the graph, by booleans that these views made of it."""
    # A result that shows an argument's memory is made of the argument again, by AOTAutograd, and has its bytes.
    arguments = {*_storages(graph.find_nodes(op="placeholder"))}
    results = graph.output_node().all_input_nodes
    return not ({*_storages(views)} - arguments).isdisjoint(_storages(results))


def _storages(nodes: Iterable[Node]) -> list[int]:
    examples = [node.meta.get("example_value") for node in nodes]
    return storage_ids([example for example in examples if isinstance(example, Tensor)])


def _is_dtype_view(node: Node) -> bool:
    dtype = _dtype_argument(node)
    return "view" in str(node.target) and dtype is not None and dtype not in _dtypes(node)


def _dtype_argument(node: Node) -> torch.dtype | None:
    return next((v for v in (*node.args, *node.kwargs.values()) if isinstance(v, torch.dtype)), None)


def _takes_booleans(node: Node) -> bool:
    return not {torch.bool, None}.isdisjoint(_dtypes(node))


def _dtypes(node: Node) -> list[torch.dtype | None]:
    """Return the dtypes of a node's inputs; None for an input that is no tensor or of which Dynamo has no example."""
    examples = [source.meta.get("example_value") for source in node.all_input_nodes]
    return [getattr(example, "dtype", None) for example in examples]


# What Dynamo writes for x[i] = y and x &= y.
_WRITING_OPERATORS = {
    operator.setitem, operator.delitem, operator.iadd, operator.iand, operator.ifloordiv, operator.ilshift,
    operator.imatmul, operator.imod, operator.imul, operator.ior, operator.ipow, operator.irshift, operator.isub,
    operator.itruediv, operator.ixor,
}  # fmt: skip


def _is_pure(node: Node) -> bool:
    """Return whether torch's naming shows that a node of Dynamo's writes to none of its inputs."""
    if node.op in ("placeholder", "get_attr", "output"):
        return True
    if isinstance(node.target, OpOverload):
        return not schema_of(node.target).mutated
    if node.op not in ("call_function", "call_method") or node.kwargs.get("out") is not None:
        return False
    name, module = _name(node), getattr(node.target, "__module__", None) or ""
    if module == "_operator":
        return node.target not in _WRITING_OPERATORS
    if name.endswith("_") and not name.endswith("__"):
        return False
    # torch.nn.functional.relu(x, True) writes to x.
    if node.kwargs.get("inplace") or (module == "torch.nn.functional" and True in node.args):
        return False
    # Methods with the names of operators: some write (__setitem__, __iand__), and Dynamo rarely leaves any.
    return bool(name) and not name.startswith("__") and _is_torchs(node)
