"""Functions of arrays with symbolic sizes b and s, at least one per rule of ``isthmus/_runtime/padding/rules``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

F32, F16, C64, I32, I64, U8, BOOL = (
    "float32",
    "float16",
    "complex64",
    "int32",
    "int64",
    "uint8",
    "bool",
)
BS8 = ("b", "s", 8)


@dataclass(frozen=True)
class Case:
    """A function, its arguments, and whether it reads across padding.

    Sizes in shapes are numbers or expressions of b and s. ``guarded`` says that the true sizes matter: a run that takes
    padded sizes for true ones must be wrong. Integers are below ``high``.
    """

    name: str
    function: Callable[..., Any]
    arguments: tuple[tuple[tuple[Any, ...], str], ...]
    guarded: bool = False
    high: int = 4

    def __str__(self) -> str:
        return self.name

    def shapes(self, sizes: dict[str, Any]) -> list[tuple[Any, ...]]:
        """Return the shapes of the arguments for these sizes."""
        return [
            tuple(eval(n, {}, sizes) if isinstance(n, str) else n for n in shape)
            for shape, _ in self.arguments
        ]

    def values(self, shapes: Sequence[tuple[int, ...]], rng: np.random.Generator) -> list[np.ndarray]:
        """Return arguments of these shapes: floats, some equal; integers below ``high``; rows of one boolean."""
        arrays = []
        for shape, (_, dtype) in zip(shapes, self.arguments, strict=True):
            if dtype == BOOL:
                arrays.append(np.broadcast_to(rng.random((*shape[:1], *[1] * len(shape[1:]))) > 0.5, shape))
            elif np.issubdtype(dtype, np.integer):
                arrays.append(rng.integers(0, self.high, shape).astype(dtype))
            else:
                real = np.round(rng.normal(0.2, 1, shape), 1)
                arrays.append((real + 1j * np.roll(real, 1) if dtype == C64 else real).astype(dtype))
        return arrays


def case(
    name: str, function: Callable[..., Any], *arguments: Any, guarded: bool = False, high: int = 4
) -> Case:
    """Make a case; an argument is a shape, of float32, or (shape, dtype)."""
    typed = tuple(a if len(a) == 2 and isinstance(a[0], tuple) else (a, F32) for a in arguments)
    return Case(name, lambda *arrays: _tuple(function(*arrays)), typed, guarded, high)


def _tuple(result: Any) -> tuple[Any, ...]:
    return tuple(result) if isinstance(result, (list, tuple)) else (result,)


def _merge(x: Any) -> Any:
    return x.reshape(x.shape[0] * x.shape[1], *x.shape[2:])


def _split_columns(x: Any) -> Any:
    return x.reshape(x.shape[0], 4, x.shape[1] // 4)


def _loop(x: Any) -> Any:
    """Halve until the sum is small; at most 40 times, since the sum of infinite padding never is."""
    return lax.while_loop(
        lambda c: (jnp.sum(jnp.abs(c[0])) > 1.0) & (c[1] < 40), lambda c: (c[0] * 0.5, c[1] + 1), (x, 0)
    )


def _draw(make: Callable[..., Any]) -> Callable[..., Any]:
    return lambda x: make(
        jax.random.wrap_key_data(jnp.array([3, 4], jnp.uint32), impl="threefry2x32"), x.shape
    )


def _rnn(reverse: bool) -> Callable[..., Any]:
    def function(x: Any, w: Any) -> Any:
        def step(h: Any, row: Any) -> Any:
            h = jnp.tanh(row + h @ w)
            return h, h * 2

        start = jnp.zeros(x.shape[1:], x.dtype)
        last, rows = lax.scan(step, start, x, reverse=reverse)
        return last, rows

    return function


def _conv(**options: Any) -> Callable[..., Any]:
    numbers = ("NCH", "OIH", "NCH")
    return lambda x, w: lax.conv_general_dilated(x, w, dimension_numbers=numbers, **options)


def _window(reducer: Any, start: float, size: int, stride: int, padding: Any) -> Callable[..., Any]:
    def function(x: Any) -> Any:
        return lax.reduce_window(
            x, np.float32(start), reducer, (1, size, 1), (1, stride, 1), ((0, 0), padding, (0, 0))
        )

    return function


def _batch_solve(x: Any) -> Any:
    square = jnp.einsum("bij,bkj->bik", x, x) + 4 * jnp.eye(3)
    return (
        jnp.linalg.cholesky(square),
        jnp.linalg.inv(square),
        jnp.linalg.eigvalsh(square),
        jnp.linalg.det(square),
    )


def _where_index(x: Any, i: Any, mode: str) -> Any:
    return x.at[i].get(mode=mode, fill_value=-7.0)


CASES = [
    # elementwise, and sizes as values
    case("add", lambda x, y: x + y, BS8, ("s", 8)),
    case("convert", lambda x: (x.astype(jnp.int32), x > 0), BS8),
    case("select", lambda p, x: jnp.where(p, x, 0.0), (("b", "s"), BOOL), ("b", "s")),
    case("clamp", lambda x: jnp.clip(x, -0.5, 0.5), BS8),
    case("bitcast", lambda x: lax.bitcast_convert_type(x, jnp.int32), BS8),
    case("barrier", lambda x, y: lax.optimization_barrier((x, y)), BS8, ("s",)),
    case("size as value", lambda x: (x / x.shape[1], jnp.full((3,), x.shape[0] * x.shape[1])), BS8, guarded=True),
    # shape
    case("broadcast", lambda x: jnp.broadcast_to(x[:, None], (x.shape[0], 5, x.shape[1])), ("b", "s")),
    case("transpose", lambda x: x.transpose(2, 1, 0), BS8),
    case("squeeze", lambda x: x[:, :, 0], ("b", "s", 1)),
    case("iota", lambda x: jnp.arange(x.shape[1]) * jnp.ones_like(x), ("b", "s")),
    case("arange from the end", lambda x: jnp.arange(x.shape[0])[::-1] + x, ("s",), guarded=True),
    case("merge and split", lambda x: _merge(x + 1).reshape(x.shape[0], x.shape[1], 2, 4), BS8),
    case("merge uniform", lambda x: _merge(jnp.broadcast_to(x, (3, x.shape[0]))), ("s",), guarded=True),
    case("merged result", _merge, BS8, guarded=True),
    case("merged argument", lambda x, y: _merge(x) + y, BS8, ("b*s", 8), guarded=True),
    case("split of one part", _split_columns, ("b", "4*s"), guarded=True),
    case("swap of parts", lambda x: x.reshape(x.shape[1], x.shape[0], 8), BS8, guarded=True),
    case("squeeze by reshape", lambda x: x.reshape(x.shape[0], x.shape[2]), ("b", 1, "s")),
    case("stack", lambda x: jnp.stack([x, x + 1], 1), ("b", "s")),
    case("tile", lambda x: jnp.tile(x, (1, 1, 3)), ("b", "s", 2)),
    case("tile of a padded axis", lambda x: jnp.tile(x, (1, 3)).sum(0), ("b", "s"), guarded=True),
    # reductions
    case("sum", lambda x: (x.sum(), x.sum(1), x.sum(0)), BS8, guarded=True),
    case("mean", lambda x: (x.mean(1), x.var(1)), BS8, guarded=True),
    case("prod", lambda x: x.prod(1), BS8, guarded=True),
    case("max", lambda x: (x.max(1), x.min(1)), BS8, guarded=True),
    case("max of ints", lambda x: (x.max(1), x.min(1), x.sum(1)), (("b", "s"), I32), guarded=True),
    case("max of bytes", lambda x: (x.max(1), x.min(1)), (("b", "s"), U8), guarded=True),
    case("any, all", lambda x: (x.any(1), x.all(1)), (("b", "s"), BOOL), guarded=True),
    case("bitwise", lambda x: [lax.reduce_and(x + 3, (1,)), lax.reduce_or(x, (1,)), lax.reduce_xor(x, (1,))],
         (("b", "s"), I32), guarded=True),
    case("bitwise of bytes", lambda x: lax.reduce_and(x + 3, (1,)), (("b", "s"), U8), guarded=True, high=1),
    case("sum of a merged axis", lambda x: _merge(x).sum(0), BS8, guarded=True),
    case("argmax", lambda x: (jnp.argmax(x, 1), jnp.argmin(x, 1)), BS8, guarded=True),
    case("argmax of all", lambda x: (jnp.argmax(x), jnp.argmin(x)), BS8, guarded=True),
    case("argmax of the smallest", lambda x: jnp.argmax(x * -jnp.inf, 1), BS8, guarded=True),
    case("cumsum", lambda x: (jnp.cumsum(x, 1), lax.cummax(x, axis=1)), BS8),
    case("reverse cumsum", lambda x: [lax.cumsum(x, 1, True), lax.cummax(x, 1, True), lax.cummin(x, 1, True)], BS8,
         guarded=True),
    case("reverse cumprod", lambda x: [lax.cumprod(x, 1, True), lax.cumlogsumexp(x, 1, True)], BS8, guarded=True),
    case("cumsum of a merged axis", lambda x: jnp.cumsum(x.reshape(-1)), BS8, guarded=True),
    case("sort", lambda x: (jnp.sort(x, 1), jnp.argsort(x, 1)), BS8, guarded=True),
    case("sort with NaN", lambda x: jnp.argsort(jnp.where(x > 0.5, jnp.nan, x), 1), BS8, guarded=True),
    case("sort of the largest", lambda x: jnp.argsort(jnp.where(x > 1, 2**31 - 1, x), 1), (("b", "s"), I32),
         guarded=True),
    case("sort of booleans", lambda x: jnp.argsort(x, 1), (("b", "s"), BOOL), guarded=True),
    case("sort by two keys", lambda x, y: lax.sort((x, y, x * 2.0), dimension=1, num_keys=2), (("b", "s"), I32),
         (("b", "s"), I32), guarded=True),
    case("sort of a merged axis", lambda x: jnp.sort(x.reshape(-1)), BS8, guarded=True),
    case("top_k", lambda x: lax.top_k(x, 3), ("b", "s"), guarded=True),
    case("top_k of the smallest", lambda x: lax.top_k(x * -jnp.inf, 3), ("b", "s"), guarded=True),
    case("softmax", lambda x: (jax.nn.softmax(x, 1), jax.nn.logsumexp(x, (0, 1))), BS8, guarded=True),
    case("reduce by a function", lambda x: lax.reduce(x, np.float32(0), lambda a, b: a + b * b, (2,)), BS8),
    # products
    case("dot", lambda x, y: (x @ y, y.T @ x.T), ("b", "s"), ("s", 4), guarded=True),
    case("dot with infinities", lambda x, y: x @ jnp.where(y > 1.5, jnp.inf, y), ("b", "s"), ("s", 4), guarded=True),
    case("batched dot", lambda x, y: jnp.einsum("bsd,btd->bst", x, y), BS8, BS8),
    case("attention", lambda x: jnp.einsum("bst,btd->bsd", jax.nn.softmax(x @ x.swapaxes(1, 2)), x), BS8,
         guarded=True),
    case("weight gradient", lambda x, y: _merge(x).T @ _merge(y), BS8, ("b", "s", 4), guarded=True),
    case("dot of two layouts", lambda x, y: _merge(x).T @ y, BS8, ("b*s", 4), guarded=True),
    # slices
    case("slice", lambda x: (x[:, 1:], x[:, :-1], x[:, -2:], x[:, 2:4]), BS8, guarded=True),
    case("last", lambda x: x[:, -1], BS8, guarded=True),
    case("slice in steps", lambda x: (x[:, ::2], x[:, 1::3]), BS8),
    case("lax.slice in steps", lambda x: lax.slice(x, (0, 1), (x.shape[0], x.shape[1]), (1, 2)), ("b", "s")),
    case("slice of a uniform axis", lambda x: jnp.broadcast_to(x, (x.shape[1], 3, x.shape[1]))[1:, 0], (1, "s")),
    case("slice of a merged axis", lambda x: x.reshape(-1)[3:-2], BS8, guarded=True),
    case("split", lambda x: jnp.split(x, [2, 5], axis=1), ("b", "s")),
    case("dynamic_slice", lambda x, i: lax.dynamic_slice(x, (i, i * 0), (3, x.shape[1])), ("s", "b"), ((), I32),
         guarded=True, high=40),
    case("dynamic_slice of most", lambda x, i: lax.dynamic_slice_in_dim(x, i, x.shape[0] - 2), ("s", 2), ((), I32),
         guarded=True, high=40),
    case("dynamic_update_slice", lambda x, u, i: lax.dynamic_update_slice(x, u, (i, i * 0)), ("s", "b"), (3, "b"),
         ((), I32), guarded=True, high=40),
    case("update of padded size", lambda x, u, i: lax.dynamic_update_slice(x, u[:-3], (i,)), ("s",), ("s",),
         ((), I32), guarded=True),
    case("concatenate", lambda x, y: jnp.concatenate([x, y], 1), BS8, BS8, guarded=True),
    case("concatenate one more", lambda x, y: jnp.concatenate([x, y], 1), BS8, ("b", 1, 8), guarded=True),
    case("concatenate before", lambda x, y: jnp.concatenate([y, x, y], 1), BS8, ("b", 3, 8), guarded=True),
    case("concatenate features", lambda x: jnp.concatenate([x, x + 1, x[..., :2]], 2), BS8),
    case("concatenate merged", lambda x: jnp.concatenate([x.reshape(-1), x.reshape(-1)]), BS8, guarded=True),
    case("pad", lambda x: jnp.pad(x, ((0, 0), (1, 2), (0, 3)), constant_values=0.5), BS8, guarded=True),
    case("pad by a size", lambda x: jnp.pad(x, ((x.shape[0], 0),)), ("s",), guarded=True),
    case("pad by less", lambda x: lax.pad(x, np.float32(0), ((-1, -2, 0), (0, 0, 0))), ("s", 4)),
    case("pad between", lambda x: lax.pad(x, np.float32(0.5), ((1, 3, 2), (0, 0, 0))), ("s", 4), guarded=True),
    case("rev", lambda x: (lax.rev(x, (0, 1)), jnp.flip(x, 2)), BS8, guarded=True),
    case("roll", lambda x: jnp.concatenate([x[:, -1:], x[:, :-1]], 1), BS8, guarded=True),
    # gather and scatter
    case("take", lambda x, i: (x[i], x[:, i]), ("s", "s", 2), ((5,), I32)),
    case("take by padded indices", lambda x, i: x[i], (9, 4), (("b", "s"), I64)),
    case("take clipped", lambda x, i: jnp.take(x, i, 0, mode="clip"), ("s", 2), ((9,), I32), guarded=True, high=60),
    case("take filled", lambda x, i: _where_index(x, i, "fill"), ("s", 2), ((9,), I32), guarded=True, high=60),
    case("take by small indices", lambda x, i: jnp.take(x, i, 0, mode="fill", fill_value=-1), ("s",), ((9,), "int8"),
         guarded=True, high=60),
    case("take_along_axis", lambda x, i: jnp.take_along_axis(x, i, 1), ("b", "s"), (("b", "s"), I32)),
    case("take of a merged axis", lambda x, i: x.reshape(-1)[i], BS8, ((5,), I32), guarded=True, high=90),
    case("embedding gradient", lambda i, g: jnp.zeros((9, 4)).at[i].add(g), (("b", "s"), I32), ("b", "s", 4),
         guarded=True),
    case("scatter of one", lambda x, i: (x.at[:, i].set(1.5), x.at[:, i].max(0.5), x.at[:, i].min(0.5)),
         ("b", "s"), ((), I32)),
    case("scatter_mul", lambda x, i, u: jnp.exp(x).at[i].multiply(u * u + 1), (9,), (("s",), I32), ("s",),
         guarded=True),
    case("scatter min, max", lambda x, i, u: (x.at[i].min(u), x.at[i].max(u)), (9,), (("s",), I32), ("s",),
         guarded=True),
    case("scatter_add clipped", lambda x, i, u: x.at[i].add(u, mode="clip"), ("s",), (("b",), I32), ("b",),
         guarded=True, high=60),
    case("scatter_add dropped", lambda x, i, u: x.at[i].add(u, mode="drop"), ("s", 3), (("b",), I32), ("b", 3),
         guarded=True, high=60),
    case("scatter_add batched", lambda x, i, u: jax.vmap(lambda a, j, v: a.at[j].add(v))(x, i, u), ("b", 9),
         (("b", "s"), I32), ("b", "s"), guarded=True),
    # windows
    case("conv batch", _conv(window_strides=(1,), padding=((1, 1),)), ("b", 4, 9), (5, 4, 3)),
    case("conv", _conv(window_strides=(1,), padding=((1, 1),)), ("b", 4, "s"), (5, 4, 3), guarded=True),
    case("conv in steps", _conv(window_strides=(2,), padding=((2, 2),), rhs_dilation=(2,)), ("b", 4, "s"), (5, 4, 3),
         guarded=True),
    case("conv transposed", _conv(window_strides=(1,), padding=((1, 2),), lhs_dilation=(2,)), ("b", 4, "s"),
         (5, 4, 3), guarded=True),
    case("conv of groups", _conv(window_strides=(1,), padding=((1, 1),), feature_group_count=2), ("b", 4, "s"),
         (6, 2, 3), guarded=True),
    case("conv features", _conv(window_strides=(1,), padding=((0, 0),)), (2, "s", 9), (5, "s", 3), guarded=True),
    case("window sum", _window(lax.add, 0.0, 3, 2, (1, 1)), BS8, guarded=True),
    case("window max", _window(lax.max, -np.inf, 3, 1, (1, 2)), BS8, guarded=True),
    case("window min", _window(lax.min, np.inf, 2, 2, (0, 1)), BS8, guarded=True),
    case("window by a function", lambda x: lax.reduce_window(x, np.float32(0), lambda a, b: a + b * b, (1, 2), (1, 2),
                                                             "VALID"), ("s", 8)),
    case("max pool gradient", jax.grad(lambda x: lax.reduce_window(
        x, np.float32(-np.inf), lax.max, (1, 2), (1, 2), "VALID").sum()), ("s", 8)),
    # branches and loops
    case("cond", lambda x, p: lax.cond(p.sum() > 2, lambda y: _merge(y), lambda y: _merge(y) * 2, x), BS8,
         (("s",), BOOL), guarded=True),
    case("while", _loop, ("b", "s"), guarded=True),
    case("fori", lambda x: lax.fori_loop(0, x.shape[0], lambda i, c: c * 0.5 + x[i], jnp.zeros(x.shape[1:])),
         ("s", "b"), guarded=True),
    case("scan of a padded batch", _rnn(False), (5, "b", 3), (3, 3)),
    case("scan", _rnn(False), ("s", "b", 3), (3, 3), guarded=True),
    case("scan backwards", _rnn(True), ("s", "b", 3), (3, 3), guarded=True),
    case("custom gradient", lambda x: jax.grad(lambda y: jax.nn.relu(y).sum())(x), BS8),
    # random numbers and batches of matrices
    case("uniform", _draw(jax.random.uniform), ("b", "s"), guarded=True),
    case("bits", _draw(lambda k, shape: (jax.random.bits(k, shape, "uint64"), jax.random.bits(k, shape, "uint8"))),
         ("b", "s", 3), guarded=True),
    case("dropout", lambda x: jnp.where(_draw(lambda k, shape: jax.random.bernoulli(k, 0.5, shape))(x), x, 0),
         BS8, guarded=True),
    case("matrices", _batch_solve, ("b", 3, 3)),
    case("permutation", lambda x: lax.linalg.lu_pivots_to_permutation(jnp.maximum(x, jnp.arange(3, dtype=I32)), 5),
         (("b", 3), I32)),
    case("fft", lambda x: (jnp.fft.fft(x).real, jnp.fft.rfft(x).imag), ("s", 8)),
    case("complex", lambda x: (x.sum(0), x @ x.T, jnp.sort(x, 0), x.real), (("s", 3), C64), guarded=True),
    case("half", lambda x: (x.max(0), x.sum(0)), (("s", 3), F16), guarded=True),
]  # fmt: skip
