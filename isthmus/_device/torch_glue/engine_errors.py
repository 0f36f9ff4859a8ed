"""Exceptions that Python code raises during backward, in hooks, custom functions and recomputation; and Ctrl-C.

torch's autograd engine asks the device's guard, an object in Python, for its ``type_`` while a C++ exception unwinds. A
hook throws with Python's error indicator still set, and ``~StreamGuard`` calls the guard; a call that returns a result
while the indicator is set is a SystemError, and that inside a destructor ends the process. So the guard takes the
pending error away, and ``run_backward`` of torch's engine, the one place that enters it, raises the same object again.

    hook raises -> indicator is set -> guard.type_ takes it -> list of this pass -> run_backward raises it

- **The guard** (``Guarding``). ``type_`` is a property, whose getter is a chain of C iterators. A Python function would
  do until it is traced: a debugger's trace function is called at its entry, while the error is pending.
- **Which pass an error belongs to** (``Owners``). Autograd's one thread for the device works for all passes of all
  threads. ``run_backward`` puts a list into torch's thread-local state, which torch carries to each thread that works
  for the pass; passes inside passes have lists of their own. Nothing else holds the list: an error not raised goes
  with it. torch 2.11 cannot take such a list back, and there errors are told apart by thread (``OwnersByThread``).
- **Ctrl-C.** pybind11 lets Python handle signals between getting ``type_`` and calling it, where C++ allows no
  exception. The getter puts the answer into a list and the call takes it out, so Python's handler of Ctrl-C, which is
  ours from the first tensor on, knows that it is called in between and puts the signal off (``Interrupts``). For
  handlers of others the getter takes back a Ctrl-C that Python has not handled yet, and the call repeats it. A signal
  that arrives while C++ runs a pass on the main thread is handled when the pass has ended (``Signals``).

docs/faults.md tells users, and says which change in torch would make all this unnecessary.
"""

from __future__ import annotations

# The module ``signal`` turns every number into an enum, which takes microseconds.
import _signal  # type: ignore[import-not-found]
import ctypes
import functools
import operator
import struct
import sys
import threading
from collections.abc import Callable, Iterator
from itertools import repeat
from types import FrameType
from typing import Any

from isthmus._device.torch_glue import patches, private
from isthmus._upstream import choose, optional

_OWNER, _NAME = "torch.autograd.variable.Variable", "_execution_engine"
_KEY = "isthmus: errors of this backward"


class _Indicator:
    """Python's error indicator, which says that an exception is on its way.

    ``next(taken)`` clears it and returns what it held, ``none`` if nothing, all in C; ``put(*addresses(...))`` sets it
    again and so raises the exception where it is called.
    """

    def __init__(self) -> None:
        api, address = ctypes.pythonapi, ctypes.c_void_p
        self.taken: Iterator[Any]
        self.addresses: Callable[[Any], tuple[int, ...]]
        if sys.version_info >= (3, 12):
            take = ctypes.PYFUNCTYPE(address)(("PyErr_GetRaisedException", api))
            self.taken, self.none = iter(take, "never"), None
            self.put = ctypes.PYFUNCTYPE(None, address)(("PyErr_SetRaisedException", api))
            self.addresses = lambda taken: (taken,)
            return
        three = struct.Struct("3P")
        slots, places = (ctypes.c_char * three.size)(), range(0, three.size, ctypes.sizeof(address))
        fetch = ctypes.PYFUNCTYPE(None)(("PyErr_Fetch", api))
        # The arguments are made now: no object can be made while an error is pending.
        fetched = map(fetch, *(repeat(ctypes.byref(slots, place)) for place in places))
        # All threads share the slots: they are read before the GIL can be released, as no step between is Python code.
        # ``fetch`` returns None, which is getattr's default here.
        self.taken = map(getattr, repeat(slots), repeat("raw"), fetched)
        self.none, self.addresses = bytes(three.size), three.unpack
        self.put = ctypes.PYFUNCTYPE(None, address, address, address)(("PyErr_Restore", api))


