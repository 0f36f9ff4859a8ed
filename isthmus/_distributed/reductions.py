"""Collectives that combine the tensors of all ranks: all_reduce, reduce, reduce_scatter."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from isthmus._device.core.transfers import write_array
from isthmus._distributed import collectives
from isthmus._distributed.rank_group import RankGroup, collective, finished, kind_of, padded, written
from isthmus.errors import CollectiveError

Tensor = torch.Tensor
_REDUCTIONS = ("SUM", "AVG", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR", "PREMUL_SUM")


class Reductions(RankGroup):
    """The reductions of a group; a reduction is named by torch's ``ReduceOp``."""

    def _reduction(self, op: Any) -> tuple[Any, ...]:
        """Return the reduction that torch asks for: its name and, for PREMUL_SUM, the factor."""
        kind = next(name for name in _REDUCTIONS if op == getattr(dist.ReduceOp, name))
        if kind != "PREMUL_SUM":
            return (kind.lower(), self.size())
        factor = op.__getstate__()[1]
        return (kind.lower(), self.size(), float(factor))

    @collective
    def allreduce(self, tensors: list[Tensor], opts: Any = None) -> Any:
        """Reduce each tensor over the ranks, in place."""
        tensors = [tensors] if isinstance(tensors, Tensor) else tensors
        reduction = self._reduction(c10d.AllreduceOptions().reduceOp if opts is None else opts.reduceOp)
        results = self._run("all_reduce", reduction, collectives.reduced(*reduction), tensors, opts)
        return written(tensors, results)

    @collective
    def allreduce_coalesced(self, tensors: list[Tensor], opts: Any = None) -> Any:
        """Reduce each tensor over the ranks, in one program."""
        return self.allreduce(tensors, opts)

    @collective
    def reduce(self, tensors: list[Tensor], opts: Any) -> Any:
        """Reduce over the ranks; one of them gets the result."""
        reduction = self._reduction(opts.reduceOp)
        details = (*reduction, f"to rank {opts.rootRank}")
        results = self._run("reduce", details, collectives.reduced(*reduction), tensors, opts)
        return written(tensors, results) if self._own == opts.rootRank else finished(tensors)

    @collective
    def reduce_scatter_single(self, output: Tensor, input: Tensor, opts: Any = None) -> Any:
        """Reduce over the ranks; each keeps its part."""
        return self.reduce_scatter_single_coalesced([output], [input], opts)

    @collective
    def reduce_scatter_single_coalesced(
        self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None
    ) -> Any:
        """Reduce each of several tensors over the ranks, in one program; each rank keeps its parts."""
        for output, input in zip(outputs, inputs, strict=True):
            if input.numel() != self.size() * output.numel() or output.dtype != input.dtype:
                raise CollectiveError(
                    f"{self._where('reduce_scatter')}: {kind_of(input)} is not {self.size()} times {kind_of(output)}"
                )
        reduction = self._reduction((opts or c10d.ReduceScatterOptions()).reduceOp)
        flat = [input.reshape(self.size(), -1) for input in inputs]
        one = collectives.reduce_scattered(*reduction)
        return written(outputs, self._run("reduce_scatter", reduction, one, flat, opts))

    @collective
    def reduce_scatter(self, outputs: list[Tensor], inputs: list[list[Tensor]], opts: Any = None) -> Any:
        """Reduce a list over the ranks; each keeps its element. Elements may have different sizes."""
        reduction = self._reduction((opts or c10d.ReduceScatterOptions()).reduceOp)
        one = collectives.reduce_scattered(*reduction)
        for out, parts in zip(outputs, inputs, strict=True):
            size = max(part.numel() for part in parts)
            whole = torch.stack([padded(part, size) for part in parts])
            (row,) = self._run("reduce_scatter", reduction, one, [whole], opts)
            write_array(out, row.reshape(-1)[: out.numel()])
        return finished(outputs)

    _reduce_scatter_base = reduce_scatter_single
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced
