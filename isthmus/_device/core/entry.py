"""The function torch calls for an op: its key spelled out argument by argument, so that a call runs no loop.

The source is written from the schema and compiled by ``exec``, once per overload. For ``aten.add.Tensor`` it reads::

    def aten_add_Tensor(self=_ABSENT, other=_ABSENT, *, alpha=_ABSENT):
        if _mode.recording and _here.lazy and _is_clean():
            return _recorded(self, other, alpha=alpha)  # the twin for lazy mode
        _inputs = []
        if isinstance(self, _Tensor):
            try:
                _buffer = self.untyped_storage()._buffer
                _offset = self.storage_offset()
            except AttributeError:
                _buffer, _offset = _foreign(self), 0  # a CPU scalar, or an error
            _part_0 = (_buffer.signature, self.dtype, self.shape, self.stride(), _offset != 0)
            _inputs.append(_buffer.held)
            if _offset:
                _inputs.append(_offset_of(_offset))
        else:
            _part_0 = _number_part(self, _inputs, _number)
        ...  # the same for ``other``
        _part_2 = alpha if alpha is _ABSENT else _list_part(alpha, True, _inputs, ...)
        _values = (self, other, alpha,)
        _key = (_default_dtype(), _part_0, _part_1, _part_2,)
        try:
            _plan = _plans.get(_key)
            if _plan is None:
                _plan = _new_plan(_key, _inputs, _values)
            return _plan(_inputs, _values)
        except Exception as _error:
            __tracebackhide__ = True  # for IPython: this frame is none of the user's
            _recover(_error, _inputs, _values)  # raises it, unless the call may run again
        return _again(_run, self, other, alpha=alpha)

``linecache`` has the source, so tracebacks and debuggers show it. Beside a loop over the schema that makes the same
key, it saves 20 to 35 % of an op's time (``benchmarks/entry.py``: ``add`` takes 15.1 µs by the loop, 11.0 µs so).

The order in which inputs are appended is the order in which ``slots.slot_for`` numbers them: arguments in the schema's
order, a tensor's array before its offset, the draw of a random op last. A change here is a change there.

In lazy mode the twin runs: inputs are nodes of the recorded graph, and the plan is a recipe that makes more of them
(``_lazy/node_builder.py``).
"""

from __future__ import annotations

import keyword
import linecache
import threading
from collections.abc import Callable
from operator import attrgetter
from threading import get_ident
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from isthmus._device.checks import scalar_checks
from isthmus._device.core import donation, generator, mode
from isthmus._device.core.buffer import Buffer, Signature, buffer_of
from isthmus._device.core.host_tensors import array_from_cpu
from isthmus._graph.arguments import NUMBERS, tensors_in
from isthmus._graph.private import address_of, storage_ids, storage_of
from isthmus._graph.schema import ABSENT, Argument
from isthmus._runtime import memory, private, tracebacks
from isthmus._runtime.host_arrays import LARGEST, device_number

if TYPE_CHECKING:
    from isthmus._device.core.dispatch import Kernel

# Exact types, looked up with ``map(type, ...)``: a subclass of Tensor takes the slow way.
_TENSORS = frozenset({Tensor, torch.nn.Parameter})
# C functions for ``map`` in ``_tensors_part``, so that its loop runs in C.
_STORAGE, _OFFSET, _STRIDE = Tensor.untyped_storage, Tensor.storage_offset, Tensor.stride
_DTYPE, _SHAPE = attrgetter("dtype"), attrgetter("shape")
_BUFFER, _SIGNATURE, _HELD = attrgetter("_buffer"), attrgetter("signature"), attrgetter("held")
# Types whose values are equal only where they are the same: no 0.0 and -0.0, no 1 and 1.0 and True.
_PLAIN = ("int", "SymInt", "bool", "str", "ScalarType", "Layout", "Device", "MemoryFormat")
_EXACT = {*_PLAIN, *(f"Optional[{name}]" for name in _PLAIN)}
_EXACT_LISTS = {"List[int]", "List[SymInt]", "List[bool]", "Optional[List[int]]", "Optional[List[SymInt]]"}

