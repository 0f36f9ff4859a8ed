"""The c10d backend "jax": what ``torch.distributed`` calls for tensors on this device, and for CPU tensors beside them.

``init_process_group()`` or ``init_process_group("jax")`` calls ``create`` (through ``_isthmus_autoload.py``, so that
JAX is not loaded before), which joins JAX's processes (``start.py``) and returns a ``JaxGroup``. torch's own code,
DDP's C++ reducer among it, calls the methods below by the names of ``ProcessGroup``::

    dist.all_reduce(x)  ->  JaxGroup.allreduce([x], options)
                            -> agreement.agree(...)                 all ranks want the same
                            -> RankMesh.run(...)                    one XLA program over the ranks' devices
                            -> x's storage takes the result

- Tensors are read and written through their strides, so views and non-contiguous tensors are served.
- CPU tensors go to an inner gloo group, and are waited for: nothing above sees the inner group's own work.
- Messages (send, recv) go through gloo and the host: an XLA program needs all of its devices to take part.
- torch renamed some methods in 2.13 (``all_gather_single`` for ``_allgather_base``); both names are here.

Dynamo must not trace these methods (it raises UnsafeScriptObjectError), so they are hidden from it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from isthmus._device.core import mode
from isthmus._device.core.transfers import array_of, write_array
from isthmus._device.torch_glue import patches, registration
from isthmus._device.torch_glue.private import hide_from_dynamo
from isthmus._distributed import agreement, collectives, start
from isthmus._distributed.collectives import RankMesh, each, padded_size
from isthmus._distributed.work import Message, finished
from isthmus.errors import CollectiveError, JitError, first_line

Tensor = torch.Tensor
_REDUCTIONS = ("SUM", "AVG", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR", "PREMUL_SUM")


def create(options: Any) -> JaxGroup:
    """Return the group that torch asks for; all its ranks call this at the same time."""
    ranks = list(options.global_ranks_in_group)
    if not ranks:  # torch lists no ranks for the group of all of them, which comes first
        ranks = list(range(options.group_size))
        start.join(options.store, options.group_rank, options.group_size, options.timeout)
    registration.load()
    # Not above: the first of these needs the class below.
    from isthmus._distributed import compiled_collectives, dtensor_strategies, unused_parameters

    compiled_collectives.install()
    dtensor_strategies.install()
    unused_parameters.install()
    for name in ("_maybe_attach_flight_recorder", "_get_split_source"):
        patches.replace("torch.distributed.distributed_c10d", name, _unless_ours)
    return JaxGroup(options.store, options.group_rank, ranks, options.timeout)


def _collective(method: Callable[..., Any]) -> Callable[..., Any]:
    """Send CPU tensors to gloo, and keep what is not the user's business out of the way of the rest."""
    name = method.__name__

    @functools.wraps(method)
    def call(self: JaxGroup, *args: Any, **kwargs: Any) -> Any:
        tensors = list(_tensors_in(args))
        kinds = {tensor.device.type for tensor in tensors}
        if kinds <= {"cpu"} and (tensors or name in _WITHOUT_TENSORS):
            return self._on_cpu(name, args, kwargs)
        if kinds != {"jax"}:
            raise CollectiveError(
                f"{self._where(name)}: tensors on {sorted(kinds)}; a group serves 'jax' and 'cpu'"
            )
        if mode.current.capture is not None:
            raise JitError(
                f"isthmus.jit: {name} of torch.distributed inside a function that is recorded. Use "
                f"isthmus.distributed, where XLA inserts the collectives, or torch.compile, whose programs hold them"
            )
        with collectives.lock, torch.no_grad(), mode.reason(f"torch.distributed: {name}"):
            return method(self, *args, **kwargs)

    hide_from_dynamo(call)
    return call


def _tensors_in(values: Any) -> Any:
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from _tensors_in(value)


_WITHOUT_TENSORS = ("barrier",)
_ONE_BY_ONE = {
    "all_gather_single_coalesced": "all_gather_single",
    "reduce_scatter_single_coalesced": "reduce_scatter_single",
}
# Names that an inner gloo group of some supported torch has only under the other one.
_OLD_NAMES = {
    "all_gather_single": "_allgather_base",
    "reduce_scatter_single": "_reduce_scatter_base",
    "all_to_all_single": "alltoall_base",
}


