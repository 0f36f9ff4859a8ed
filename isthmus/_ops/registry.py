"""The registry: ``@lowering(op, ...)`` checks a function against the schema of each op and registers it.

Two decorators, one registry. The families of this folder use ``lowering``: where the schema of this torch is not one
that the function was written for (``known_schemas``), the function is *refused*: the reason is recorded, ``isthmus
doctor`` shows it, and the op takes its decomposition or the CPU. One renamed argument upstream must not cost the whole
device. Users get ``user_lowering`` as ``isthmus.lowering``, which raises: a user's mistake is an error.

A decorator takes several ops, such as the overloads of one packet: a parameter that one of them lacks keeps its
default. It also does what most lowerings would begin and end with::

    @lowering(aten.grid_sampler_2d.default, aten.grid_sampler_3d.default, accumulate="input", dtypes=FLOATING)
    def grid_sampler(input, grid, interpolation_mode, padding_mode, align_corners):
        ...  # a bfloat16 input and grid arrive as float32, the result is cast to bfloat16

The device reads ``registry`` and ``on_register`` (``_device/kernels/register.py``), graphs ask ``lowering_of``, and
``coverage.py`` reads the file and line that each entry records.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import TypedDict, TypeVar, Unpack

import jax
import jax.numpy as jnp

from isthmus._graph.arguments import AnyFunction, Value
from isthmus._graph.names import Missing
from isthmus._graph.private import Op, OpOverload
from isthmus._graph.schema import PLACEMENT, Schema, schema_of
from isthmus._ops import known_schemas
from isthmus._ops.common import DType, Dtypes, accumulation_dtype, cast
from isthmus._runtime.user_frames import Place
from isthmus.errors import SchemaError, Unsupported

Function = TypeVar("Function", bound=AnyFunction)


@dataclass(frozen=True)
class Lowering:
    """A pure function for one op, and which of its arguments are values known only at run time."""

    op: Op
    function: AnyFunction
    place: Place
    """The line that registers it: of a function its decorator, of a table the statement that reads it."""
    dynamic: frozenset[str]
    parameters: frozenset[str]
    ignored: frozenset[str]
    random: bool
    matmul: bool
    size: AnyFunction | None
    renamed: dict[str, str] = field(default_factory=dict)
    """The function's name for each argument that this torch calls otherwise."""

    def __call__(self, arguments: dict[str, Value]) -> Value:
        """Lower a call given every argument by name; one the function does not take must have its default."""
        defaults = {a.name: a.default for a in schema_of(self.op).arguments if a.has_default}
        for name, value in arguments.items():
            known = name in self.parameters | self.ignored | PLACEMENT or name == "rng"
            if not known and not (name in defaults and _same(value, defaults[name])):
                raise Unsupported(f"the lowering of {self.op} does not know {name}={value!r}")
        names = {name: _safe(self.renamed.get(name, name)) for name in arguments if name in self.parameters}
        return self.function(**{names[name]: arguments[name] for name in names})


registry: dict[Op, Lowering] = {}
attempted: set[str] = set()
"""Names of the overloads that families of this folder have a function for, whether or not it was refused."""
refused: dict[str, str] = {}
"""Why a function of ours does not serve its op with this torch, by the op's name."""
waiting: dict[str, Callable[[Op], None]] = {}
"""Lowerings of ops that other libraries define, by the op's name, until its first call."""
on_register: list[Callable[[Lowering], None]] = []
"""Called with each new lowering; the device hangs its kernels here."""


class Options(TypedDict, total=False):
    """Keyword arguments of the decorators."""

    static: Iterable[str]
    """``Scalar`` arguments to compile for; by default tensors and Scalars are run-time values."""
    dynamic: Iterable[str]
    """Arguments such as ``float p`` that are run-time values; by default everything else is static."""
    random: bool
    """The function has a parameter ``rng``, a JAX key."""
    matmul: bool
    """The program is compiled again when torch's float32 precision changes."""
    size: AnyFunction | None
    """Computes the data-dependent size that the function then gets, as a Python int, in its parameter ``size``."""
    ignores: Iterable[str]
    """Arguments that change nothing here, such as the window of a pooling whose gradient goes by saved indices."""
    replace: bool
    """Take the place of a lowering that the op already has."""
    accumulate: bool | str | tuple[str | None, ...]
    """Floating arrays arrive in the accumulation dtype, float32 for half types, of the named argument (True: the first
    array), and results are cast to its dtype. A tuple names an argument for each result, None for one that stays as it
    is; the first name decides the accumulation dtype."""
    dtypes: Dtypes
    """Refuse other dtypes, and arrays of two dtypes, as torch does; integers beside floats are indices."""


def lowering(*ops: Op | Missing, **options: Unpack[Options]) -> Callable[[Function], Function]:
    """Register the decorated function as the lowering of each op, or record why an op is refused."""
    place = _module_line()

    def file(function: Function) -> Function:
        function = _adapted(function, options)
        for op in ops:
            name = op.name if isinstance(op, Missing) else str(op)
            attempted.add(name)
            try:
                _register(op, function, place, options, ops)
            except SchemaError as error:
                refused[name] = str(error)
        return function

    return file