class _Answers(dict[Any, Any]):
    """What answers for the guard, by what was taken from the indicator: an error is a missing key, and is kept."""

    def __init__(self, none: Any, answer: Any, indicator: _Indicator) -> None:
        super().__init__({none: answer})
        self.answer = answer
        self.indicator = indicator

    def __missing__(self, taken: Any) -> Any:
        try:
            self.indicator.put(*self.indicator.addresses(taken))
        except BaseException as error:
            _keep(error)
        return self.answer


_interrupted = ctypes.PYFUNCTYPE(ctypes.c_int)(("PyOS_InterruptOccurred", ctypes.pythonapi))
"""Says, 1 or 0, whether a Ctrl-C waits for its handler, and takes it back; 0 on other threads than the main one."""


class Interrupts:
    """Ctrl-C while C++ asks the guard: what answers, and a handler that lets C++ have its answer first.

    ``asked`` holds what answers from the fetch of ``type_`` to its call, of which no other thread runs anything: all
    of it is C with the GIL held. The handler exchanges it for what repeats the Ctrl-C as well, for Python to handle at
    the next bytecode.
    """

    def __init__(self) -> None:
        self.asked: list[Callable[[], Any]] = []
        self.postponed: Callable[[], Any] = bool
        self.default = _signal.default_int_handler
        self.ours = self.handle  # one object, to be recognized by

    def answering(self, answer: Any) -> tuple[Callable[[], Any], Callable[[], Any]]:
        """Return functions in C that answer: plainly, and so that a Ctrl-C is repeated."""
        repeated = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.c_int)(("PyErr_SetInterruptEx", ctypes.pythonapi))
        repeated.restype = (answer,).__getitem__  # of 0, which it returns
        # Two objects: the handler must know its own.
        self.postponed = functools.partial(repeated, _signal.SIGINT)
        return repeat(answer).__next__, functools.partial(repeated, _signal.SIGINT)

    def handle(self, number: int, frame: FrameType | None) -> None:
        """Raise KeyboardInterrupt as Python's own handler does, or have C++'s answer raise it."""
        # Signals are handled once between a fetch and its call. Were an answer ever fetched and not called for, a
        # second Ctrl-C would find that the first still waits.
        if self.asked and self.asked[-1] is not self.postponed:
            self.asked[-1] = self.postponed
            return
        self.asked.clear()
        self.default(number, frame)

    def install(self) -> None:
        """Be what ``signal.default_int_handler`` is, and the handler where that one is in place.

        Who looks whether Python's own handler is there, as ``asyncio.run`` does, so still finds it.
        """
        patches.replace("signal", "default_int_handler", lambda theirs: self.ours)
        if threading.current_thread() is threading.main_thread():
            self.current(_signal.SIGINT)

    def current(self, number: int) -> Any:
        """Return the handler of a signal, on the main thread; Python's own for Ctrl-C becomes ours first.

        Jupyter puts Python's own back before each cell.
        """
        handler = _signal.getsignal(number)
        if handler is self.default:
            handler = self.ours
            _signal.signal(number, handler)
        return handler


interrupts = Interrupts()


Errors = list[BaseException]


class Owners:
    """Which pass an error belongs to: torch carries the list of a pass to every thread that works for it."""

    def begin(self, errors: Errors) -> Errors | None:
        """Begin a pass on this thread, with a list for its errors; return that of the pass around it."""
        around: Errors | None = private.carried(_KEY)
        private.carry(_KEY, errors)
        return around

    def end(self, around: Errors | None) -> None:
        """End the pass that was begun inside ``around``."""
        private.carry(_KEY, around)

    def current(self) -> Errors | None:
        """Return the list of the pass that this thread works for."""
        return private.carried(_KEY)  # type: ignore[no-any-return]

    def claimed(self, errors: Errors) -> Errors:
        """Return the errors of a pass that failed, given its list."""
        return errors


