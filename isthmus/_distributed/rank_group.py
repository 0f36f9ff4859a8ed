"""A group of ranks as torch knows it: what torch asks of it, and how any collective of it runs.

The collectives themselves are in files of one family each, as classes with methods by the names of ``ProcessGroup``:
``reductions.py``, ``gathers.py``, ``exchanges.py`` and ``messages.py``. ``group.py`` makes ``JaxGroup`` of them. Each
method is decorated with ``collective``, hands its tensors to ``RankGroup._run``, and writes what comes back::

    dist.all_reduce(x)  ->  JaxGroup.allreduce([x], options)
                            -> agreement.agree(...)                 all ranks want the same
                            -> RankMesh.prepare(...), launch()      one XLA program over the ranks' devices
                            -> x's storage takes the result

- Tensors are read and written through their strides, so views and non-contiguous tensors are served.
- CPU tensors go to an inner gloo group, and are waited for: nothing above sees the inner group's own work.
- torch renamed some methods in 2.13 (``all_gather_single`` for ``_allgather_base``); both names are there.

Dynamo must not trace these methods (it raises UnsafeScriptObjectError), so they are hidden from it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, Self

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d
from torch.futures import Future

from isthmus._device.core import mode
from isthmus._device.core.transfers import array_of, write_array
from isthmus._device.torch_glue.private import hide_from_dynamo, work_of_future
from isthmus._distributed import agreement, collectives, start
from isthmus._distributed.collectives import RankMesh, each
from isthmus.errors import CollectiveError, JitError, first_line

Tensor = torch.Tensor


def collective(method: Callable[..., Any]) -> Callable[..., Any]:
    """Send CPU tensors to gloo, and keep what is not the user's business out of the way of the rest."""
    name = method.__name__

    @functools.wraps(method)
    def call(self: RankGroup, *args: Any, **kwargs: Any) -> Any:
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


class RankGroup(dist.ProcessGroup):
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
    ) -> Self | None:
        """Return a group of some of these ranks, None on a rank that is not among them."""
        if self._own not in new_ranks:
            return None
        store = c10d.PrefixStore(f"{group_name}/", self._store)
        ranks = [self._ranks[rank] for rank in new_ranks]
        group = type(self)(store, new_ranks.index(self._own), ranks, timeout or self._timeout)
        group._names = (group_name or "", group_desc or "")
        return group

    def __repr__(self) -> str:
        return f"JaxGroup(rank {self._own} of {list(self._ranks)})"

    def __deepcopy__(self, memo: Any) -> Self:
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
        line = line_of(name, details, tensors)
        arrays = [array_of(tensor.detach()) for tensor in tensors]
        try:
            launch, is_new = self.mesh.prepare(name, details, each(one), arrays)
            if self.size() > 1 and (self.mesh.waits or is_new or start.is_debugging()):
                agreement.agree(self._cpu, self._own, self._ranks, line, timeout_of(opts))
            return launch()
        except CollectiveError:
            raise
        except Exception as error:
            words = start.last_words()
            because = f"\n  because      {words}" if words else ""
            raise CollectiveError(
                f"rank {self._ranks[self._own]}: {line} failed{because}\n  XLA says     {first_line(str(error))}"
            ) from error


def written(tensors: Sequence[Tensor], arrays: Sequence[Any]) -> Any:
    """Write results into their tensors; return the finished work."""
    for tensor, array in zip(tensors, arrays, strict=True):
        write_array(tensor, array)
    return finished(list(tensors))


def _future_value(args: Sequence[Any]) -> Any:
    """Return what the future of a collective holds: its first argument, which is its outputs."""
    value = args[0] if args else []
    return [value] if isinstance(value, Tensor) else value


def padded(tensor: Tensor, size: int) -> Tensor:
    """Return a tensor's elements in a row, with zeros after them up to ``size``."""
    flat = tensor.detach().reshape(-1)
    return flat if flat.numel() == size else torch.nn.functional.pad(flat, (0, size - flat.numel()))


def timeout_of(opts: Any) -> timedelta | None:
    """Return the time-out that a call asks for itself, None where it leaves that to the group."""
    timeout = getattr(opts, "timeout", None)
    return timeout if timeout is not None and timeout > timedelta(0) else None


def kind_of(tensor: Tensor) -> str:
    """Return a tensor's dtype and shape, for errors: ``float32[3]``."""
    return f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"


def kinds_of(tensors: Sequence[Tensor]) -> str:
    """Return dtypes and shapes of several tensors."""
    return ", ".join(map(kind_of, tensors))


def line_of(name: str, details: tuple[Any, ...], tensors: Sequence[Tensor]) -> str:
    """Return what ``agreement`` compares: ``all_reduce(sum, 2) float32[3]``."""
    words = f"({', '.join(map(str, details))})" if details else ""
    return f"{name}{words} {kinds_of(tensors)}"


def finished(tensors: Any) -> dist.Work:
    """Return the work of a collective that has been launched; its future holds ``tensors``."""
    future: Future[Any] = Future()
    future.set_result(tensors)
    return work_of_future(future)