_TENSOR = """
    if isinstance({name}, _Tensor):
        try:
            _buffer = {name}.untyped_storage()._buffer
            _offset = {name}.storage_offset()
        except AttributeError:
            _buffer, _offset = {foreign}({name}), 0
        {part} = (_buffer.signature, {name}.dtype, {name}.shape, {name}.stride(), _offset != 0)
        {take}
        if _offset:
            _inputs.append(_offset_of(_offset))
    else:
        {part} = {other}({name}, _inputs, _number)"""
# What eager calls take of a buffer: whatever it holds, a marker included, which fails later and cheaply.
_TAKE = "_inputs.append(_buffer.held)"
# What recorded calls take: the node itself, or a leaf of the trace for an array. With traces of several threads
# ``_array_of`` looks whose node it is.
_TAKE_NODE = """_held = _buffer.held
        _inputs.append(_held if type(_held) is _Node and not _trace.several else _array_of(_buffer))"""
_RECORD = """
    _plan = _plans.get(_key)
    if _plan is None:
        _plan = _new_plan(_key, _inputs, _values)
    return _plan(_inputs, _values)"""
_RECORD_DRAW = """
    _inputs.append(_draw({generator}))"""
# A call that fails because an input is not there yet runs again, and must not have drawn by then.
_DRAW = """
    if _is_unready(_inputs):
        _settle(_values)
        return _run({passed_on})
    _inputs.append(_draw({generator}))"""
_RUN = """
    try:
        _plan = _plans.get(_key)
        if _plan is None:
            _plan = _new_plan(_key, _inputs, _values)
        return _plan(_inputs, _values)
    except Exception as _error:
        __tracebackhide__ = True
        _recover(_error, _inputs, _values)
    return _again(_run, {passed_on})"""


def make_entry(kernel: Kernel) -> Callable[..., Any]:
    """Return the function torch calls for the kernel's op."""
    # An entry that records costs one attribute read here while no thread ever was lazy.
    source = [
        f"    if _mode.recording and _here.lazy and _is_clean():\n        return _recorded({_passed_on(kernel)})",
        *_body(kernel, _TAKE, _DRAW, _RUN),
    ]
    # ``watch`` of ``dispatch.Kernel`` replaces these two names in the function's globals.
    scope = {**_scope(kernel), "_plans": kernel.plans, "_new_plan": kernel.new_plan}
    scope |= {
        "_here": mode.here,
        "_mode": mode.current,
        "_is_clean": private.trace_state_clean,
        "_recorded": _twin(kernel, scope),
    }
    scope |= {"_number": device_number, "_offset_of": device_number, "_draw": _draw}
    scope["_run"] = entry = _execute(source, kernel, scope)
    return entry


def _twin(kernel: Kernel, scope: dict[str, Any]) -> Callable[..., Any]:
    """Return a stand-in for the recording entry, which is made at the first call and takes its place in ``scope``.

    Most ops are never recorded, and ``_lazy`` sits above the device, so it cannot be imported here.
    """

    def first(*args: Any, **kwargs: Any) -> Any:
        __tracebackhide__ = True  # for IPython and pytest
        # The entry finds the recording twin from now on without this detour.
        scope["_recorded"] = twin = mode.current.recording_entry(kernel)
        return twin(*args, **kwargs)

    return first


def make_recording_entry(kernel: Kernel, names: dict[str, Any]) -> Callable[..., Any]:
    """Return the function that records a call; ``names`` say how inputs become nodes."""
    body = [
        f"    {line}"
        for part in _body(kernel, _TAKE_NODE, _RECORD_DRAW, _RECORD)
        for line in part.split("\n")
    ]
    # ``enter`` shows this thread's trace in place of another's. The limit is for loops that nothing reads,
    # which would record for ever.
    start = """    with _lock:
        if _trace.owner != _ident():
            _trace.enter(_ident())
        if _trace.size >= _trace.limit:
            _mode.materialise(because="the limit on graph size")"""
    scope = {**_scope(kernel), "_plans": kernel.recipes, "_mode": mode.current, "_ident": get_ident, **names}
    return _execute([start, *body], kernel, scope)


