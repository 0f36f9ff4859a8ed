"""Registration of elementwise ops: operands are promoted by torch's rules, computed, and cast to the result dtype.

``unary``, ``binary``, ``special``, ``bessel``, ``polynomials`` and ``activation`` are tables of plain functions that
this decorator turns into lowerings; the functions see arrays of one dtype and know nothing of promotion.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import TypeVar

import jax.numpy as jnp

from isthmus._graph.names import Missing
from isthmus._graph.private import Op
from isthmus._graph.promotion import Promotion
from isthmus._ops.common import ALWAYS_BOOL, DEFAULT, Array, Dtypes, Operand, cast, promote
from isthmus._ops.known_schemas import arguments_of
from isthmus._ops.registry import lowering
from isthmus.errors import Unsupported

Result = Array | tuple[Array, ...]
Computation = Callable[..., Result]  # type: ignore[explicit-any]  # the schemas differ
Function = TypeVar("Function", bound=Computation)


def elementwise(
    *ops: Op | Missing,
    promote_as: Promotion = DEFAULT,
    numbers_promote: bool = True,
    dtypes: Dtypes | None = None,
) -> Callable[[Function], Function]:
    """Register a function that gets every argument in the schema's order: operands cast, the rest as it is.

    Operands are the tensors and numbers of the schema. Without ``numbers_promote`` the tensors alone decide the dtype.
    ``dtypes`` admits what the operands promote to; others are refused as torch refuses them.
    """

    def file(function: Function) -> Function:
        for op in ops:
            # `lowering` records that this torch does not have the overload.
            if isinstance(op, Missing):
                lowering(op)(function)
            else:
                _register(op, function, promote_as, numbers_promote, dtypes)
        return function

    return file


def _register(op: Op, function: Computation, kind: Promotion, numbers: bool, dtypes: Dtypes | None) -> None:
    arguments = arguments_of(op)
    operands = {a.name for a in arguments if a.kind in ("tensor", "scalar")}
    promoting = {a.name for a in arguments if a.kind == "tensor" or (numbers and a.name in operands)}

    def lowered(**values: Operand | None) -> Result:
        compute, result = promote(*(value for name, value in values.items() if name in promoting), kind=kind)
        # The computation dtype of a half type is float32, which says nothing of whether torch has the op for it.
        checked = compute if kind is ALWAYS_BOOL else result
        if dtypes is not None and not any(jnp.issubdtype(checked, admitted) for admitted in dtypes):
            raise Unsupported(f"{op} of {checked}, which torch refuses as well")
        inputs = [(a.name, values[a.name]) for a in arguments if a.name in values]
        out = function(*(cast(v, compute) if n in operands and v is not None else v for n, v in inputs))
        return tuple(cast(part, result) for part in out) if isinstance(out, tuple) else cast(out, result)

    # The registry reads the parameters off the signature, and renamed arguments are matched by it.
    lowered.__signature__ = keyword_signature([a.name for a in arguments])  # type: ignore[attr-defined]
    lowering(op)(lowered)


def keyword_signature(names: Sequence[str]) -> inspect.Signature:
    """Return a signature of these keyword parameters, for a lowering written as ``**values``."""
    kind = inspect.Parameter.KEYWORD_ONLY
    return inspect.Signature([inspect.Parameter(name, kind) for name in names])