class OwnersByThread(Owners):
    """The same by threads, where torch cannot carry a list: autograd's own threads share one.

    A pass that failed and finds nothing in its list takes the oldest error of the shared one. So only passes of several
    threads that fail at the same time may raise each other's errors.
    """

    def __init__(self) -> None:
        self.local, self.lock = threading.local(), threading.RLock()
        self.shared: Errors = []
        self.running = 0

    def begin(self, errors: Errors) -> Errors | None:
        """Begin a pass on this thread."""
        around: Errors | None = getattr(self.local, "errors", None)
        with self.lock:
            self.running += 1
        self.local.errors = errors
        return around

    def end(self, around: Errors | None) -> None:
        """End a pass; with the last one what no pass has taken is dropped."""
        self.local.errors = around
        with self.lock:
            self.running -= 1
            if not self.running:
                self.shared.clear()

    def current(self) -> Errors | None:
        """Return the list of the pass that this thread began, else the shared one while any pass runs."""
        own: Errors | None = getattr(self.local, "errors", None)
        return self.shared if own is None and self.running else own

    def claimed(self, errors: Errors) -> Errors:
        """Return the errors of a pass that failed."""
        with self.lock:
            return errors or [self.shared.pop(0) for _ in self.shared[:1]]


def _carrying() -> Owners:
    errors: Errors = []
    private.carry(_KEY, errors)
    if private.carried(_KEY) is not errors:
        raise TypeError("torch does not keep an object in its thread-local state")
    private.carry(_KEY, None)
    return Owners()


_by_thread: Owners = OwnersByThread()
owners = choose(
    "_device.torch_glue.engine_errors.owners",
    "backward passes of several threads that fail at the same time may raise each other's exceptions",
    _carrying,
    _by_thread,
)


class _Unclaimed:
    """An error of a pass that ``run_backward`` did not begin: Python prints it, as it does those in ``__del__``."""

    def __init__(self, error: BaseException) -> None:
        self.error = error

    def __del__(self) -> None:
        raise self.error


def _keep(error: BaseException) -> None:
    """Keep an error for the pass that this thread works for, with the traceback it had before this module raised it."""
    traceback = error.__traceback__
    error.__traceback__ = traceback and traceback.tb_next
    errors = owners.current()
    if errors is None:
        _Unclaimed(error)
    else:
        errors.append(error)