def _body(kernel: Kernel, take: str, draw: str, run: str) -> list[str]:
    """Return the lines that make a key and inputs of the arguments and ``run`` the plan they find."""
    arguments, names = kernel.schema.arguments, _names(kernel)
    parts = [f"_part_{n}" for n in range(len(arguments))]
    body = [
        _part(a, names[a.name], p, kernel.dynamic[a.name], take)
        for a, p in zip(arguments, parts, strict=True)
    ]
    # A generator is drawn from, and not part of what is compiled.
    keyed = [part for a, part in zip(arguments, parts, strict=True) if a.name != "generator"]
    # Promotion of numbers depends on it, so a program holds for one default dtype.
    extras = ["_default_dtype()"]
    if kernel.matmul:
        # ``torch.set_float32_matmul_precision`` changes what XLA is asked for.
        extras.append("_matmul_precision()")
    if kernel.random:
        # Inside a JAX trace random words are tracers, and such a plan is inlined instead of compiled.
        extras.append("_own.is_traced")
    if kernel.schema.mutated:
        # ``x.add_(x)`` reads what it writes: which arguments share a storage decides how a program may write.
        extras.append("_alias_pattern(_values)")
    passed_on = _passed_on(kernel)
    like = next((names[a.name] for a in arguments if a.kind in ("tensor", "tensors")), None)
    dtype = "dtype" if "dtype" in names else None
    # Numbers are no part of the key, so those that could be refused are looked at in every call.
    watched = [
        f"    if _suspicious_{name}({names[name]}, {like}, {dtype}):\n        _refuse(_op, _values)"
        for name in scalar_checks.watched(kernel.schema)
    ]
    return [
        "    _inputs = []",
        *body,
        f"    _values = ({', '.join(names.values())}{',' if names else ''})",
        *watched,
        f"    _key = ({', '.join([*extras, *keyed])},)",
        draw.format(generator=names.get("generator", "None"), passed_on=passed_on) if kernel.random else "",
        run.format(passed_on=passed_on),
    ]


def _names(kernel: Kernel) -> dict[str, str]:
    # Names that begin with an underscore are ours: no schema has any.
    names = [a.name for a in kernel.schema.arguments]
    return {name: f"{name}_" if keyword.iskeyword(name) else name for name in names}


def _passed_on(kernel: Kernel) -> str:
    names = _names(kernel)
    return ", ".join(
        f"{names[a.name]}={names[a.name]}" if a.keyword_only else names[a.name]
        for a in kernel.schema.arguments
    )


def _function_name(kernel: Kernel) -> str:
    return str(kernel.op).replace(".", "_")


def _parameters(arguments: tuple[Argument, ...], names: dict[str, str]) -> str:
    parameters, keyword_only = [], False
    for argument in arguments:
        if argument.keyword_only and not keyword_only:
            parameters.append("*")
            keyword_only = True
        # A required argument may follow an optional one in a schema, not in Python: torch passes it anyway.
        parameters.append(f"{names[argument.name]}=_ABSENT")
    return ", ".join(parameters)


def _part(argument: Argument, name: str, part: str, dynamic: bool, take: str) -> str:
    if argument.name == "generator":
        return ""
    # What is written must be ours: a CPU scalar's array is a copy.
    foreign = "_buffer_of" if argument.mutated else "_foreign"
    if argument.kind == "tensor":
        other = "_number_part" if dynamic else "_static_part"
        return _TENSOR.format(name=name, part=part, other=other, take=take, foreign=foreign)
    if argument.kind == "tensors" or dynamic:
        listed = f"_list_part({name}, {dynamic}, _inputs, _number, _array_of, _offset_of, {foreign})"
        return f"    {part} = {name} if {name} is _ABSENT else {listed}"
    # These are compared as they are: equal values of such a type mean the same program.
    if argument.type in _EXACT:
        return f"    {part} = {name}"
    if argument.type in _EXACT_LISTS:
        # A list cannot be hashed, and a tuple in its place would be made by a call of ours.
        return f"    {part} = tuple({name}) if type({name}) is list else {name}"
    return f"    {part} = _static_part({name})"