def _unless_ours(theirs: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function of torch's on groups, which does nothing and returns None for those of this backend."""

    def ours(group: Any, *args: Any, **kwargs: Any) -> Any:
        return None if isinstance(group, JaxGroup) else theirs(group, *args, **kwargs)

    return ours


class JaxGroup(dist.ProcessGroup):
    """A group of ranks, one device each; ``_ranks`` are their global ranks."""

    supports_splitting = True
    supports_coalescing = False
    supports_time_estimate = False

    def __init__(self, store: c10d.Store, rank: int, ranks: Sequence[int], timeout: timedelta) -> None:
        super().__init__(rank, len(ranks))  # type: ignore[call-arg]  # torch's stub has one form of two
        self._store, self._own, self._ranks, self._timeout = store, rank, tuple(ranks), timeout
        self._gloo: Any = None
        self._names = ("", "")
        self.mesh = RankMesh(ranks)
        start.note_group(self)

    # ---- what torch asks about a group

    def rank(self) -> int:
        """Return this process's rank in the group."""
        return self._own

    def size(self) -> int:
        """Return the number of ranks."""
        return len(self._ranks)

    getRank, getSize = rank, size

    def name(self) -> str:
        """Return the name of the backend."""
        return "jax"

    getBackendName = _get_backend_name = name

    @property
    def group_name(self) -> Any:
        """The name by which functional collectives find the group."""
        return self._names[0]

    pg_name = group_name

    @property
    def group_desc(self) -> str:
        """What the group is for, in the words of its maker."""
        return self._names[1]

    def _set_group_name(self, name: str) -> None:
        self._names = (name, self._names[1])

    def _set_group_desc(self, desc: str) -> None:
        self._names = (self._names[0], desc)

    @property
    def _device_types(self) -> list[torch.device]:
        return [torch.device("jax"), torch.device("cpu")]

    @property
    def bound_device_id(self) -> torch.device:
        """The process's one device; torch splits a group only where it knows one."""
        return torch.device("jax", 0)

    @bound_device_id.setter
    def bound_device_id(self, device: Any) -> None:
        pass

    @property
    def options(self) -> Any:
        """Options of the backend: there are none."""
        return None

    def get_group_store(self) -> c10d.Store:
        """Return the store that the ranks of the group share."""
        return self._store

    def _get_backend(self, device: torch.device) -> Any:
        return self

    def supports_tensor_alloc(self, device: torch.device) -> bool:
        """Return False: XLA needs no memory of its own for communication."""
        return False

    def eager_connect_single_device(self, device: Any = None) -> None:
        """Do nothing: the processes are connected."""

    perform_nocolor_split = eager_connect_single_device

    def _set_sequence_number_for_group(self) -> None:
        pass

    def _get_sequence_number_for_group(self) -> int:
        return 0

    def set_timeout(self, timeout: timedelta) -> None:
        """Wait this long for the other ranks from now on."""
        self._timeout = timeout
        if self._gloo is not None:
            self._gloo._set_default_timeout(timeout)

    _set_default_timeout = set_timeout

    def _start_coalescing(self, device: torch.device) -> None:
        pass

    def _end_coalescing(self, device: torch.device) -> Any:
        return finished([])

    def shutdown(self) -> None:
        """Close the connections to the other ranks."""
        self._gloo = None

    abort = shutdown

    def split_group(
        self,
        new_ranks: list[int],
        timeout: timedelta | None = None,
        opts: Any = None,
        group_name: str | None = None,
        group_desc: str | None = None,
        device_types: Any = None,
    ) -> JaxGroup | None:
        """Return a group of some of these ranks, None on a rank that is not among them."""
        if self._own not in new_ranks:
            return None
        store = c10d.PrefixStore(f"{group_name}/", self._store)
        ranks = [self._ranks[rank] for rank in new_ranks]
        group = JaxGroup(store, new_ranks.index(self._own), ranks, timeout or self._timeout)
        group._names = (group_name or "", group_desc or "")
        return group

    def __repr__(self) -> str:
        return f"JaxGroup(rank {self._own} of {list(self._ranks)})"

    def __deepcopy__(self, memo: Any) -> JaxGroup:
        return self  # a module that holds its group is copied without it

    # ---- how a collective runs

    @property
    def _cpu(self) -> Any:
        """The gloo group of the same ranks, made when it is first needed."""
        if self._gloo is None:
            store = c10d.PrefixStore("gloo/", self._store)
            with agreement.explained(self._ranks[self._own], "the first connection of a group"):
                self._gloo = dist.ProcessGroupGloo(store, self._own, self.size(), timeout=self._timeout)
        return self._gloo

    def _on_cpu(self, name: str, args: Any, kwargs: Any) -> Any:
        if name in _ONE_BY_ONE:  # gloo has no such methods
            for output, input in zip(*args[:2], strict=True):
                self._on_cpu(_ONE_BY_ONE[name], (output, input, *args[2:]), kwargs)
            return finished(args[0])
        method = getattr(self._cpu, name, None) or getattr(self._cpu, _OLD_NAMES[name])
        with agreement.explained(self._ranks[self._own], f"{name} of CPU tensors"):
            work = method(*args, **kwargs)
            if name in ("send", "recv", "recv_anysource"):
                return work  # torch waits for these itself, and two ranks may send to each other
            work.wait()
        return finished(_future_value(args))

    def _where(self, name: str) -> str:
        return f"rank {self._ranks[self._own]}: {name}"

    def _run(
        self,
        name: str,
        details: tuple[Any, ...],
        one: Callable[[Any], Any],
        tensors: Sequence[Tensor],
        opts: Any = None,
    ) -> list[Any]:
        """Run a collective that does ``one`` to each of these tensors; return the resulting arrays.

        All ranks must come here with the same name, details, shapes and dtypes.
        """
        line = _line(name, details, tensors)
        arrays = [array_of(tensor.detach()) for tensor in tensors]
        try:
            launch, is_new = self.mesh.prepare(name, details, each(one), arrays)
            if self.size() > 1 and (self.mesh.waits or is_new or start.is_debugging()):
                agreement.agree(self._cpu, self._own, self._ranks, line, _timeout(opts))
            return launch()
        except CollectiveError:
            raise
        except Exception as error:
            words = start.last_words()
            because = f"\n  because      {words}" if words else ""
            raise CollectiveError(
                f"rank {self._ranks[self._own]}: {line} failed{because}\n  XLA says     {first_line(str(error))}"
            ) from error

    def _reduction(self, op: Any) -> tuple[Any, ...]:
        """Return the reduction that torch asks for: its name and, for PREMUL_SUM, the factor."""
        kind = next(name for name in _REDUCTIONS if op == getattr(dist.ReduceOp, name))
        if kind != "PREMUL_SUM":
            return (kind.lower(), self.size())
        factor = op.__getstate__()[1]
        return (kind.lower(), self.size(), float(factor))

    # ---- collectives of torch

    @_collective
    def allreduce(self, tensors: list[Tensor], opts: Any = None) -> Any:
        """Reduce each tensor over the ranks, in place."""
        tensors = [tensors] if isinstance(tensors, Tensor) else tensors
        reduction = self._reduction(c10d.AllreduceOptions().reduceOp if opts is None else opts.reduceOp)
        results = self._run("all_reduce", reduction, collectives.reduced(*reduction), tensors, opts)
        return _written(tensors, results)

    @_collective
    def allreduce_coalesced(self, tensors: list[Tensor], opts: Any = None) -> Any:
        """Reduce each tensor over the ranks, in one program."""
        return self.allreduce(tensors, opts)

    @_collective
    def reduce(self, tensors: list[Tensor], opts: Any) -> Any:
        """Reduce over the ranks; one of them gets the result."""
        reduction = self._reduction(opts.reduceOp)
        details = (*reduction, f"to rank {opts.rootRank}")
        results = self._run("reduce", details, collectives.reduced(*reduction), tensors, opts)
        return _written(tensors, results) if self._own == opts.rootRank else finished(tensors)

    @_collective
    def broadcast(self, tensors: list[Tensor], opts: Any) -> Any:
        """Give every rank the tensors of one."""
        root = opts.rootRank
        results = self._run("broadcast", (f"from rank {root}",), collectives.from_rank(root), tensors, opts)
        return _written(tensors, results) if self._own != root else finished(tensors)

    @_collective
    def all_gather_single(self, output: Tensor, input: Tensor, opts: Any = None) -> Any:
        """Write the tensors of all ranks into one, after each other."""
        return self.all_gather_single_coalesced([output], [input], opts)

    @_collective
    def all_gather_single_coalesced(
        self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None
    ) -> Any:
        """Write the tensors of all ranks into one, for each of several, in one program."""
        for output, input in zip(outputs, inputs, strict=True):
            if output.numel() != self.size() * input.numel() or output.dtype != input.dtype:
                raise CollectiveError(
                    f"{self._where('all_gather')}: {self.size()} times {_kind(input)} do not fit {_kind(output)}"
                )
        return _written(outputs, self._run("all_gather", (), collectives.gathered, inputs, opts))

    @_collective
    def allgather(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any = None) -> Any:
        """Write the tensors of all ranks into a list; they may have different sizes."""
        for outs, input in zip(outputs, inputs, strict=True):
            if outs[self._own].shape != input.shape:
                raise CollectiveError(
                    f"{self._where('all_gather')}: {_kind(input)} does not fit its own output {_kind(outs[self._own])}"
                )
            size = max(out.numel() for out in outs)
            (stacked,) = self._run("all_gather", (), collectives.gathered, [_padded(input, size)], opts)
            for out, row in zip(outs, stacked, strict=True):
                write_array(out, row[: out.numel()])
        return finished(outputs)

    @_collective
    def allgather_coalesced(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any = None) -> Any:
        """Gather several tensors; outputs are listed by rank."""
        return self.allgather([list(outs) for outs in zip(*outputs, strict=True)], inputs, opts)

    @_collective
    def gather(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any) -> Any:
        """Write the tensors of all ranks into a list on one of them."""
        root = opts.rootRank
        (stacked,) = self._run("gather", (f"to rank {root}",), collectives.gathered, inputs, opts)
        if self._own == root:
            for out, row in zip(outputs[0], stacked, strict=True):
                write_array(out, row)
        return finished(outputs)

    @_collective
    def scatter(self, outputs: list[Tensor], inputs: list[list[Tensor]], opts: Any) -> Any:
        """Give each rank its tensor of a list that one of them has."""
        root, (out,) = opts.rootRank, outputs
        parts = torch.stack([part.reshape(out.shape) for part in inputs[0]]) if self._own == root else None
        # The other ranks take part with zeros, which nobody reads.
        whole = out.new_zeros((self.size(), *out.shape)) if parts is None else parts
        (rows,) = self._run("scatter", (f"from rank {root}",), collectives.exchanged, [whole], opts)
        write_array(out, rows[root])
        return finished(outputs)

    @_collective
    def reduce_scatter_single(self, output: Tensor, input: Tensor, opts: Any = None) -> Any:
        """Reduce over the ranks; each keeps its part."""
        return self.reduce_scatter_single_coalesced([output], [input], opts)

    @_collective
    def reduce_scatter_single_coalesced(
        self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None
    ) -> Any:
        """Reduce each of several tensors over the ranks, in one program; each rank keeps its parts."""
        for output, input in zip(outputs, inputs, strict=True):
            if input.numel() != self.size() * output.numel() or output.dtype != input.dtype:
                raise CollectiveError(
                    f"{self._where('reduce_scatter')}: {_kind(input)} is not {self.size()} times {_kind(output)}"
                )
        reduction = self._reduction((opts or c10d.ReduceScatterOptions()).reduceOp)
        flat = [input.reshape(self.size(), -1) for input in inputs]
        one = collectives.reduce_scattered(*reduction)
        return _written(outputs, self._run("reduce_scatter", reduction, one, flat, opts))

    @_collective
    def reduce_scatter(self, outputs: list[Tensor], inputs: list[list[Tensor]], opts: Any = None) -> Any:
        """Reduce a list over the ranks; each keeps its element. Elements may have different sizes."""
        reduction = self._reduction((opts or c10d.ReduceScatterOptions()).reduceOp)
        one = collectives.reduce_scattered(*reduction)
        for out, parts in zip(outputs, inputs, strict=True):
            size = max(part.numel() for part in parts)
            whole = torch.stack([_padded(part, size) for part in parts])
            (row,) = self._run("reduce_scatter", reduction, one, [whole], opts)
            write_array(out, row.reshape(-1)[: out.numel()])
        return finished(outputs)

    @_collective
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
                    f"{self._where('all_to_all')}: dim 0 of {_kind(input)} cannot be split into {count} equal parts, "
                    f"or does not fit {_kind(output)}"
                )
            return _written([output], self._run("all_to_all", (), collectives.exchanged, [input], opts))
        sends = list(input_split_sizes) or [input.shape[0] // count] * count
        receives = list(output_split_sizes) or [output.shape[0] // count] * count
        largest = self._checked_splits(sends, receives, _line("all_to_all", (), [input[:0]]), opts)
        if largest:
            # Rows are taken into parts of one size, exchanged, and taken out of these.
            rows = padded_size(largest)
            packed = input.index_select(0, _positions(sends, rows))
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
        everyone = agreement.gather(self._cpu, self._ranks[self._own], line, own, _timeout(opts))
        for sender, (sent, _) in enumerate(everyone):
            for receiver, (_, wanted) in enumerate(everyone):
                if sent[receiver] != wanted[sender]:
                    raise CollectiveError(
                        f"{self._where('all_to_all')}: rank {self._ranks[sender]} sends {int(sent[receiver])} rows to "
                        f"rank {self._ranks[receiver]}, which expects {int(wanted[sender])}"
                    )
        return max(int(sent.max()) for sent, _ in everyone)

    @_collective
    def alltoall(self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None) -> Any:
        """Give each rank its tensor of a list; tensors may have different sizes."""
        flat = torch.cat([part.reshape(-1) for part in inputs])
        sizes = [out.numel() for out in outputs]
        received = flat.new_empty(sum(sizes))
        self.all_to_all_single(received, flat, sizes, [part.numel() for part in inputs], opts)
        for out, part in zip(outputs, received.split(sizes), strict=True):
            out.copy_(part.view(out.shape))
        return finished(outputs)

    @_collective
    def barrier(self, opts: Any = None) -> Any:
        """Wait until every rank is here; the decorator sends it to gloo, as it has no tensor."""

    # ---- messages

    @_collective
    def send(self, tensors: list[Tensor], dst: int, tag: int) -> Any:
        """Send tensors to one rank."""
        line = f"send to rank {self._ranks[dst]}: {_kinds(tensors)}"
        staged = [tensor.detach().cpu().contiguous() for tensor in tensors]
        inner = self._cpu.send(staged, dst, tag)
        # The staged copy lives as long as the message.
        return Message(self._ranks[self._own], line, inner, tensors, functools.partial(staged.clear))

    @_collective
    def recv(self, tensors: list[Tensor], src: int, tag: int) -> Any:
        """Receive tensors from one rank."""
        return self._receive(
            tensors, f"rank {self._ranks[src]}", lambda staged: self._cpu.recv(staged, src, tag)
        )

    @_collective
    def recv_anysource(self, tensors: list[Tensor], tag: int) -> Any:
        """Receive tensors from whichever rank sends some."""
        return self._receive(tensors, "any rank", lambda staged: self._cpu.recv_anysource(staged, tag))

    def _receive(self, tensors: list[Tensor], source: str, begin: Callable[[list[Tensor]], Any]) -> Message:
        staged = [torch.empty(tensor.shape, dtype=tensor.dtype) for tensor in tensors]
        line = f"recv from {source}: {_kinds(tensors)}"

        def arrive() -> None:
            with torch.no_grad():
                for tensor, data in zip(tensors, staged, strict=True):
                    tensor.detach().copy_(data)

        return Message(self._ranks[self._own], line, begin(staged), tensors, arrive)

    _allgather_base = all_gather_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    _reduce_scatter_base = reduce_scatter_single
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced
    alltoall_base = all_to_all_single


def _written(tensors: Sequence[Tensor], arrays: Sequence[Any]) -> Any:
    """Write results into their tensors; return the finished work."""
    for tensor, array in zip(tensors, arrays, strict=True):
        write_array(tensor, array)
    return finished(list(tensors))


def _future_value(args: Sequence[Any]) -> Any:
    """Return what the future of a collective holds: its first argument, which is its outputs."""
    value = args[0] if args else []
    return [value] if isinstance(value, Tensor) else value


def _padded(tensor: Tensor, size: int) -> Tensor:
    flat = tensor.detach().reshape(-1)
    return flat if flat.numel() == size else torch.nn.functional.pad(flat, (0, size - flat.numel()))


def _positions(sizes: Sequence[int], rows: int) -> Tensor:
    """Return which row of a tensor each row of parts of ``rows`` rows takes; those beyond a part take row 0."""
    positions, first = [], 0
    for size in sizes:
        positions += [*range(first, first + size), *[0] * (rows - size)]
        first += size
    return torch.tensor(positions, dtype=torch.int64).to("jax")


def _timeout(opts: Any) -> timedelta | None:
    """Return the time-out that a call asks for itself, None where it leaves that to the group."""
    timeout = getattr(opts, "timeout", None)
    return timeout if timeout is not None and timeout > timedelta(0) else None


def _kind(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"


def _kinds(tensors: Sequence[Tensor]) -> str:
    return ", ".join(map(_kind, tensors))


def _line(name: str, details: tuple[Any, ...], tensors: Sequence[Tensor]) -> str:
    """Return what ``agreement`` compares: ``all_reduce(sum, 2) float32[3]``."""
    words = f"({', '.join(map(str, details))})" if details else ""
    return f"{name}{words} {_kinds(tensors)}"
