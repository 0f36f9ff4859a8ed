"""Every private API of JAX that Isthmus uses; all of it optional, as ``isthmus._upstream`` defines that.

Each name is looked up once and tried (``choose``, ``optional``). One that is missing, or does not do what it should, is
switched off with one warning that says what is lost, and something public takes its place: slower, never wrong. So a
new JAX costs speed until this file knows it.

tests/device/test_private.py checks what each name does, tests/device/test_drift.py what happens without it;
tests/project/test_imports.py lets no other file import ``jax._src``.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, ParamSpec, TypeVar

import jax
import jax.export
import numpy as np
from jax.extend.core import Jaxpr, Primitive, get_opaque_trace_state
from jax.interpreters import partial_eval

from isthmus import _caches
from isthmus._upstream import choose, optional, switch_off, switched_off

Array = jax.Array
P = ParamSpec("P")
T = TypeVar("T")


def _eager_trace_state() -> Any:
    """Return JAX's trace state where nothing is traced: that of a new thread."""
    states: list[Any] = []
    thread = threading.Thread(target=lambda: states.append(get_opaque_trace_state()))
    thread.start()
    thread.join()
    return states[0]


def _clean_by_comparison() -> bool:
    return bool(get_opaque_trace_state() == _eager_trace_state())


def _private_trace_state_clean() -> Callable[[], bool]:
    from jax._src.core import trace_state_clean

    if not isinstance(trace_state_clean(), bool):
        raise TypeError("jax._src.core.trace_state_clean returns no bool")
    return trace_state_clean


trace_state_clean = choose(
    "_runtime.private.trace_state_clean",
    "every op in lazy mode takes about 50 us more",
    _private_trace_state_clean,
    _clean_by_comparison,
)
"""Return whether JAX traces nothing on this thread."""


def _traceback_scope() -> Callable[[], AbstractContextManager[Any]]:
    from jax._src.interpreters.partial_eval import TracebackScope

    with TracebackScope():
        return TracebackScope


# JAX keeps the code objects of all callers with its arrays and programs, to say where those came from; in this scope it
# does not. Dynamo frees a compiled function when the code it generated dies, which our arrays must not keep alive.
forgetting_callers: Callable[[], AbstractContextManager[Any]] = choose(
    "_runtime.private.forgetting_callers",
    "functions under torch.compile are not freed before the process ends",
    _traceback_scope,  # type: ignore[arg-type]
    contextlib.nullcontext,
)


@functools.lru_cache(4096)
def _type_of(shape: tuple[int, ...], dtype: np.dtype[Any]) -> Any:
    with jax.enable_x64(True):
        return jax.core.ShapedArray(shape, dtype)


Put = Callable[[np.ndarray[Any, Any]], Array]


def _tried_put(device: jax.Device) -> Put:
    from jax._src.lib import xla_client  # type: ignore[attr-defined]  # JAX imports it there for itself

    sharding = jax.sharding.SingleDeviceSharding(device)

    def put(array: np.ndarray[Any, Any]) -> jax.Array:
        type_ = _type_of(array.shape, array.dtype)
        # A cached array would keep the code of its first caller alive, and with it a function that Dynamo forgot.
        with forgetting_callers():
            placed: jax.Array = xla_client.batched_device_put(
                type_, sharding, [array], [device], True, enable_x64=True
            )
        return placed

    wide = np.array([2**40])
    example = jax.block_until_ready(put(wide))
    if example.dtype != np.int64 or example.devices() != {device} or np.asarray(example).tolist() != [2**40]:
        raise TypeError("xla_client.batched_device_put puts other arrays")
    return put