def user_lowering(*ops: Op | Missing, **options: Unpack[Options]) -> Callable[[Function], Function]:
    """Make the decorated function the lowering of each op: a pure function of arrays with the schema's parameter names.

    Tensors arrive as JAX arrays, ``Scalar`` arguments as ``Number``, everything else as the Python value that the
    program is compiled for.

    Arguments:
        ops: overloads such as ``torch.ops.mylib.soft_clip.default``; several share the function if it fits them all.
        options: keywords. ``static`` and ``dynamic`` name arguments that are compiled in, or are run-time values,
            against that rule. ``random`` says that the function has a parameter ``rng``, a JAX key; ``matmul`` that it
            is compiled again when torch's float32 precision changes; ``replace`` that it takes the place of a lowering
            which is there. ``size`` computes a data-dependent size, which the function gets as the int ``size``.
            ``accumulate=True`` computes half types in float32 and casts back, ``dtypes`` refuses other dtypes,
            ``ignores`` names arguments that change nothing.

    Returns:
        A decorator. It raises ``isthmus.errors.SchemaError`` where the function does not fit an op.

    Example:
        >>> import torch, isthmus
        >>> @torch.library.custom_op("isthmus_docs::double", mutates_args=())
        ... def double(x: torch.Tensor) -> torch.Tensor:
        ...     return x * 2
        >>> @double.register_fake
        ... def _(x):
        ...     return torch.empty_like(x)
        >>> @isthmus.lowering(torch.ops.isthmus_docs.double.default)
        ... def lower_double(x):
        ...     return x * 2
        >>> double(torch.ones(2, device="jax")).tolist()
        [2.0, 2.0]
    """

    def file(function: Function) -> Function:
        place = place_of_function(function)
        function = _adapted(function, options)
        for op in ops:
            _register(op, function, place, options, ops)
        return function

    return file


def lowering_when_defined(name: str, **options: Unpack[Options]) -> Callable[[Function], Function]:
    """Register the decorated function as the lowering of an op of another library, once that library defines it.

    ``name`` is the op's, such as ``torchvision::nms``; options are those of ``lowering``.
    """
    place = _module_line()

    def wait(function: Function) -> Function:
        function = _adapted(function, options)
        waiting[name] = lambda op: _register(op, function, place, options, (op,))
        return function

    return wait


def lowering_of(op: Op) -> Lowering | None:
    """Return the lowering of ``op`` if it has one; one that waited for the op to be defined is registered first."""
    register = waiting.pop(op.name(), None)  # "lib::op", without a name of an overload
    if register is not None:
        try:
            register(op)
        except SchemaError as error:  # that library has changed: the next tier answers
            refused[str(op)] = str(error)
    return registry.get(op)


Ops = tuple[Op | Missing, ...]


def _register(op: Op | Missing, function: AnyFunction, place: Place, options: Options, ops: Ops) -> None:
    if isinstance(op, Missing):
        refused[op.name] = "this torch does not have the overload"
        return
    random, size = options.get("random", False), options.get("size")
    schema = _check_op(op, options.get("replace", False))
    others = frozenset().union(*(_names(other) for other in ops if isinstance(other, OpOverload))) - _names(
        op
    )
    ignored = {_schema_name(name) for name in options.get("ignores", ())} & _names(op)
    signature = {_schema_name(name) for name in inspect.signature(function).parameters} - others | ignored
    extra = ({"rng"} if random else set()) | ({"size"} if size is not None else set())
    renamed = _check_drift(schema, signature - extra)
    # The function keeps the names it was written with; the program uses those of this torch.
    now = {old: new for new, old in renamed.items()}
    parameters = frozenset(now.get(name, name) for name in signature)
    _check_parameters(schema, parameters, random=random, sized=size is not None)
    runtime = {a.name for a in schema.arguments if a.kind in ("tensor", "tensors", "scalar", "scalars")}
    runtime |= {now.get(n, n) for n in options.get("dynamic", ())} & parameters
    runtime -= {now.get(n, n) for n in options.get("static", ())}
    # A number that the function does not know must be its default, which only a value that is compiled in can be seen
    # to be.
    runtime -= {a.name for a in schema.arguments if a.kind in ("scalar", "scalars")} - parameters
    entry = Lowering(
        op=op,
        function=function,
        place=place,
        dynamic=frozenset(runtime),
        parameters=parameters - {now.get(name, name) for name in ignored},
        ignored=frozenset(now.get(name, name) for name in ignored),
        random=random,
        matmul=options.get("matmul", False),
        size=size,
        renamed=renamed,
    )
    registry[op] = entry
    for listener in on_register:
        listener(entry)


def _names(op: Op) -> frozenset[str]:
    """Return every name that an argument of ``op`` has in this torch or in any that the list knows."""
    forms = known_schemas.known_forms().get(str(op), [])
    return frozenset(name for form in [*forms, known_schemas.form_of(schema_of(op))] for name, _ in form)


