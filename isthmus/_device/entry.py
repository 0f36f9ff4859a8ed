"""The function torch calls for an op: its key spelled out argument by argument, so that a call runs no loop.

The source is written from the schema, once per overload. For ``aten.add.Tensor`` it reads::

    def aten_add_Tensor(self=_ABSENT, other=_ABSENT, *, alpha=_ABSENT):
        _inputs = []
        ...  # _part_0, _part_1: signature, dtype and layout of a tensor, whose array joins the inputs
        _part_2 = _list_part(alpha, True, _inputs)
        _values = (self, other, alpha,)
        _key = (_default_dtype(), _part_0, _part_1, _part_2,)
        _plan = _plans.get(_key)
        if _plan is None:
            _plan = _new_plan(_key, _inputs, _values)
        return _plan(_inputs, _values)
"""

from __future__ import annotations

import keyword
import linecache
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from isthmus._device import generator
from isthmus._device.buffer import Buffer, Signature, buffer_of
from isthmus._device.hosts import array_from_cpu
from isthmus._graph.schema import ABSENT, Argument
from isthmus._runtime.hosts import device_number

if TYPE_CHECKING:
    from isthmus._device.dispatch import Kernel

NUMBERS = frozenset({int, float, bool, complex})
# Types whose values are equal only where they are the same: no 0.0 and -0.0, no 1 and 1.0 and True.
_PLAIN = ("int", "SymInt", "bool", "str", "ScalarType", "Layout", "Device", "MemoryFormat")
_EXACT = {*_PLAIN, *(f"Optional[{name}]" for name in _PLAIN)}
_EXACT_LISTS = {"List[int]", "List[SymInt]", "List[bool]", "Optional[List[int]]", "Optional[List[SymInt]]"}

_TENSOR = """
    if isinstance({name}, _Tensor):
        try:
            _buffer = {name}.untyped_storage()._buffer
        except AttributeError:
            _buffer = _foreign({name})
        _offset = {name}.storage_offset()
        {part} = (_buffer.signature, {name}.dtype, {name}.shape, {name}.stride(), _offset != 0)
        _inputs.append(_buffer.value)
        if _offset:
            _inputs.append(_device_number(_offset))
    else:
        {part} = {other}({name}, _inputs)"""


def make_entry(kernel: Kernel) -> Callable[..., Any]:
    """Return the function torch calls for the kernel's op."""
    arguments = kernel.schema.arguments
    # Names that begin with an underscore are ours: no schema has any.
    names = {a.name: f"{a.name}_" if keyword.iskeyword(a.name) else a.name for a in arguments}
    parts = [f"_part_{n}" for n in range(len(arguments))]
    body = [_part(a, names[a.name], p, kernel.dynamic[a.name]) for a, p in zip(arguments, parts, strict=True)]
    keyed = [part for a, part in zip(arguments, parts, strict=True) if a.name != "generator"]
    extras = ["_default_dtype()"]
    if kernel.matmul:
        extras.append("_matmul_precision()")
    if kernel.schema.mutated:
        extras.append("_alias_pattern(_values)")
    source = [
        f"def {_function_name(kernel)}({_parameters(arguments, names)}):",
        "    _inputs = []",
        *body,
        f"    _values = ({', '.join(names.values())}{',' if names else ''})",
        f"    _key = ({', '.join([*extras, *keyed])},)",
        f"    _inputs.append(_draw({names.get('generator', 'None')}))" if kernel.random else "",
        "    _plan = _plans.get(_key)",
        "    if _plan is None:",
        "        _plan = _new_plan(_key, _inputs, _values)",
        "    return _plan(_inputs, _values)",
    ]
    return _execute("\n".join(source), kernel)


def _function_name(kernel: Kernel) -> str:
    return str(kernel.op).replace(".", "_")


def _parameters(arguments: tuple[Argument, ...], names: dict[str, str]) -> str:
    found, keyword_only = [], False
    for argument in arguments:
        if argument.keyword_only and not keyword_only:
            found.append("*")
            keyword_only = True
        # A required argument may follow an optional one in a schema, not in Python: torch passes it anyway.
        found.append(f"{names[argument.name]}=_ABSENT")
    return ", ".join(found)