def _scope(kernel: Kernel) -> dict[str, Any]:
    return {
        "_ABSENT": ABSENT,
        "_Tensor": Tensor,
        "_again": again,
        "_alias_pattern": alias_pattern,
        "_array_of": None,
        "_buffer_of": buffer_of,
        "_default_dtype": torch.get_default_dtype,
        "_foreign": foreign,
        "_is_unready": donation.is_unready,
        "_list_part": list_part,
        "_matmul_precision": torch.get_float32_matmul_precision,
        "_number_part": number_part,
        "_op": kernel.op,
        "_own": generator.own,
        "_recover": recover,
        "_settle": settle,
        "_refuse": scalar_checks.refuse,
        "_static_part": static_part,
        **{f"_suspicious_{name}": test for name, test in scalar_checks.watched(kernel.schema).items()},
    }


def _execute(body: list[str], kernel: Kernel, scope: dict[str, Any]) -> Callable[..., Any]:
    filename = f"<isthmus entry {kernel.op}>"
    head = f"def {_function_name(kernel)}({_parameters(kernel.schema.arguments, _names(kernel))}):"
    source = "\n".join([head, *body])
    exec(compile(source, filename, "exec"), scope)
    # Tracebacks and debuggers find the lines here.
    # ``linecache`` asks for size, time, lines and name; no time means that it never looks for a file.
    linecache.cache[filename] = (len(source), None, source.splitlines(True), filename)
    return scope[_function_name(kernel)]


class _Retry(threading.local):
    """Whether this thread runs a call for the second time; if that finds no memory either, it raises."""

    again = False


_retry = _Retry()


def recover(error: Exception, inputs: list[Any], values: tuple[Any, ...]) -> None:
    """Return if the call that raised ``error`` may be made again, else raise the error.

    Two calls may: one that read a buffer whose array was elsewhere or only recorded, and, once, one that found no
    memory.
    """
    # The likeliest reason: an input is a node or a marker. It costs nothing to look, and JAX's error says only
    # that some type is not an array.
    if donation.is_unready(inputs):
        settle(values)
    elif memory.is_exhausted(error):
        # The second try of the same call: room has been made, and it was not enough.
        if _retry.again:
            raise memory.exhausted(error) from error
        memory.make_room(error, inputs)
    else:
        __tracebackhide__ = True  # for IPython and pytest
        tracebacks.shorten(error)
        raise


def settle(values: tuple[Any, ...]) -> None:
    """Get the array of every tensor of a call into its buffer.

    That waits for another thread which rewrites it, runs the graph in which it was recorded, or takes it back from the
    program that keeps it between runs.
    """
    for tensor in tensors_in(values):
        if tensor.device.type == "jax":
            # ``value`` puts the array into the buffer; what it returns is not needed.
            _ = buffer_of(tensor).value