def _adapted(function: Function, options: Options) -> Function:
    """Return the function with the dtype check and the casts that its options ask for."""
    accumulate, dtypes = options.get("accumulate", False), options.get("dtypes")
    if not accumulate and dtypes is None:
        return function
    # Lowerings call one another with positional arguments; the program passes all by name.
    names = list(inspect.signature(function).parameters)

    @functools.wraps(function)
    def lowered(*args: Value, **kwargs: Value) -> object:
        values = dict(zip(names, args, strict=False)) | kwargs
        arrays = {n: v for n, v in values.items() if isinstance(v, jax.Array) and n != "rng"}
        if dtypes is not None:
            _check_dtypes(function, [array.dtype for array in arrays.values()], dtypes)
        if not accumulate:
            return function(**values)
        targets = accumulate if isinstance(accumulate, tuple) else None
        named = next(filter(None, targets)) if targets else accumulate
        main = named if isinstance(named, str) else next(iter(arrays))
        acc_dtype = accumulation_dtype(arrays[main].dtype)
        widened = {n: cast(a, acc_dtype) for n, a in arrays.items() if jnp.issubdtype(a.dtype, jnp.inexact)}
        results: Value = function(**(values | widened))
        if not isinstance(results, (tuple, list)):
            return cast(results, arrays[main].dtype)
        return tuple(
            result if name is None or result is None else cast(result, arrays[name].dtype)
            for result, name in zip(results, targets or [main] * len(results), strict=True)
        )

    return lowered  # type: ignore[return-value]


def _check_dtypes(function: AnyFunction, present: list[DType], admitted: Dtypes) -> None:
    exempt = () if any(jnp.issubdtype(kind, jnp.integer) for kind in admitted) else (jnp.integer, jnp.bool_)
    main, *others = present
    others = [dtype for dtype in others if not any(jnp.issubdtype(dtype, kind) for kind in exempt)]
    if not any(jnp.issubdtype(main, kind) for kind in admitted) or any(dtype != main for dtype in others):
        listed = ", ".join(str(dtype) for dtype in [main, *others])
        raise Unsupported(
            f"{getattr(function, '__name__', function)} of {listed}, which torch refuses as well"
        )


def _module_line() -> Place:
    """Return the line of the family's module that is being executed: a decorator, or a statement that reads a table."""
    # Up to the module's own frame: a helper of the family may stand between it and the decorator.
    frame = sys._getframe(2)
    while frame.f_code.co_name != "<module>" and frame.f_back is not None:
        frame = frame.f_back
    return Place(frame.f_code.co_filename, frame.f_lineno)


def place_of_function(function: AnyFunction) -> Place:
    """Return where a function is written; what is not Python counts as written here."""
    code = getattr(inspect.unwrap(function), "__code__", None)
    return Place(__file__, 1) if code is None else Place(code.co_filename, code.co_firstlineno)


def _check_op(op: object, replace: bool) -> Schema:
    if not isinstance(op, OpOverload):
        raise SchemaError(f"@lowering takes one overload such as aten.add.Tensor, not {op!r}")
    schema = schema_of(op)
    if schema.mutated:
        raise SchemaError(
            f"{op} writes to {', '.join(schema.mutated)}: lower its functional form, which serves both"
        )
    if schema.returns_aliases:
        raise SchemaError(f"{op} returns a view: views are torch's own and need no lowering")
    if op in registry and not replace:
        raise SchemaError(f"{op} already has a lowering; pass replace=True to take its place")
    return schema


def _check_drift(schema: Schema, parameters: set[str]) -> dict[str, str]:
    """Return the lowering's names for renamed arguments; raise where the schema is none it was checked with."""
    match = known_schemas.match(schema)
    if match is None:
        now, forms = known_schemas.form_of(schema), known_schemas.known_forms()[str(schema.op)]
        raise SchemaError(
            f"{schema.op} has other arguments in this torch: {known_schemas.describe(now)}, "
            f"not {known_schemas.describe(forms[-1])}"
        )
    return match.renamed(parameters)


def _check_parameters(schema: Schema, parameters: frozenset[str], *, random: bool, sized: bool) -> None:
    known = {argument.name for argument in schema.arguments}
    extra = ({"rng"} if random else set()) | ({"size"} if sized and "size" not in known else set())
    strangers = parameters - known - extra
    if strangers:
        raise SchemaError(
            f"lowering of {schema.op} has parameters its schema lacks: {', '.join(sorted(strangers))}"
        )
    required = {a.name for a in schema.arguments if not a.has_default and a.name not in PLACEMENT}
    if required - parameters:
        missing = ", ".join(sorted(required - parameters))
        raise SchemaError(f"lowering of {schema.op} ignores required arguments: {missing}")


def _safe(name: str) -> str:
    """Return a schema name as a Python parameter: ``from`` is a keyword, so ``from_``."""
    return "from_" if name == "from" else name


def _schema_name(name: str) -> str:
    return "from" if name == "from_" else name


def _same(value: object, default: object) -> bool:
    # A default only counts as itself: Numbers and arrays are never equal to it. A tuple and a list compare as lists.
    if isinstance(value, (list, tuple)) and isinstance(default, (list, tuple)):
        return list(value) == list(default)
    return type(value) is type(default) and value == default
