"""The registry: ``@lowering(op)`` checks a function against the op's schema and files it under the op.

Two decorators, one register. The families of this folder use ``lowering``: where this torch's schema is not one that
the function was written for (``known_schemas``), the function is *refused*: noted with the reason, shown by
``isthmus doctor``, and the op takes its decomposition or the CPU. One renamed argument upstream must not cost the whole
device. Users get ``user_lowering`` as ``isthmus.lowering``, which raises: a mistake of theirs is theirs to see.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, TypeVar

from torch._ops import OpOverload

from isthmus._graph.names import Missing
from isthmus._graph.schema import PLACEMENT, Schema, schema_of
from isthmus._ops import known_schemas
from isthmus.errors import SchemaError, Unsupported

Function = TypeVar("Function", bound=Callable[..., Any])


@dataclass(frozen=True)
class Lowering:
    """A pure function for one op, and which of its arguments are values known only at run time."""

    op: OpOverload
    function: Callable[..., Any]
    dynamic: frozenset[str]
    parameters: frozenset[str]
    random: bool
    matmul: bool
    size: Callable[..., Any] | None
    renamed: dict[str, str] = field(default_factory=dict)
    """The function's name for each argument that this torch calls otherwise."""

    def __call__(self, arguments: dict[str, Any]) -> Any:
        """Lower a call given every argument by name; one nobody knows may only have its default."""
        defaults = {a.name: a.default for a in schema_of(self.op).arguments if a.has_default}
        for name, value in arguments.items():
            known = name in self.parameters or name in PLACEMENT or name == "rng"
            if not known and not (name in defaults and _same(value, defaults[name])):
                raise Unsupported(f"the lowering of {self.op} does not know {name}={value!r}")
        names = {name: _safe(self.renamed.get(name, name)) for name in arguments if name in self.parameters}
        return self.function(**{names[name]: arguments[name] for name in names})


registry: dict[OpOverload, Lowering] = {}
attempted: set[str] = set()
"""Names of the overloads that families of this folder have a function for, whether or not it was refused."""
refused: dict[str, str] = {}
"""Why a function of ours does not serve its op with this torch, by the op's name."""
waiting: dict[str, Callable[[OpOverload], Any]] = {}
"""Lowerings of ops that other libraries define, by the op's name, until its first call."""
on_register: list[Callable[[Lowering], None]] = []
"""Called with each new lowering; the device hangs its kernels here."""


def lowering(op: OpOverload | Missing, **options: Any) -> Callable[[Function], Function]:
    """File the decorated function as the lowering of ``op``, or refuse it; options are those of ``user_lowering``."""

    def file(function: Function) -> Function:
        name = op.name if isinstance(op, Missing) else str(op)
        attempted.add(name)
        try:
            return user_lowering(op, **options)(function)
        except SchemaError as error:
            refused[name] = str(error)
            return function

    return file


def user_lowering(
    op: OpOverload | Missing,
    *,
    static: Iterable[str] = (),
    dynamic: Iterable[str] = (),
    random: bool = False,
    matmul: bool = False,
    size: Callable[..., Any] | None = None,
    replace: bool = False,
) -> Callable[[Function], Function]:
    """Make the decorated function the lowering of ``op``: a pure function of arrays with the schema's parameter names.

    Tensors and ``Scalar`` arguments are run-time values, everything else is static: compiled in.

    Arguments:
        op: the overload, such as ``torch.ops.mylib.soft_clip.default``.
        static: names of arguments that are compiled in although they are scalars.
        dynamic: names of arguments that are run-time values although they are not.
        random: whether the function has a parameter ``rng``, a JAX key.
        matmul: whether it is compiled again when torch's float32 precision changes.
        size: a function that computes a data-dependent size, which the lowering then gets as the int ``size``.
        replace: whether a lowering that is there already is replaced.

    Returns:
        A decorator. It raises ``isthmus.errors.SchemaError`` where the function does not fit the op.

    Example:
        >>> import jax.numpy as jnp, torch, isthmus
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
        if isinstance(op, Missing):
            refused[op.name] = "this torch does not have the overload"
            return function
        schema = _check_op(op, replace)
        signature = {_schema_name(name) for name in inspect.signature(function).parameters}
        extra = ({"rng"} if random else set()) | ({"size"} if size is not None else set())
        renamed = _check_drift(schema, signature - extra)
        now = {old: new for new, old in renamed.items()}
        parameters = frozenset(now.get(name, name) for name in signature)
        _check_parameters(schema, parameters, random=random, sized=size is not None)
        runtime = {a.name for a in schema.arguments if a.kind in ("tensor", "tensors", "scalar", "scalars")}
        runtime = (runtime | {now.get(n, n) for n in dynamic}) - {now.get(n, n) for n in static}
        entry = Lowering(
            op=op,
            function=function,
            dynamic=frozenset(runtime),
            parameters=parameters,
            random=random,
            matmul=matmul,
            size=size,
            renamed=renamed,
        )
        registry[op] = entry
        for listener in on_register:
            listener(entry)
        return function

    return file


def lowering_when_defined(name: str, **options: Any) -> Callable[[Function], Function]:
    """File the decorated function as the lowering of an op of another library, once that library defines it.

    ``name`` is the op's, such as ``torchvision::nms``; options are those of ``lowering``.
    """

    def wait(function: Function) -> Function:
        waiting[name] = lambda op: user_lowering(op, **options)(function)
        return function

    return wait


def lowering_of(op: OpOverload) -> Lowering | None:
    """Return the lowering of ``op`` if it has one; one that waited for the op to be defined is filed first."""
    file = waiting.pop(op._schema.name, None) if op._overloadname == "default" else None
    if file is not None:
        try:
            file(op)
        except SchemaError as error:  # that library has changed: the next tier answers
            refused[str(op)] = str(error)
    return registry.get(op)


def _check_op(op: Any, replace: bool) -> Schema:
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


def _same(value: Any, default: Any) -> bool:
    # A default only counts as itself: Numbers and arrays are never equal to it.
    return type(value) in (type(default), list, tuple) and list_or_self(value) == list_or_self(default)


def list_or_self(value: Any) -> Any:
    """Return a tuple as a list, so that the two compare."""
    return list(value) if isinstance(value, tuple) else value
