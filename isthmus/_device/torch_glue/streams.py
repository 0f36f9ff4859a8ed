"""``torch.jax.Stream`` and ``Event``: CUDA's words for the order of work, which XLA keeps by itself.

XLA runs a program when its inputs are there and returns arrays that are futures, so no stream has to wait for
another: what a stream or an event would order is ordered by data. The classes here let code that names streams run as
it is (FSDP2 has five of them, data loaders copy on one): entering a stream changes what ``current_stream`` says and
nothing else.

They are torch's generic ``torch.Stream("jax")`` and ``torch.Event("jax")`` too, as ``torch.accelerator`` hands them
out. Those are static types, whose methods ask C++ for what a device in Python cannot provide (``synchronize`` and
``elapsed_time`` raise), so the two names are replaced, as ``torch.Generator`` is (``generators.py``): by classes that
make ours for this device, torch's own for any other, and count both as their instances.

An event that is waited for must be over in fact. ``record`` therefore notes the time of the host, and ``synchronize``
waits for all that was launched; a timing event waits in ``record``, so that ``elapsed_time`` measures the device's
work.
"""

from __future__ import annotations

import functools
import itertools
import threading
import time
from typing import Any

import torch

from isthmus._device.torch_glue import patches, private

_ids = itertools.count()  # the first is that of the default stream: 0, as torch.accelerator has it


class Stream(private.Stream):
    """A name for an order of work. ``priority`` and ``device`` are accepted, as every order is the same."""

    priority: int
    _contexts: list[StreamContext]

    def __new__(cls, device: Any = None, priority: int = 0, **kwargs: Any) -> Stream:
        """Return a new stream; torch's class, as ``Tensor.record_stream`` takes no other."""
        number = kwargs["stream_id"] if "stream_id" in kwargs else next(_ids)
        made = super().__new__(cls, stream_id=number, device_index=0, device_type=private.PRIVATE_USE_1)
        made.priority, made._contexts = priority, []
        return made  # type: ignore[no-any-return]

    def synchronize(self) -> None:
        """Wait for the device."""
        # Streams are names only: waiting for one waits for all work.
        _wait()

    def query(self) -> bool:
        """Return whether all work is done, after waiting for it."""
        _wait()
        return True

    def wait_stream(self, stream: Any) -> None:
        """Do nothing: what needs the other stream's results waits for these."""

    def wait_event(self, event: Any) -> None:
        """Do nothing: what needs results from before the event waits for these."""

    def is_capturing(self) -> bool:
        """Return False: XLA captures what it runs by itself."""
        return False

    def record_event(self, event: Any = None) -> Any:
        """Record an event, a new one if none is given, and return it."""
        event = Event() if event is None else event
        event.record(self)
        return event

    def __enter__(self) -> Stream:
        # A stream may be entered again inside itself.
        self._contexts.append(StreamContext(self))
        self._contexts[-1].__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self._contexts.pop().__exit__(*error)

    def __repr__(self) -> str:
        return f"torch.jax.Stream(device=jax:0, id={self.stream_id})"


class Event(private.Event):
    """A point in the work of the device; with ``enable_timing`` one whose time is known."""

    event_id = 0  # in C++ that of an event which was recorded there
    _timed: bool
    _time: float | None

    def __new__(
        cls,
        device: Any = None,
        enable_timing: bool = False,
        blocking: bool = False,
        interprocess: bool = False,
        **kwargs: Any,
    ) -> Event:
        """Return a new event; torch's class, as functions of torch's that take events take no other."""
        # Other arguments have no meaning on this device and are taken silently, as torch's own events do.
        if interprocess:
            raise NotImplementedError("an event of 'jax' cannot be shared with another process")
        made = super().__new__(cls, torch.device("jax", 0), enable_timing=enable_timing)
        made.event_id, made._timed, made._time = next(_ids), enable_timing, None
        return made  # type: ignore[no-any-return]

    @property
    def device(self) -> torch.device:  # type: ignore[override]  # read-only in torch too, whatever its stub says
        """The process's one device."""
        return torch.device("jax", 0)

    def record(self, stream: Any = None) -> Event:  # type: ignore[override]  # torch's returns nothing
        """Note this moment; a timing event waits for the work that was launched before."""
        # The time is that of the host, once the device is done.
        if self._timed:
            _wait()
        self._time = time.perf_counter()
        return self

    def wait(self, stream: Any = None) -> None:
        """Do nothing: what needs results from before the event waits for these."""

    def query(self) -> bool:
        """Return whether the work before the event is done, after waiting for it."""
        self.synchronize()
        return True

    def synchronize(self) -> None:
        """Wait for the work that was launched before the event."""
        # An event that was never recorded is done.
        if self._time is not None:
            _wait()

    def elapsed_time(self, end_event: Event) -> float:  # type: ignore[override]  # of this device alone
        """Return the milliseconds from this event to another; both must have been made with ``enable_timing``."""
        if not (self._timed and end_event._timed):
            raise ValueError("both events must be created with argument 'enable_timing=True'")
        if self._time is None or end_event._time is None:
            raise ValueError("both events must be recorded before their times are compared")
        return (end_event._time - self._time) * 1000.0

    def __repr__(self) -> str:
        return f"torch.jax.Event(device=jax:0, enable_timing={self._timed})"


