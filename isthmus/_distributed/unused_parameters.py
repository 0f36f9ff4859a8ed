"""DistributedDataParallel with ``find_unused_parameters`` or ``static_graph``, without torch's pinned memory.

torch's reducer notes which parameters a backward pass used in a tensor of pinned memory, for which a device in Python
cannot offer an allocator: it raises. So a module on "jax" gets a reducer that expects every parameter, and what is
unused is found here, after each forward pass that is to be synchronised:

- a parameter that the outputs do not depend on gets a gradient of zero (``_Outputs``), so that its bucket is complete;
- where no rank used it, its ``grad`` is put back to what it was, so that optimizers skip it, as torch promises.

``install`` is called with the first group. A static graph is treated as one that may change.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist

from isthmus._device.torch_glue import patches
from isthmus._device.torch_glue.private import after_backward, is_ignored_by_ddp
from isthmus._device.torch_glue.pytree import tree_flatten, tree_unflatten

Tensor = torch.Tensor
DDP = "torch.nn.parallel.distributed.DistributedDataParallel"
# Modules whose unused parameters are found here.
_finding: weakref.WeakSet[Any] = weakref.WeakSet()


def install() -> None:
    """Replace what DDP does about unused parameters, for modules on "jax"; a second call does nothing."""
    patches.replace(DDP, "_ddp_init_helper", _init_helper)
    patches.replace(DDP, "_set_static_graph", _set_static_graph)
    patches.replace(DDP, "_post_forward", _post_forward)


def _init_helper(theirs: Callable[..., Any]) -> Callable[..., Any]:
    def init_helper(self: Any, parameters: Any, sparse: Any, names: Any, static_graph: bool) -> Any:
        if (self.find_unused_parameters or static_graph) and is_ours(self):
            self.find_unused_parameters, static_graph = False, False
            _finding.add(self)
        return theirs(self, parameters, sparse, names, static_graph)

    return init_helper


def _set_static_graph(theirs: Callable[..., Any]) -> Callable[..., Any]:
    def set_static_graph(self: Any) -> None:
        if is_ours(self):
            _finding.add(self)
        else:
            theirs(self)

    return set_static_graph


def _post_forward(theirs: Callable[..., Any]) -> Callable[..., Any]:
    def post_forward(self: Any, output: Any) -> Any:
        synchronised = torch.is_grad_enabled() and self.require_backward_grad_sync
        if synchronised and self in _finding:
            output = _with_every_parameter(self, output)
        return theirs(self, output)

    return post_forward


def is_ours(module: Any) -> bool:
    """Return whether a DistributedDataParallel has parameters on "jax"."""
    return any(parameter.device.type == "jax" for parameter in module.module.parameters())


def _with_every_parameter(module: Any, output: Any) -> Any:
    """Return the output, dependent on all parameters."""
    flat, structure = tree_flatten(output)
    places = [n for n, leaf in enumerate(flat) if isinstance(leaf, Tensor) and leaf.requires_grad]
    # Parameters that DDP ignores have no place in a bucket.
    parameters = [p for p in module.module.parameters() if p.requires_grad and not is_ignored_by_ddp(p)]
    reached = _reached([flat[n].grad_fn for n in places], [flat[n] for n in places])
    used = torch.tensor([id(p) in reached for p in parameters], dtype=torch.int32)
    unused = [p for p, is_used in zip(parameters, used.tolist(), strict=True) if not is_used]
    dist.all_reduce(used, dist.ReduceOp.MAX, group=module.process_group)
    nowhere = [p for p, is_used in zip(parameters, used.tolist(), strict=True) if not is_used]
    if not places or not unused:
        return output
    results = _Outputs.apply(len(places), nowhere, *[flat[n] for n in places], *unused)  # type: ignore[no-untyped-call]
    for n, result in zip(places, results, strict=True):
        flat[n] = result
    return tree_unflatten(flat, structure)


def _reached(nodes: Iterable[Any], leaves: Iterable[Tensor]) -> set[int]:
    """Return the ids of the leaf tensors that autograd would reach from these nodes."""
    found = {id(leaf) for leaf in leaves if leaf.grad_fn is None}
    pending, seen = [node for node in nodes if node is not None], set()
    while pending:
        node = pending.pop()
        if node in seen:
            continue
        seen.add(node)
        variable = getattr(node, "variable", None)
        if isinstance(variable, Tensor):
            found.add(id(variable))
        pending += [following for following, _ in node.next_functions if following is not None]
    return found


class _Outputs(torch.autograd.Function):
    """Passes outputs on; its backward gives the parameters that they do not depend on gradients of zero."""

    @staticmethod
    def forward(ctx: Any, count: int, nowhere: list[Tensor], *tensors: Tensor) -> tuple[Tensor, ...]:
        """Return the first ``count`` tensors; the others are parameters, of which no rank used ``nowhere``."""
        ctx.set_materialize_grads(False)
        ctx.nowhere, ctx.unused = nowhere, tensors[count:]
        return tuple(tensor.view_as(tensor) for tensor in tensors[:count])

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Any, ...]:
        """Return the gradients of the outputs, and zeros."""
        before = [(parameter, parameter.grad) for parameter in ctx.nowhere]

        def put_back() -> None:
            for parameter, grad in before:
                parameter.grad = grad

        if before:
            # The reducer's own callback writes gradients; it is queued after the first of these, before the second.
            after_backward(lambda: after_backward(put_back))
        return (None, None, *grads, *[torch.zeros_like(parameter) for parameter in ctx.unused])