@functools.lru_cache(64)
def putter(device: jax.Device) -> Put:
    """Return ``jax.device_put`` for numpy arrays in their own dtype, whose memory may be shared; also while JAX traces.

    It takes 3 µs where ``jax.device_put`` takes 36.
    """

    def public(array: np.ndarray[Any, Any]) -> jax.Array:
        with jax.enable_x64(True), jax.ensure_compile_time_eval():
            return jax.device_put(array, device)

    otherwise: Put = public
    return choose(
        "_runtime.private.putter",
        "moving a small tensor to the device takes some 30 microseconds more",
        lambda: _tried_put(device),
        otherwise,
    )


_caches.register(
    "types of arrays that are put on a device",
    4096,
    lambda: _type_of.cache_info().currsize,
    _type_of.cache_clear,
)
_caches.register(
    "ways to put arrays on a device", 64, lambda: putter.cache_info().currsize, putter.cache_clear
)


@optional("every call of a program takes a few microseconds more", otherwise=lambda compiled: compiled)
def fast_call(compiled: jax.stages.Compiled) -> Callable[..., Any]:
    """Return the cheapest way to call ``compiled``: JAX's C++ path, which has none for some programs."""
    call = compiled._executable.create_cpp_call(compiled._params)  # type: ignore[attr-defined]
    if call is None:
        return compiled
    if not callable(call):
        raise TypeError(f"create_cpp_call returned {type(call).__name__}")
    return call


@optional("exported programs name the files they were made from", otherwise=lambda bytecode: bytecode)
def without_locations(bytecode: bytes) -> bytes:
    """Return a portable artifact of StableHLO without locations: files and lines of Python code."""
    from jax.extend import mlir
    from jax.extend.mlir import ir, passmanager

    # b"ML\xefR\rStableHLO_v1.15.0\x00...": the version that JAX chose, with four weeks for readers to follow.
    # The text between ``_v`` and the first zero byte.
    version = bytecode[: bytecode.index(b"\0")].partition(b"_v")[2].decode()
    with ir.Context() as context:
        module = mlir.deserialize_portable_artifact(bytecode, context)
        # JAX lets Shardy's operations stand beside StableHLO's where the backend understands them.
        mixed = mlir.serialize_portable_artifact(module, version, True) == bytecode
        passmanager.PassManager.parse("builtin.module(strip-debuginfo)").run(module.operation)
        return bytes(mlir.serialize_portable_artifact(module, version, mixed))


def entry_type(bytecode: bytes) -> str:
    """Return the type of the main function of a portable artifact of StableHLO, as text."""
    from jax.extend import mlir
    from jax.extend.mlir import ir

    with ir.Context() as context:
        module = mlir.deserialize_portable_artifact(bytecode, context)
        functions = [op for op in module.body.operations if "function_type" in op.attributes]
        return next(str(op.attributes["function_type"]) for op in functions if op.name.value == "main")


@optional(
    "a signature that does not fit its exported program may be found late", otherwise=lambda bytecode: None
)
def entry_type_if_known(bytecode: bytes) -> str | None:
    """Return ``entry_type`` of what this JAX itself has just exported; None where its bindings changed."""
    return entry_type(bytecode)


def is_traced(values: Sequence[object]) -> bool:
    """Return whether any of ``values`` is a JAX tracer."""
    return any(isinstance(value, jax.core.Tracer) for value in values)


@optional(
    "derivatives of torch code inside JAX may compute what nothing needs", otherwise=lambda jaxpr: jaxpr
)
def without_dead_code(jaxpr: Jaxpr) -> Jaxpr:
    """Return a jaxpr without the equations that no result needs, and with all its arguments."""
    # ``instantiate``: arguments that nothing needs stay, so that callers need not change.
    return partial_eval.dce_jaxpr(jaxpr, [True] * len(jaxpr.outvars), instantiate=True)[0]