def _part(argument: Argument, name: str, part: str, dynamic: bool) -> str:
    if argument.name == "generator":
        return ""
    if argument.kind == "tensor":
        return _TENSOR.format(name=name, part=part, other="_number_part" if dynamic else "_static_part")
    if argument.kind == "tensors" or dynamic:
        return f"    {part} = {name} if {name} is _ABSENT else _list_part({name}, {dynamic}, _inputs)"
    if argument.type in _EXACT:
        return f"    {part} = {name}"
    if argument.type in _EXACT_LISTS:
        return f"    {part} = tuple({name}) if type({name}) is list else {name}"
    return f"    {part} = _static_part({name})"


def _execute(source: str, kernel: Kernel) -> Callable[..., Any]:
    filename = f"<isthmus entry {kernel.op}>"
    scope: dict[str, Any] = {
        "_ABSENT": ABSENT,
        "_Tensor": Tensor,
        "_alias_pattern": alias_pattern,
        "_default_dtype": torch.get_default_dtype,
        "_device_number": device_number,
        "_draw": _draw,
        "_foreign": foreign,
        "_list_part": list_part,
        "_matmul_precision": torch.get_float32_matmul_precision,
        "_new_plan": kernel.new_plan,
        "_number_part": number_part,
        "_plans": kernel.plans,
        "_static_part": static_part,
    }
    exec(compile(source, filename, "exec"), scope)
    # Tracebacks and debuggers find the lines here.
    linecache.cache[filename] = (len(source), None, source.splitlines(True), filename)
    return scope[_function_name(kernel)]


def number_part(value: Any, inputs: list[Any]) -> Any:
    """Return a run-time number's part of the key, its type, and add it to the inputs."""
    if type(value) in NUMBERS:
        inputs.append(device_number(value))
        return type(value)
    return static_part(value)


def static_part(value: Any, inputs: Any = None) -> Any:
    """Return a static value's part of the key."""
    kind = type(value)
    if kind is float or kind is complex:
        return (kind, repr(value))  # 0.0 equals -0.0, nan equals nothing, 1.0 equals 1
    if kind is list:
        return tuple([static_part(item) for item in value])
    return (kind, value) if kind is bool else value


def list_part(values: Any, dynamic: bool, inputs: list[Any]) -> Any:
    """Return a list's part of the key, of tensors and of numbers; a number alone is like a list of one."""
    if type(values) is not list:
        return number_part(values, inputs) if dynamic else static_part(values)
    parts: list[Any] = []
    for value in values:
        if isinstance(value, Tensor):
            try:
                buffer = value.untyped_storage()._buffer  # type: ignore[attr-defined]
            except AttributeError:
                buffer = foreign(value)
            offset = value.storage_offset()
            parts += (buffer.signature, value.dtype, value.shape, value.stride(), offset != 0)
            inputs.append(buffer.value)
            if offset:
                inputs.append(device_number(offset))
        else:
            parts.append(number_part(value, inputs) if dynamic else static_part(value))
    return tuple(parts)


def foreign(tensor: Tensor) -> Buffer:
    """Return a buffer for a tensor of another device: only a 0-dim one on the CPU may join in."""
    if tensor.dim() or tensor.device.type != "cpu":
        return buffer_of(tensor)  # raises: this is not a "jax" tensor
    array = array_from_cpu(tensor)
    return Buffer(array, Signature.of(array))


def alias_pattern(values: tuple[Any, ...]) -> tuple[int, ...]:
    """Return, for each tensor of a call, the first one that shares its storage; () where none do."""
    storages: list[int] = []
    for value in values:
        if isinstance(value, Tensor):
            storages.append(value.untyped_storage()._cdata)
        elif type(value) is list:
            storages += [item.untyped_storage()._cdata for item in value if isinstance(item, Tensor)]
    if len(storages) < 2 or len(set(storages)) == len(storages):
        return ()
    first: dict[int, int] = {}
    return tuple([first.setdefault(storage, index) for index, storage in enumerate(storages)])


def _draw(given: Any) -> Any:
    return generator.draw(None if given is ABSENT else given)