def again(entry: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Make a call for the second time."""
    _retry.again = True
    try:
        return entry(*args, **kwargs)
    finally:
        _retry.again = False


def number_part(value: Any, inputs: list[Any], number: Callable[[Any], Any]) -> Any:
    """Return a run-time number's part of the key, its type, and add it to the inputs."""
    kind = type(value)
    if kind in NUMBERS:
        inputs.append(number(value))
        # An integer beyond int64 is uint64 in torch's promotion, so its type alone is not enough for the key.
        return kind if kind is not int or value <= LARGEST else "uint64"
    return static_part(value)


def static_part(value: Any, *_: Any) -> Any:
    """Return a static value's part of the key."""
    kind = type(value)
    if kind is float or kind is complex:
        return (kind, repr(value))  # 0.0 equals -0.0, nan equals nothing, 1.0 equals 1
    if kind is list:
        return tuple([static_part(item) for item in value])
    return (kind, value) if kind is bool else value


def list_part(
    values: Any,
    dynamic: bool,
    inputs: list[Any],
    number: Callable[[Any], Any],
    array_of: Callable[[Buffer], Any] | None,
    offset_of: Callable[[Any], Any],
    foreign: Callable[[Tensor], Buffer],
) -> Any:
    """Return a list's part of the key, of tensors and of numbers; a number alone is like a list of one."""
    if type(values) is not list:
        return number_part(values, inputs, number) if dynamic else static_part(values)
    # A set of types: the two cases below are nearly all calls, and need no look at each item.
    kinds = {*map(type, values)}
    if kinds <= _TENSORS:
        return _tensors_part(values, inputs, array_of, offset_of, foreign)
    if dynamic and kinds == {float}:
        inputs += map(number, values)
        return (float,) * len(values)
    parts: list[Any] = []
    for value in values:
        if isinstance(value, Tensor):
            parts += _tensors_part([value], inputs, array_of, offset_of, foreign)
        else:
            parts.append(number_part(value, inputs, number) if dynamic else static_part(value))
    return tuple(parts)


def _tensors_part(
    tensors: list[Tensor],
    inputs: list[Any],
    array_of: Callable[[Buffer], Any] | None,
    offset_of: Callable[[Any], Any],
    foreign: Callable[[Tensor], Buffer],
) -> tuple[Any, ...]:
    """Return the part of the key that tensors have, and add their arrays and offsets to the inputs.

    ``map`` over C functions runs the loop in C: an optimizer step has hundreds of tensors in each of its lists.
    """
    try:
        buffers = [*map(_BUFFER, map(_STORAGE, tensors))]
        offsets = [*map(_OFFSET, tensors)]
    # A tensor of another device or a sparse one is in the list: only then is each looked at.
    except AttributeError:
        ours = [tensor.device.type == "jax" for tensor in tensors]
        pairs = [*zip(tensors, ours, strict=True)]
        buffers = [buffer_of(tensor) if own else foreign(tensor) for tensor, own in pairs]
        offsets = [tensor.storage_offset() if own else 0 for tensor, own in pairs]
    held = [*map(_HELD, buffers)]
    # ``array_of`` makes leaves of a recorded graph; eager calls take what the buffers hold.
    if array_of is not None:
        held = [*map(array_of, buffers)]
    # Most lists have no offset at all, and are appended in one step.
    if any(offsets):
        for array, offset in zip(held, offsets, strict=True):
            inputs += (array, offset_of(offset)) if offset else (array,)
    else:
        inputs += held
    layouts = (*map(_SHAPE, tensors), *map(_STRIDE, tensors), *map(bool, offsets))
    # All signatures, then all dtypes, then all layouts: as long as the list has one length, that is as good a
    # key as one tuple per tensor, and is made by C loops.
    return (*map(_SIGNATURE, buffers), *map(_DTYPE, tensors), *layouts)


def foreign(tensor: Tensor) -> Buffer:
    """Return a buffer for a tensor of another device: only a 0-dim one on the CPU may join in.

    It holds that one element, so the tensor starts at its beginning, wherever it lies in its own storage.
    """
    if tensor.dim() or tensor.device.type != "cpu":
        return buffer_of(tensor)  # raises: this is not a "jax" tensor
    array = array_from_cpu(tensor)
    # isthmus.jit must read such a scalar again at every replay.
    if mode.current.capture is not None:
        mode.current.capture.note_host(array, tensor, array_from_cpu)
    return Buffer(array, Signature.of(array))


def alias_pattern(values: tuple[Any, ...]) -> tuple[int, ...]:
    """Return, for each tensor of a call, the first one that shares its storage; () where none do."""
    storages: list[int] = []
    for value in values:
        if isinstance(value, Tensor):
            storages.append(address_of(storage_of(value)))
        elif type(value) is list:
            storages += storage_ids([item for item in value if isinstance(item, Tensor)])
    # The common case, kept short: one tensor, or tensors that share nothing.
    if len(storages) < 2 or len(set(storages)) == len(storages):
        return ()
    first: dict[int, int] = {}
    return tuple([first.setdefault(storage, index) for index, storage in enumerate(storages)])


def _draw(source: Any) -> Any:
    return generator.draw(None if source is ABSENT else source)