def _prune(used: list[bool], *live_and_equation: Any) -> Any:
    """Drop the results of one equation that nothing needs: a rule of JAX's dead-code elimination.

    JAX up to 0.11 calls it with (used results, equation), JAX 0.12 with (used results, live inputs, equation).
    """
    # The last argument in every version.
    equation = live_and_equation[-1]
    if not any(used):
        return [False] * len(equation.invars), None
    whole = equation.params["jaxpr"]
    jaxpr, needed = partial_eval.dce_jaxpr(whole.jaxpr, used)
    left = equation.replace(
        invars=[v for v, need in zip(equation.invars, needed, strict=True) if need],
        outvars=[v for v, need in zip(equation.outvars, used, strict=True) if need],
        params={"jaxpr": whole.replace(jaxpr=jaxpr)},
    )
    return needed, left


def _try_pruning(primitive: Primitive) -> None:
    """Register the rule and run it once, on a call whose second result nothing needs; undo it where that fails."""
    # Tried with a real elimination: that the rule is accepted says nothing about how it is called.
    partial_eval.dce_rules[primitive] = _prune
    try:
        one = jax.ShapeDtypeStruct((), "float32")
        inner = jax.make_jaxpr(lambda x, y: [x + x, y * y])(one, one)
        outer = jax.make_jaxpr(lambda x, y: primitive.bind(x, y, jaxpr=inner)[0])(one, one)
        pruned, needed = partial_eval.dce_jaxpr(outer.jaxpr, [True])
        (equation,) = pruned.eqns
        if needed != [True, False] or len(equation.outvars) != 1:
            raise TypeError("JAX's dead-code elimination keeps what the rule drops")
    except BaseException:
        del partial_eval.dce_rules[primitive]
        raise


@optional("torch code inside JAX may compute what nothing needs", otherwise=lambda primitive: None)
def prunes(primitive: Primitive) -> None:
    """Let JAX drop results of a primitive that nothing needs; its one parameter is the jaxpr it computes."""
    _try_pruning(primitive)


def is_tracing() -> bool:
    """Return whether JAX is tracing on this thread."""
    return not trace_state_clean()


def _cudnn(function: Callable[P, T]) -> Callable[P, T]:
    """Raise NotImplementedError where cuDNN's functions are not what they were; refusals of theirs pass through.

    The caller then computes attention without cuDNN; a changed function is not tried again.
    """

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        name = f"_runtime.private.{function.__name__}"
        if name in switched_off:
            raise NotImplementedError(switched_off[name])
        try:
            return function(*args, **kwargs)
        # Changed signatures and names; cuDNN's own refusals are other exceptions, and pass.
        except (AttributeError, ImportError, TypeError) as error:
            switch_off(name, "attention on GPUs takes several times as long and more memory", error)
            raise NotImplementedError(switched_off[name]) from error

    return call


@_cudnn
def cudnn_attention(
    query: Array, key: Array, value: Array, bias: Array | None, is_causal: bool, scale: float
) -> tuple[Array, Array]:
    """Return attention by cuDNN's kernel and the logarithms of its sums; lengths come before heads.

    The bias has them the other way round: (1 or batch, 1 or heads, queries, keys).

    JAX's public function rounds those sums to the dtype of the result, which is too coarse for the gradients.
    """
    from jax._src.cudnn import fused_attention_stablehlo as cudnn

    mask = cudnn.MaskType.CAUSAL if is_causal else cudnn.MaskType.NO_MASK
    out, sums = cudnn.dot_product_attention(
        query, key, value, bias, scale=scale, mask_type=mask, return_residual=True
    )
    return out, sums


