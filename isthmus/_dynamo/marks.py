"""What is known of symbols: their largest sizes, and whether they had other values before.

``torch._dynamo.mark_dynamic(x, dim, max=...)`` says the largest size of a symbol.

Dynamo also bounds symbols by what a model compares them with (a table of 131072 positions), and such a bound is no size
to pad to. So the marks are read off the tensors when a graph is compiled, and kept with the symbols of that graph.
"""

from __future__ import annotations

from typing import Any
from weakref import WeakKeyDictionary, WeakSet

import torch
from torch.fx import GraphModule

from isthmus._device.torch_glue.private import largest_sizes
from isthmus._dynamo.layout import is_symbol
from isthmus._dynamo.private import compiles_again, example_of

_limits: WeakKeyDictionary[Any, dict[Any, int]] = WeakKeyDictionary()
"""For each environment of symbols the largest sizes of those that are marked."""
_again: WeakSet[Any] = WeakSet()
"""Environments of code that was compiled for other sizes before."""


def note(module: GraphModule) -> None:
    """Keep what the marks of a graph's arguments say, and whether its sizes are new, while Dynamo compiles it."""
    again = compiles_again()
    # Dynamo's own metadata, there while it compiles.
    for node in module.graph.nodes:
        fake = node.meta.get("example_value")
        if node.op != "placeholder":
            continue
        for size in [fake] if isinstance(fake, torch.SymInt) else getattr(fake, "shape", ()):
            if again and isinstance(size, torch.SymInt):
                _again.add(size.node.shape_env)
        if not isinstance(fake, torch.Tensor):
            continue
        for dim, most in largest_sizes(example_of(node)).items():
            marked: Any = fake.shape[dim]
            if is_symbol(marked):
                _limits.setdefault(marked.node.shape_env, {})[marked.node.expr] = most


def is_another(size: torch.SymInt) -> bool:
    """Return whether the code around a size was compiled for other sizes before."""
    return size.node.shape_env in _again


def largest(size: Any) -> int | None:
    """Return the largest value of a size in a graph, None where no mark says it."""
    if not isinstance(size, torch.SymInt):
        return None
    known, expr = _limits.get(size.node.shape_env, {}), size.node.expr
    # An expression of several symbols has a bound only if all of them have.
    if not known or not expr.free_symbols or expr.free_symbols - known.keys():
        return None
    return int(expr.xreplace(known))
