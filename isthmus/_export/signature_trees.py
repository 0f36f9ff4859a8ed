"""Containers of inputs and outputs as a signature stores them: dicts, lists and tuples, whatever torch had.

A tree is ``{"dtype": ..., "shape": [...]}`` for an array, ``None`` where there is no array, a list,
``{"tuple": [...]}`` or ``{"dict": {...}}``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from isthmus._device.torch_glue.pytree import TreeSpec
from isthmus.errors import ExportError


def build(spec: TreeSpec, leaves: Iterator[Any]) -> Any:
    """Return leaves in the containers of a torch tree; one with named fields becomes a dict, others a tuple."""
    if spec.is_leaf():
        return next(leaves)
    parts = [build(child, leaves) for child in children(spec)]
    if spec.type is list:
        return parts
    names = _names(spec)
    return tuple(parts) if names is None else dict(zip(names, parts, strict=True))


def children(spec: TreeSpec) -> list[TreeSpec]:
    """Return the trees right below the root of one."""
    # The method is torch's newer name for the attribute.
    return list(spec.children() if hasattr(spec, "children") else spec.children_specs)


def _names(spec: TreeSpec) -> list[str] | None:
    """Return the names of a container's parts, where it has them."""
    count, names = len(children(spec)), spec.context
    if isinstance(names, list) and len(names) == 2 and isinstance(names[0], list):
        names = names[0]  # a dataclass: fields with a value, and fields that are None
    if not isinstance(names, (list, tuple)) or len(names) != count or spec.type is tuple:
        return None
    if not all(isinstance(name, str) for name in names):
        raise ExportError(
            f"isthmus.export: a dict with keys {names} cannot be written in a signature: use names"
        )
    return list(names)


def describe(tree: Any, leaf: Callable[[Any], Any]) -> Any:
    """Return containers of arrays as a tree of a signature."""
    if isinstance(tree, dict):
        return {"dict": {name: describe(part, leaf) for name, part in tree.items()}}
    if isinstance(tree, tuple):
        return {"tuple": [describe(part, leaf) for part in tree]}
    if isinstance(tree, list):
        return [describe(part, leaf) for part in tree]
    return None if tree is None else leaf(tree)


def array(value: Any) -> dict[str, Any]:
    """Return the entry of an array in a signature; a dynamic size is an expression, as JAX prints it."""
    shape = [size if isinstance(size, int) else str(size) for size in value.shape]
    return {"dtype": str(value.dtype), "shape": shape}


def ordered(tree: Any, value: Any) -> Any:
    """Return containers with their dicts in the order of a tree of a signature."""
    if isinstance(tree, list):
        return [ordered(part, item) for part, item in zip(tree, value, strict=True)]
    if tree is None or "dtype" in tree:
        return value
    if "tuple" in tree:
        return tuple(ordered(part, item) for part, item in zip(tree["tuple"], value, strict=True))
    return {name: ordered(part, value[name]) for name, part in tree["dict"].items()}