@_cudnn
def cudnn_attention_gradients(
    grad: Array,
    query: Array,
    key: Array,
    value: Array,
    bias: Array | None,
    out: Array,
    sums: Array,
    is_causal: bool,
    scale: float,
    bias_gradient: bool,
) -> tuple[Array, ...]:
    """Return the gradients of ``cudnn_attention`` for query, key, value and, if asked, bias, from its results."""
    from jax._src.cudnn import fused_attention_stablehlo as cudnn

    # For the optional arrays: bias, lengths of sequences, page tables.
    absent = jax.numpy.zeros(0, query.dtype)
    options = {
        "scale": scale,
        "seed": 42,
        "dropout_rate": 0.0,
        "variadic_args": (bias is not None, bias_gradient),
        "mask_type": cudnn.MaskType.CAUSAL if is_causal else cudnn.MaskType.NO_MASK,
        "layout": cudnn.AttentionLayout.BTNH.value,
        "sliding_window_length": None,
        "score_mod": None,  # from JAX 0.12 on
        "score_mod_args": (),
    }
    # The options that this JAX has come after the 13 arrays; one we do not know switches this off.
    names = list(inspect.signature(cudnn._dot_product_attention_bwd_impl).parameters)[13:]
    if not set(names) <= set(options):
        raise TypeError(f"cuDNN's attention has options that Isthmus does not know: {names}")
    names = [name for name in names if name != "score_mod_args"]  # further arrays, of which there are none
    gradients = cudnn._dot_product_attention_bwd_p_wrapper.bind(
        query,
        key,
        value,
        absent if bias is None else bias,
        # Six optional arrays: lengths of queries and keys, their offsets, page tables of keys and values.
        *[absent] * 6,
        sums,
        out,
        grad,
        **{name: options[name] for name in names},
    )
    return tuple(gradients)


class SymbolicSizes:
    """What padding reads of JAX's symbolic dimensions: the symbols of a size, and its value for given symbols."""

    @staticmethod
    def symbols(size: Any) -> frozenset[str]:
        """Return the names of the symbols in a symbolic size."""
        return frozenset(size._get_vars())

    @staticmethod
    def evaluate(size: Any, values: Mapping[str, Any]) -> Any:
        """Return a symbolic size for these values of its symbols: integers, NumPy arrays or tracers."""
        if not any(isinstance(value, jax.core.Tracer) for value in values.values()):
            return size._evaluate(values)
        try:
            found = size._evaluate({name: _NoIndex(value) for name, value in values.items()})
        except TypeError:  # the larger or smaller of two sizes, which JAX computes of arrays alone
            found = size._evaluate(values)
        return _array(found)


class _NoIndex:
    """An array that is no index: JAX asks each value whether it is 0 or 1, and a tracer looks for where it is from to
    say that it does not know, through all equations traced so far."""

    __array_ufunc__ = None  # NumPy's numbers leave the arithmetic to this class

    def __init__(self, array: Any) -> None:
        self.array = array

    def __add__(self, other: Any) -> _NoIndex:
        return _NoIndex(self.array + _array(other))

    def __mul__(self, other: Any) -> _NoIndex:
        return _NoIndex(self.array * _array(other))

    __radd__, __rmul__ = __add__, __mul__

    def __divmod__(self, other: Any) -> tuple[_NoIndex, _NoIndex]:
        quotient, rest = divmod(self.array, _array(other))
        return _NoIndex(quotient), _NoIndex(rest)

    def __rdivmod__(self, other: Any) -> tuple[_NoIndex, _NoIndex]:
        return _NoIndex(jax.numpy.asarray(other)).__divmod__(self)


def _array(value: Any) -> Any:
    return value.array if isinstance(value, _NoIndex) else value


def _tried_symbolic_sizes() -> SymbolicSizes:
    a, b = jax.export.symbolic_shape("a, b")
    # A product, a sum and a floor division: what sizes of tensors are made of.
    size = 2 * a * b - (a + 1) // 2
    if SymbolicSizes.symbols(size) != {"a", "b"} or SymbolicSizes.evaluate(size, {"a": 3, "b": 5}) != 28:
        raise TypeError("jax.export's symbolic sizes have other symbols or values")
    return SymbolicSizes()


@functools.cache
def symbolic_sizes() -> SymbolicSizes | None:
    """Return how to read symbolic sizes, or None where this JAX has changed them: then every size is exact."""
    return choose(
        "_runtime.private.symbolic_sizes",
        "every new size of a tensor compiles a program of its own",
        _tried_symbolic_sizes,  # type: ignore[arg-type]
        None,
    )