_default = Stream()


class _Current(threading.local):
    """The stream that this thread is inside of."""

    stream = _default


_current = _Current()


def current_stream(device: Any = None) -> Stream:
    """Return the stream that this thread is inside of."""
    return _current.stream


def default_stream(device: Any = None) -> Stream:
    """Return the stream that a thread begins with."""
    return _default


def set_stream(stream: Stream | None) -> None:
    """Make a stream the current one of this thread; None leaves it."""
    if stream is not None:
        _current.stream = stream


class StreamContext:
    """Makes a stream the current one inside a block; None leaves it."""

    def __init__(self, stream: Stream | None) -> None:
        self.stream = stream

    def __enter__(self) -> None:
        self._before = _current.stream
        set_stream(self.stream)

    def __exit__(self, *error: object) -> None:
        _current.stream = self._before


def stream(stream: Stream | None) -> StreamContext:
    """Return a block inside of which ``stream`` is the current one."""
    return StreamContext(stream)


class _ByDevice(type(private.Stream)):  # type: ignore[misc]  # whatever torch's classes are made by
    """What ``torch.Stream`` and ``torch.Event`` are made by: the class of a call's device is called in their place."""

    def __call__(cls, device: Any = None, *args: Any, **kwargs: Any) -> Any:
        made_by = vars(cls).get("classes")
        # A subclass, of torch's own or of a user's, is none of the two.
        if made_by is None:
            return super().__call__(*(() if device is None else (device,)), *args, **kwargs)
        theirs, ours = made_by
        if kwargs.get("device_type", private.PRIVATE_USE_1) != private.PRIVATE_USE_1:
            return theirs(*(() if device is None else (device,)), *args, **kwargs)
        where = torch.accelerator.current_accelerator() if device is None else torch.device(device)
        if where is not None and where.type == "jax":
            return ours(device, *args, **kwargs)
        return theirs(device, *args, **kwargs)

    def __instancecheck__(cls, instance: object) -> bool:
        made_by = vars(cls).get("classes")
        return super().__instancecheck__(instance) if made_by is None else isinstance(instance, made_by[0])

    def __subclasscheck__(cls, subclass: type) -> bool:
        made_by = vars(cls).get("classes")
        return super().__subclasscheck__(subclass) if made_by is None else issubclass(subclass, made_by[0])


def install() -> None:
    """Let ``torch.Stream`` and ``torch.Event`` know the device; called by ``import torch``."""
    for ours in (Stream, Event):
        name = ours.__name__
        patches.replace("torch", name, functools.partial(_by_device, ours))


def _by_device(ours: type, theirs: type) -> type:
    names = {"classes": (theirs, ours), "__module__": __name__, "__doc__": theirs.__doc__}
    return _ByDevice(theirs.__name__, (theirs,), names)


def record_stream(self: torch.Tensor, s: torch.Stream) -> None:
    """Do nothing: an array is not freed before the programs that read it are done."""


KERNELS = {"record_stream": record_stream}


def _wait() -> None:
    from isthmus._device.torch_glue.torch_jax import synchronize

    synchronize()
