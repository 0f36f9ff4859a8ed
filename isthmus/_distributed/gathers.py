"""Collectives that hand tensors on as they are: broadcast, all_gather, gather, scatter."""

from __future__ import annotations

from typing import Any

import torch

from isthmus._device.core.transfers import write_array
from isthmus._distributed import collectives
from isthmus._distributed.rank_group import RankGroup, collective, finished, kind_of, padded, written
from isthmus.errors import CollectiveError

Tensor = torch.Tensor


class Gathers(RankGroup):
    """From one rank to all, from all to one, from all to all alike."""

    @collective
    def broadcast(self, tensors: list[Tensor], opts: Any) -> Any:
        """Give every rank the tensors of one."""
        root = opts.rootRank
        results = self._run("broadcast", (f"from rank {root}",), collectives.from_rank(root), tensors, opts)
        return written(tensors, results) if self._own != root else finished(tensors)

    @collective
    def all_gather_single(self, output: Tensor, input: Tensor, opts: Any = None) -> Any:
        """Write the tensors of all ranks into one, after each other."""
        return self.all_gather_single_coalesced([output], [input], opts)

    @collective
    def all_gather_single_coalesced(
        self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None
    ) -> Any:
        """Write the tensors of all ranks into one, for each of several, in one program."""
        for output, input in zip(outputs, inputs, strict=True):
            if output.numel() != self.size() * input.numel() or output.dtype != input.dtype:
                raise CollectiveError(
                    f"{self._where('all_gather')}: {self.size()} times {kind_of(input)} do not fit {kind_of(output)}"
                )
        return written(outputs, self._run("all_gather", (), collectives.gathered, inputs, opts))

    @collective
    def allgather(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any = None) -> Any:
        """Write the tensors of all ranks into a list; they may have different sizes."""
        for outs, input in zip(outputs, inputs, strict=True):
            if outs[self._own].shape != input.shape:
                raise CollectiveError(
                    f"{self._where('all_gather')}: {kind_of(input)} does not fit its own output "
                    f"{kind_of(outs[self._own])}"
                )
            size = max(out.numel() for out in outs)
            (stacked,) = self._run("all_gather", (), collectives.gathered, [padded(input, size)], opts)
            for out, row in zip(outs, stacked, strict=True):
                write_array(out, row[: out.numel()])
        return finished(outputs)

    @collective
    def allgather_coalesced(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any = None) -> Any:
        """Gather several tensors; outputs are listed by rank."""
        return self.allgather([list(outs) for outs in zip(*outputs, strict=True)], inputs, opts)

    @collective
    def gather(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any) -> Any:
        """Write the tensors of all ranks into a list on one of them."""
        root = opts.rootRank
        (stacked,) = self._run("gather", (f"to rank {root}",), collectives.gathered, inputs, opts)
        if self._own == root:
            for out, row in zip(outputs[0], stacked, strict=True):
                write_array(out, row)
        return finished(outputs)

    @collective
    def scatter(self, outputs: list[Tensor], inputs: list[list[Tensor]], opts: Any) -> Any:
        """Give each rank its tensor of a list that one of them has."""
        root, (out,) = opts.rootRank, outputs
        parts = torch.stack([part.reshape(out.shape) for part in inputs[0]]) if self._own == root else None
        # The other ranks take part with zeros, which nobody reads.
        whole = out.new_zeros((self.size(), *out.shape)) if parts is None else parts
        (rows,) = self._run("scatter", (f"from rank {root}",), collectives.exchanged, [whole], opts)
        write_array(out, rows[root])
        return finished(outputs)

    _allgather_base = all_gather_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced
