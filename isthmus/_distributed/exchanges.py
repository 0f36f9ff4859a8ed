"""Collectives in which each rank gives each other rank something else: all_to_all, of equal and of different sizes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from isthmus._device.core.transfers import write_array
from isthmus._distributed import agreement, collectives
from isthmus._distributed.collectives import padded_size
from isthmus._distributed.rank_group import (
    RankGroup,
    collective,
    finished,
    kind_of,
    line_of,
    timeout_of,
    written,
)
from isthmus.errors import CollectiveError

Tensor = torch.Tensor


class Exchanges(RankGroup):
    """The two forms of all_to_all."""

    @collective
    def all_to_all_single(
        self,
        output: Tensor,
        input: Tensor,
        output_split_sizes: Sequence[int] = (),
        input_split_sizes: Sequence[int] = (),
        opts: Any = None,
    ) -> Any:
        """Give each rank its part of dim 0; parts may have different sizes."""
        count = self.size()
        if not output_split_sizes and not input_split_sizes:
            if input.shape[0] % count or input.numel() != output.numel():
                raise CollectiveError(
                    f"{self._where('all_to_all')}: dim 0 of {kind_of(input)} cannot be split into {count} equal parts, "
                    f"or does not fit {kind_of(output)}"
                )
            return written([output], self._run("all_to_all", (), collectives.exchanged, [input], opts))
        sends = list(input_split_sizes) or [input.shape[0] // count] * count
        receives = list(output_split_sizes) or [output.shape[0] // count] * count
        largest = self._checked_splits(sends, receives, line_of("all_to_all", (), [input[:0]]), opts)
        if largest:
            # Rows are taken into parts of one size, exchanged, and taken out of these.
            rows = padded_size(largest)
            # A rank that sends nothing has no row to fill its parts with.
            rest = input if input.shape[0] else input.new_zeros((1, *input.shape[1:]))
            packed = rest.index_select(0, _positions(sends, rows))
            (received,) = self._run("all_to_all", (), collectives.exchanged, [packed], opts)
            flat = torch.empty_like(packed)
            write_array(flat, received)
            kept = [n * rows + row for n, size in enumerate(receives) for row in range(size)]
            output.copy_(
                flat.index_select(0, torch.tensor(kept, dtype=torch.int64).to("jax")).view(output.shape)
            )
        return finished([output])

    def _checked_splits(self, sends: list[int], receives: list[int], line: str, opts: Any) -> int:
        """Return the size of the largest part that any rank sends; raise where two ranks disagree about one."""
        own = torch.tensor([sends, receives], dtype=torch.int64)
        everyone = agreement.gather(self._cpu, self._ranks[self._own], line, own, timeout_of(opts))
        for sender, (sent, _) in enumerate(everyone):
            for receiver, (_, wanted) in enumerate(everyone):
                if sent[receiver] != wanted[sender]:
                    raise CollectiveError(
                        f"{self._where('all_to_all')}: rank {self._ranks[sender]} sends {int(sent[receiver])} rows to "
                        f"rank {self._ranks[receiver]}, which expects {int(wanted[sender])}"
                    )
        return max(int(sent.max()) for sent, _ in everyone)

    @collective
    def alltoall(self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None) -> Any:
        """Give each rank its tensor of a list; tensors may have different sizes."""
        flat = torch.cat([part.reshape(-1) for part in inputs])
        sizes = [out.numel() for out in outputs]
        received = flat.new_empty(sum(sizes))
        self.all_to_all_single(received, flat, sizes, [part.numel() for part in inputs], opts)
        for out, part in zip(outputs, received.split(sizes), strict=True):
            out.copy_(part.view(out.shape))
        return finished(outputs)

    alltoall_base = all_to_all_single


def _positions(sizes: Sequence[int], rows: int) -> Tensor:
    """Return which row of a tensor each row of parts of ``rows`` rows takes; those beyond a part take row 0."""
    positions, first = [], 0
    for size in sizes:
        positions += [*range(first, first + size), *[0] * (rows - size)]
        first += size
    return torch.tensor(positions, dtype=torch.int64).to("jax")