class Guarding:
    """What the device's guard has for ``type_``: a chain that takes a pending error and a Ctrl-C away first."""

    def __init__(self, guard: Any, answer: Any) -> None:
        indicator = _Indicator()
        ways, asked = interrupts.answering(answer), interrupts.asked
        taken = map(_Answers(indicator.none, ways, indicator).__getitem__, indicator.taken)
        # mypy takes ``getitem`` for its overload of slices.
        chosen: Any = map(operator.getitem, taken, iter(_interrupted, -1))
        # pybind11 calls no PyCFunction, which it takes for a method that is not overridden; a partial is none.
        call = functools.partial(next, map(operator.call, iter(asked.pop, None)))
        # ``append`` returns None.
        answers = map({None: call}.__getitem__, map(asked.append, chosen))
        if next(answers)() is not answer:
            raise TypeError("an error is found where none is pending")
        # The guard, which the property gives to its getter, becomes next's default, which is never needed.
        type(guard).type_ = property(functools.partial(next, answers))

    def run(self, theirs: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run one backward pass; an error that the guard took from it is raised where torch would have raised it."""
        errors: Errors = []
        around = owners.begin(errors)
        try:
            return theirs(*args, **kwargs)
        except SystemError:
            # What Python makes of a function that fails without an error: "returned NULL without setting an exception".
            errors = owners.claimed(errors)
            if not errors:
                raise
        finally:
            owners.end(around)
        error = errors[-1]
        errors.clear()
        context = error.__context__
        try:
            raise error
        finally:
            # ``raise`` has put there what the caller is handling just now.
            if context is not None:
                error.__context__ = context
            del error, context  # their tracebacks hold this frame


class Signals:
    """Signals of the main thread while it runs a pass: those that arrive while C++ is running are handled afterwards.

    Their handlers are Python's and may raise. In a hook they do so at once. Where C++ cannot stand an exception, Python
    calls them with a frame of this module, or of ``private`` as it calls that: the last Python code that ran is the
    call of the engine.
    """

    # Ctrl-C first. While a thread of autograd's runs the pass, C++ calls the guard on the main thread for microseconds
    # only, and the others are left as they are: a pass would take a microsecond more.
    numbers = tuple(
        getattr(_signal, name)
        for name in ("SIGINT", "SIGTERM", "SIGALRM", "SIGHUP", "SIGUSR1", "SIGUSR2", "SIGBREAK")
        if hasattr(_signal, name)
    )
    __slots__ = ("deferred", "ours", "theirs")

    def __init__(self) -> None:
        self.theirs: dict[int, Callable[[int, FrameType | None], Any]] = {}
        self.deferred: list[int] = []
        self.ours = self.handle  # one object, to be recognized by

    def begin(self) -> None:
        """Take the place of the handlers that are Python functions."""
        for number in self.numbers if private.runs_backward_here() else self.numbers[:1]:
            handler = interrupts.current(number)
            if callable(handler):
                self.theirs[number] = handler
                _signal.signal(number, self.ours)

    def handle(self, number: int, frame: FrameType | None) -> None:
        """Handle a signal, now or at the end of the pass."""
        if _is_ours(frame):
            self.deferred.append(number)
        else:
            self.theirs[number](number, frame)

    def end(self) -> None:
        """Put the handlers back and handle what has been deferred."""
        for number, handler in self.theirs.items():
            if _signal.getsignal(number) is self.ours:  # a hook may have put another one there
                _signal.signal(number, handler)
        if not self.deferred:
            return
        frame: FrameType | None = sys._getframe()
        while _is_ours(frame):
            frame = frame and frame.f_back
        for number in self.deferred:
            self.theirs[number](number, frame)


def _is_ours(frame: FrameType | None) -> bool:
    return frame is not None and frame.f_code.co_filename in _FILES


_FILES = {_is_ours.__code__.co_filename, private.carried.__code__.co_filename}


def install(guard: Any, answer: Any) -> None:
    """Let the device's guard, whose type is ``answer``, take pending errors, and the engine raise them."""
    guarding = _guarding(guard, answer)
    if guarding is not None:
        _take_over(guarding)
        interrupts.install()


@optional("an exception in Python during backward ends the process", lambda guard, answer: None)
def _guarding(guard: Any, answer: Any) -> Guarding | None:
    return Guarding(guard, answer)


@optional(
    "an exception in Python during backward is printed, and backward() raises a SystemError instead",
    lambda guarding: None,
)
def _take_over(guarding: Guarding) -> None:
    """Take the place of the engine that torch enters for every backward pass; a second call does nothing."""
    if not callable(getattr(patches.object_at(_OWNER), _NAME).run_backward):
        raise TypeError(f"{_OWNER}.{_NAME}.run_backward cannot be called")
    patches.replace(_OWNER, _NAME, functools.partial(_engine, guarding))


def _engine(guarding: Guarding, theirs: Any) -> Any:
    """Return an engine that does what theirs does, and raises what the guard took."""

    class Engine(type(theirs)):  # type: ignore[misc]
        def run_backward(self, *args: Any, **kwargs: Any) -> Any:
            if threading.get_ident() != threading.main_thread().ident:
                return guarding.run(theirs.run_backward, args, kwargs)
            signals = Signals()
            try:
                signals.begin()
                return guarding.run(theirs.run_backward, args, kwargs)
            finally:
                signals.end()

    # Where code that Dynamo could not trace calls backward, Dynamo would look at these.
    functions: list[Any] = [
        Engine.run_backward,
        Guarding.run,
        Signals.begin,
        Signals.handle,
        Signals.end,
        _is_ours,
    ]
    functions += [_Answers.__missing__, _keep, private.carry, private.carried]
    functions += [owners.begin, owners.end, owners.current, owners.claimed]
    for function in functions:
        private.hide_from_dynamo(function)
    return Engine()
