"""``PaddedProgram``: a function traced once for symbolic sizes, with one executable per set of padded sizes.

::

    dims = symbols({"s": 2})
    x = ShapeDtypeStruct((dims["s"], 8), float32)
    program = PaddedProgram(lambda x: (x.mean(0),), [x], dims, least={"s": 2})
    sizes = program.sizes_for({"s": 37}, per_octave=4)            # serves every s up to 40
    executable = program.executable(sizes)
    (mean,) = executable.call(program.true_sizes({"s": 37}), padded)        # padded: (40, 8)

The first input of an executable is an int32 vector of the true sizes of ``program.names``. Other inputs and the results
have the shapes ``executable.inputs`` and ``executable.outputs``: every symbolic axis padded at its end. ``zero`` says
of which axes the padding of an input is known to hold zeros, which saves masks; ``executable.zero`` says so of results.

``Refused`` is raised while tracing (``PaddedProgram``), where a function asks JAX about a size that it cannot know, or
while compiling (``executable``), where a primitive has no rule. The caller compiles the exact size then.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from isthmus._runtime import compiler
from isthmus._runtime.padding import rules
from isthmus._runtime.padding.interpreter import Interpreter
from isthmus._runtime.padding.layout import PaddedArray
from isthmus._runtime.padding.sizes import (
    Refused,
    Size,
    Sizes,
    Symbol,
    evaluate,
    is_symbolic,
    slack_of,
    symbols_in,
)
from isthmus._runtime.traced_results import separated

Array = jax.Array
Shape = tuple[Size, ...]
assert rules.__all__  # importing the families files their rules


@dataclass(frozen=True)
class PaddedExecutable:
    """An executable for one set of padded sizes: how to call it, shapes of inputs and outputs, what padding cost."""

    call: Callable[..., Sequence[Array]]
    inputs: tuple[tuple[int, ...], ...]
    outputs: tuple[tuple[int, ...], ...]
    zero: tuple[frozenset[int], ...]
    masks: int
    relayouts: int


@contextlib.contextmanager
def _without_cycles() -> Iterator[None]:
    """Free what a trace leaves in cycles.

    JAX asks by exceptions whether a size is a number, and these hold all callers, with arrays that are donated only if
    nothing else holds them. What was there before the trace is frozen meanwhile, so that the collection does not look
    at it: there may be a million objects. Objects that were frozen before would be thawed, so then none are frozen.
    """
    freezes = not gc.get_freeze_count()
    if freezes:
        gc.freeze()
    try:
        yield
    finally:
        gc.collect()
        if freezes:
            gc.unfreeze()


class PaddedProgram:
    """A function of arrays with symbolic sizes; makes executables for ranges of them."""

    def __init__(
        self,
        function: Callable[..., Any],
        inputs: Sequence[jax.ShapeDtypeStruct],
        dims: Mapping[str, Size],
        least: Mapping[str, int],
        most: Mapping[str, int] | None = None,
    ) -> None:
        """Trace a function.

        Arguments:
            function: a pure function that returns a tuple of arrays.
            inputs: shapes and dtypes of its arguments, with the symbols ``dims`` in them.
            dims: symbols by name, made by ``sizes.symbols``.
            least: the least size of each symbol, as given to ``sizes.symbols``.
            most: the largest size of symbols for which it is known.
        """
        self.names = tuple(sorted(dims))
        try:
            with compiler.scoped_x64(), _without_cycles():
                self.closed = jax.jit(function).trace(*inputs).jaxpr
        except Refused:
            raise
        except (
            Exception
        ) as error:  # a lowering that wants a value may raise anything; the exact program decides
            raise Refused("trace", f"{type(error).__name__}: {str(error).splitlines()[0]}") from error
        self.inputs: tuple[Shape, ...] = tuple(v.aval.shape for v in self.closed.jaxpr.invars)
        self.outputs: tuple[Shape, ...] = tuple(v.aval.shape for v in self.closed.jaxpr.outvars)
        self.dtypes = tuple(v.aval.dtype for v in self.closed.jaxpr.outvars)
        self.input_dtypes = tuple(v.aval.dtype for v in self.closed.jaxpr.invars)
        sizes = [n for shape in [*self.inputs, *self.outputs] for n in shape]
        if unknown := symbols_in(sizes) - set(dims):
            raise Refused("trace", f"sizes {sorted(unknown)} that no input has")
        arguments = [n for shape in self.inputs for n in shape]
        self.symbols = {
            name: Symbol(
                name,
                dim,
                least[name],
                slack_of(dim, sizes),
                slack_of(dim, sizes) > slack_of(dim, arguments),
                (most or {}).get(name),
            )
            for name, dim in dims.items()
        }
        self._executables: dict[Any, PaddedExecutable] = {}
        self._sizes: dict[Any, Sizes] = {}

    def sizes_for(self, values: Mapping[str, int], per_octave: int) -> Sizes:
        """Return the ranges that the program for these sizes serves."""
        bounds = [self.symbols[n].bound_for(values[n], per_octave) for n in self.names]
        key = (*bounds, per_octave)
        # One object for each, since it remembers what it has worked out.
        if key not in self._sizes:
            self._sizes[key] = Sizes(self.symbols, dict(zip(self.names, bounds, strict=True)), per_octave)
        return self._sizes[key]

    def doubled(self, ranges: Sizes, name: str) -> Sizes:
        """Return ranges with twice the padded size of one symbol."""
        slack = self.symbols[name].slack
        bounds = {**ranges.bounds, name: 2 * (ranges.bounds[name] + slack) - slack}
        return Sizes(self.symbols, bounds, ranges.per_octave)

    def true_sizes(self, values: Mapping[str, int]) -> np.ndarray[Any, Any]:
        """Return the first input of an executable."""
        return np.array([values[name] for name in self.names], np.int32)

    def output_shapes(self, values: Mapping[str, int]) -> list[tuple[int, ...]]:
        """Return the true shapes of the results."""
        return [tuple(evaluate(n, values) for n in shape) for shape in self.outputs]

    def executable(
        self,
        sizes: Sizes,
        zero: Sequence[frozenset[int]] | None = None,
        donate: tuple[int, ...] = (),
        options: Mapping[str, Any] | None = None,
        title: str = "",
    ) -> PaddedExecutable:
        """Return the executable for these sizes, compiled by the first call; ``donate`` numbers inputs from 0."""
        flags = tuple(zero) if zero is not None else (frozenset(),) * len(self.inputs)
        key = (sizes.key, flags, donate)
        if key not in self._executables:
            self._executables[key] = self._compile(sizes, flags, donate, options, title)
        return self._executables[key]

    def call(self, *inputs: Any) -> Any:
        """Raise: a program for a range of sizes runs by its executables."""
        raise TypeError("a padded program is called by one of its executables")

    def __len__(self) -> int:
        """Return how many executables there are."""
        return len(self._executables)

    def function(
        self, sizes: Sizes, zero: Sequence[frozenset[int]]
    ) -> tuple[Callable[..., Any], list[jax.ShapeDtypeStruct]]:
        """Return the function of the true sizes and padded arrays for these ranges, and its arguments' shapes.

        It returns the padded results, and what a ``PaddedExecutable`` says of them.
        """

        def traced(values: Array, *arrays: Array) -> tuple[tuple[Array, ...], Any]:
            wide = values.astype(jnp.int64)  # products of sizes may be large
            run = Interpreter(sizes.at({name: wide[n] for n, name in enumerate(self.names)}))
            operands = [
                PaddedArray(array, shape, tuple(run.layout(n) for n in shape), flags)
                for array, shape, flags in zip(arrays, self.inputs, zero, strict=True)
            ]
            results = [run.canonical(y) for y in run.evaluate(self.closed, operands)]
            return tuple(y.array for y in results), (tuple(y.zero for y in results), run.masks, run.relayouts)

        shapes = [sizes.padded_shape(shape) for shape in self.inputs]
        examples = [jax.ShapeDtypeStruct((len(self.names),), np.int32)]
        examples += [
            jax.ShapeDtypeStruct(shape, v.aval.dtype)
            for shape, v in zip(shapes, self.closed.jaxpr.invars, strict=True)
        ]
        return traced, examples

    def _compile(
        self,
        sizes: Sizes,
        zero: tuple[frozenset[int], ...],
        donate: tuple[int, ...],
        options: Mapping[str, Any] | None,
        title: str,
    ) -> PaddedExecutable:
        traced, examples = self.function(sizes, zero)
        function, extras = separated(traced)
        try:
            built = compiler.build(function, examples, tuple(n + 1 for n in donate), options, title)
        except (
            TypeError,
            ValueError,
            NotImplementedError,
        ) as error:  # a shape that JAX refuses when it is padded
            raise Refused("padded", f"{type(error).__name__}: {str(error).splitlines()[0]}") from error
        flags, masks, relayouts = extras[-1]
        shapes = tuple(sizes.padded_shape(shape) for shape in self.inputs)
        outputs = tuple(sizes.padded_shape(shape) for shape in self.outputs)
        return PaddedExecutable(built.call, shapes, outputs, flags, masks, relayouts)


def pad_to(array: np.ndarray[Any, Any], shape: Sequence[int], value: Any = 0) -> np.ndarray[Any, Any]:
    """Return a host array with ``value`` past the end of each axis."""
    padded = np.full(shape, value, array.dtype)
    padded[tuple(slice(0, n) for n in array.shape)] = array
    return padded


def symbolic_axes(shape: Shape) -> frozenset[int]:
    """Return which axes of a shape are symbolic."""
    return frozenset(i for i, n in enumerate(shape) if is_symbolic(n))
