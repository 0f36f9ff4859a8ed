"""Calls the CPU refuses: it is asked, once per key, whether it would run a call like this one.

torch's Meta kernels know shapes but miss many checks of the real ones: that two dtypes agree, what an index may be,
what ``out=`` may be, that a parameter is not negative. Rather than a rule per op there is one question. The op runs on
the CPU with *stand-ins*: tensors of the same dtypes and, where they are small, the same layouts and the same sharing
of memory; large ones are replaced by small ones. ``build.py`` and ``sized.py`` ask before they compile, so a key that
has a plan costs nothing more::

    torch.mm(x, w)      # float64 and float32: mat1 and mat2 must have the same dtype, but got Double and Float

A refusal of stand-ins may be due to what stands in: zeros have no inverse, and sizes that were made smaller need not
fit. So the call is refused only if the CPU also refuses its values; where those cannot be read, in a trace, if it
refuses zeros and ones in the same words. What the CPU merely has no kernel for, for half types, is no refusal.

The CPU's warnings are kept as well, and each call of the key gives them again (``warning``).
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Callable, Set
from typing import Any

import torch
from torch import Tensor

from isthmus import _caches
from isthmus._device.core import mode
from isthmus._device.core.buffer import buffer_of
from isthmus._device.core.inference import Warnings, numbers_as_tensors, recorded
from isthmus._device.torch_glue.private import below_autograd, restride
from isthmus._graph.private import OpOverload, storage_id
from isthmus._graph.schema import ABSENT, schema_of
from isthmus._runtime.user_frames import warn_user

Values = tuple[Any, ...]

OVERLAP = "unsupported operation:"
"""How torch begins to refuse a write to memory that is shown twice or read at the same time."""
# Bytes and elements that stand in as they are: the CPU's answer takes microseconds, compiling takes milliseconds.
_BYTES, _ELEMENTS = 1 << 17, 1 << 14
# Elements the CPU may be shown to settle a doubt, which takes milliseconds, once per op and words.
_LARGEST = 1 << 20
# Sizes up to this one stay: dims of length one broadcast, two or three are often meant.
_KEPT = 3
# The CPU has no kernel for a type: of these CUDA has many, and so may the device.
_NO_KERNEL = re.compile(r"not implemented for '(Half|BFloat16|ComplexHalf|Float[48]\w*|UInt\d+|Q\w+)'")
_NO_SUCH_OP = re.compile(r"Could not run|overrideable(_backward)? not implemented")
# Kernels of oneDNN trust their workspace: one that another device made ends the process.
_CRASHES = "aten::mkldnn_rnn_layer"
# CUDA accepts integers here, for which the CPU has no kernel.
_INTEGERS = {"aten::histc"}
# The device's own name of an op says nothing on the CPU.
_aten = torch.ops.aten
_SAME_AS: dict[OpOverload, OpOverload] = {_aten.convolution_overrideable.default: _aten.convolution.default}
# Gradients that may be asked about: their kernels compare dtypes and sizes before they read.
_SOFTMAX_BACKWARD = {_aten._softmax_backward_data.default, _aten._log_softmax_backward_data.default}
_GROUP_NORM = _aten.native_group_norm.default
# The CPU's kernel ignores the strides of ``out=``, so it may write past the end of what has others.
_MISPLACING = {_aten.avg_pool3d.out, _aten.narrow_copy.out}
# Ops that torch calls for others and whose kernels check their arguments.
_INNER_ASKED = (
    "_adaptive_avg_pool", "_cdist_forward", "_foreach_", "_index_put_impl_", "_linalg_", "_log_softmax",
    "_native_batch_norm_legit", "_pdist_forward", "_prelu_kernel", "_softmax", "_to_copy",
    "_unique2", "_upsample_",
)  # fmt: skip
_TRUSTING = re.compile(
    r"backward|mkldnn|onednn|cudnn|miopen|quantize|fbgemm|lstm|gru|rnn|lu_solve|lu_unpack|ldl_solve|householder|"
    r"unpool|fractional|segment_reduce|embedding_bag|ctc|histogramdd|sparse|nested|jagged|fft_"
)
_TYPES = re.compile(r"type|bool|complex|integ|float|long|double|half|byte|\bint", re.IGNORECASE)
_DIGITS = re.compile(r"[\d.+e-]*\d")
_RESIZED = "An output with one or more elements was resized"
_LIMIT = 4096
# What the CPU said of stand-ins but not of the calls they stood for.
_artifacts: set[Any] = set()
_caches.register("refusals due to stand-ins", _LIMIT, lambda: len(_artifacts), lambda: _artifacts.clear())


def check(
    op: OpOverload, values: Values, readable: bool = True, meta: Warnings | None = None, result: Any = ()
) -> Warnings:
    """Raise what the CPU raises for calls like this one; return the warnings it gives.

    ``readable`` says whether the tensors have values that can be looked at; ``meta`` are the warnings of the Meta
    kernel, which are right about sizes where the stand-ins have others; ``result`` is the Meta kernel's result.
    """
    # Some Meta kernels treat what is written in place as an ``out=``, and warn that they resize it.
    said = [w for w in meta or [] if _RESIZED not in w[1]]
    if not _is_sound(op, values):
        return said
    if not readable and torch.int32 in [t.dtype for t in tensors_of(values)]:
        return said  # in a trace of JAX's, whose integers are these: targets and indices as much as others
    make, exact = _choice(op, values)
    # A small call may have a large result (``full``, ``outer``), which the CPU would have to compute; that of stand-ins
    # of other sizes is as small as they are.
    if make is None or (exact and sum([t.numel() for t in _tensors((result,))]) > _LARGEST):
        return said
    given, error = ask(op, make(values))
    if error is None:
        if exact:
            return given
        sizes = make.keywords["sizes"]
        return [*said, *(_resized(w, sizes) for w in given if _TYPES.search(w[1]) or _RESIZED in w[1])]
    if OVERLAP in str(error):
        raise error.with_traceback(None) from None
    text = _text(error)
    if _artifact(op, values, error) in _artifacts:
        return said
    _, again = ask(op, make(values, filled=True))
    if again is not None and OVERLAP in str(again):
        error = again  # some kernels look at values before they look at memory (multinomial)
    elif again is None or _text(again) != text:
        return said  # it was about values
    if not readable or mode.current.capture is not None:
        if _is_certain(op, values, error, again, exact):
            raise error.with_traceback(None) from None
        return said
    attempt(op, values)
    _note_artifact(op, values, error)
    return said


def resized_as(op: OpOverload, values: Values) -> Values:
    """Return the arguments of an ``out=`` call as it leaves them on the CPU, none where it cannot be asked.

    Only the CPU's kernels know how they lay out what they resize; Meta kernels resize to rows.
    """
    make, _ = _choice(op, values)
    if make is not stand_ins or not _is_sound(op, values):
        return ()
    made = stand_ins(values)
    _, error = ask(op, made)
    return made if error is None else ()


def _resized(warning: tuple[type[Warning], str], sizes: dict[int, int]) -> tuple[type[Warning], str]:
    """Return a warning about stand-ins with the sizes they stand for."""
    back = {small: large for large, small in sizes.items()}
    lists = lambda m: re.sub(r"\d+", lambda n: str(back.get(int(n[0]), n[0])), m[0])  # noqa: E731
    return warning[0], re.sub(r"\[[\d, ]+\]", lists, warning[1])


def may_be_asked(name: str) -> bool:
    """Return whether the CPU's kernel of an op of this name can be trusted with arguments that were made up.

    Only ops that users call can be: gradients and the inner halves of other ops do not check their arguments, and read
    outside their memory (LSTMs of oneDNN, solvers given pivots, pools given the indices of another pool).
    """
    inner = name.startswith("_") and not name.startswith(_INNER_ASKED)
    return not inner and not _TRUSTING.search(name)


def _is_sound(op: OpOverload, values: Values) -> bool:
    """Return whether the CPU can be asked about a call: the kernels of some norms do not look whether sizes fit."""
    if op in _SOFTMAX_BACKWARD:
        return bool(values[0].shape != values[1].shape or values[0].dtype != values[1].dtype)
    if op.namespace != "aten" or not may_be_asked(schema_of(op).name.removeprefix("aten::")):
        return False
    name, x = schema_of(op).name, values[0] if values else None
    if name in _INTEGERS and isinstance(x, Tensor) and not x.is_floating_point():
        return False
    if not isinstance(x, Tensor) or "_norm" not in name:
        return True
    if op is _GROUP_NORM:
        return bool(values[3] * values[4] * values[5] == x.numel())
    if "batch_norm" not in name or "backward" in name:
        return True
    others = [v for v in values[1:] if isinstance(v, Tensor) and v.dim() == 1]
    return x.dim() > 1 and all([other.numel() == x.shape[1] for other in others])


def refusal(op: OpOverload, values: Values, about_number: bool) -> tuple[Warnings, Exception | None]:
    """Return the warnings and the refusal of the CPU for a call in a graph, whose tensors have no values.

    ``about_number`` says that a number of the call may be what is refused, whatever the tensors hold.
    """
    make, exact = _small(op, values, _tensors(values))
    if make is None or not _is_sound(op, values):
        return [], None
    given, error = ask(op, make(values))
    if error is None:
        return [w for w in given if exact or _TYPES.search(w[1])], None
    _, again = ask(op, make(values, filled=True))
    if again is None or _text(again) != _text(error):
        return [], None  # it was about values
    return [], error if about_number or _is_certain(op, values, error, again, exact) else None


def _is_certain(op: OpOverload, values: Values, error: Exception, again: Exception, exact: bool) -> bool:
    """Return whether what the CPU said of zeros and of ones holds for a call whose values cannot be read."""
    if str(error) != str(again):
        return False  # sizes in it depend on values
    if _TYPES.search(str(error)):
        return True
    tensors = _tensors(values)
    if not all([t.dtype.is_floating_point or t.dtype.is_complex for t in tensors]):
        return False  # indices, lengths and masks: no zeros and ones are like theirs
    if exact:
        return True
    if _artifact(op, values, error) in _artifacts or sum([t.numel() for t in tensors]) > _LARGEST:
        return False
    _, whole = ask(op, compact(values, {}))
    if whole is None:
        _note_artifact(op, values, error)
    return whole is not None


def _artifact(op: OpOverload, values: Values, error: Exception) -> Any:
    """Return the key of a refusal that was due to stand-ins: other dtypes may have other reasons."""
    return (op, _text(error), *[tensor.dtype for tensor in _tensors(values)])


def _note_artifact(op: OpOverload, values: Values, error: Exception) -> None:
    if len(_artifacts) >= _LIMIT:
        _artifacts.clear()
    _artifacts.add(_artifact(op, values, error))


def _choice(op: OpOverload, values: Values) -> tuple[Any, bool]:
    """Return a maker of stand-ins for a call, None where there is none, and whether they have its tensors' sizes."""
    tensors = tensors_of(values)
    lie = sum([buffer_of(t).signature.nbytes for t in tensors])
    shown = sum([t.numel() for t in tensors])  # more than they lie in, where they are expanded
    if lie <= _BYTES and shown <= _LARGEST and op not in _MISPLACING:
        return stand_ins, True
    return _small(op, values, tensors)


def _small(op: OpOverload | None, values: Values, tensors: list[Tensor]) -> tuple[Any, bool]:
    """Return the same for stand-ins that share no memory, of smaller sizes if there is need."""
    if sum([t.numel() for t in tensors]) <= _ELEMENTS:
        return functools.partial(compact, sizes={}), True
    large = sorted({n for t in tensors for n in t.shape if n > _KEPT})
    sizes = {n: _KEPT + 1 + at for at, n in enumerate(large)}
    if op is _GROUP_NORM:
        return functools.partial(_group_norm, sizes=sizes), False
    # Some kernels do not check sizes given as numbers, or those of gradients: wrong ones would read out of bounds.
    # What the schema calls a Scalar is an operand and no size.
    operands = set() if op is None else {a.position for a in schema_of(op).arguments if a.kind == "scalar"}
    numeric = any([type(v) is int and v > _KEPT and at not in operands for at, v in enumerate(values)])
    lists = [item for value in values if isinstance(value, (list, tuple)) for item in value]
    unknown = any([type(item) is int and item > _KEPT and item not in sizes for item in lists])
    if numeric or unknown or (op is not None and "backward" in schema_of(op).name):
        return None, False
    return functools.partial(compact, sizes=sizes, operands=operands), False


def _group_norm(values: Values, sizes: dict[int, int], filled: bool = False) -> Values:
    """Return small stand-ins for a group norm, whose numbers tell the sizes of its input."""
    made = compact(values, sizes, filled)
    batch, channels, *rest = made[0].shape
    return (*made[:3], batch, channels, math.prod(rest), 1, *made[7:])


def _text(error: Exception) -> str:
    """Return the text of an error without sizes and addresses."""
    return f"{type(error).__name__}: {_DIGITS.sub('#', str(error).split(chr(10))[0])}"


def ask(op: OpOverload, values: Values) -> tuple[Warnings, Exception | None]:
    """Run an op on stand-ins; return the warnings and the refusal of the CPU, if its answer says anything."""
    if op.name().startswith(_CRASHES):
        return [], None
    chosen = _SAME_AS.get(op, op)
    for position in _pivots(op):
        if isinstance(values[position], Tensor):
            values[position].fill_(1)
    args, kwargs = schema_of(op).split(_unpinned(op, numbers_as_tensors(op, values)))
    random = torch.Tag.nondeterministic_seeded in op.tags
    given, error = _asked(lambda: chosen(*args, **kwargs), random)
    return given, error if error is not None and says_anything(op, error) else None


def _unpinned(op: OpOverload, values: Values) -> Values:
    """Return the arguments of a call without ``pin_memory``, for which torch would ask this device in C++."""
    arguments = schema_of(op).arguments
    return tuple(ABSENT if a.name == "pin_memory" else v for a, v in zip(arguments, values, strict=True))


def _asked(call: Callable[[], Any], random: bool) -> tuple[Warnings, Exception | None]:
    """Return the warnings and the exception of a call on the CPU."""
    state = torch.get_rng_state() if random else None

    def run() -> Exception | None:
        with torch.no_grad(), below_autograd():
            try:
                call()
            except Exception as error:
                return error
        return None

    try:
        error, given = recorded(run)
    finally:
        if state is not None:
            torch.set_rng_state(state)
    return given, error


def refuses(call: Callable[[Values], Any], values: Values) -> bool:
    """Return whether a function of a call's arguments fails on the CPU, in the same words on zeros and on ones."""
    make, _ = _small(None, values, _tensors(values))
    if make is None:
        return False
    zeros, ones = make(values), make(values, filled=True)
    (_, first), (_, second) = _asked(lambda: call(zeros), True), _asked(lambda: call(ones), True)
    return first is not None and second is not None and _text(first) == _text(second)


@functools.cache
def _pivots(op: OpOverload) -> list[int]:
    """Return where an op takes rows counted from one: LAPACK would read before the first for a zero."""
    return [a.position for a in schema_of(op).arguments if a.name.endswith("pivots") and not a.mutated]


def says_anything(op: OpOverload, error: Exception) -> bool:
    """Return whether what the CPU raises says something about the call rather than about the CPU or the values."""
    if isinstance(error, torch.linalg.LinAlgError):  # type: ignore[attr-defined]
        return False
    text = str(error)
    if _NO_SUCH_OP.search(text):
        return False
    return not _NO_KERNEL.search(text)


def warning(plan: Callable[..., Any], given: Warnings) -> Callable[..., Any]:
    """Return a plan that gives warnings with every call."""
    if not given:
        return plan

    def warned(inputs: list[Any], values: Values) -> Any:
        for category, text in given:
            warn_user(category, text)
        return plan(inputs, values)

    return warned


def attempt(op: OpOverload, values: Values) -> None:
    """Run ``op`` on copies on the CPU, for the error it raises."""
    if mode.current.capture is not None:
        values = stand_ins(values)  # values cannot be read while a function is recorded, sizes can
    try:
        with mode.reason("an op tried on the CPU"):
            on_cpu(_SAME_AS.get(op, op), values)
    except Exception as error:
        if _NO_SUCH_OP.search(str(error)):
            return  # which says nothing about the call
        raise error.with_traceback(None) from None


def on_cpu(op: OpOverload, values: Values) -> tuple[Values, Any]:
    """Return the arguments on the CPU, and what ``op`` makes of them there."""
    if op.name().startswith(_CRASHES):
        raise NotImplementedError(
            f"Could not run {op.name()} on the CPU: it reads memory that only oneDNN makes"
        )
    copies: dict[int, Tensor] = {}
    moved = tuple(_to_cpu(value, copies) for value in values)
    args, kwargs = schema_of(op).split(_unpinned(op, numbers_as_tensors(op, moved)))
    return moved, op(*args, **kwargs)


def _to_cpu(value: Any, moved: dict[int, Tensor]) -> Any:
    if isinstance(value, Tensor):
        if value.device.type == "jax" and id(value) not in moved:
            moved[id(value)] = _expanded_like(value)
        return moved.get(id(value), value)
    if isinstance(value, (list, tuple)):
        return [_to_cpu(item, moved) for item in value]
    if isinstance(value, torch.device) and value.type == "jax":
        return torch.device("cpu")
    return value


def _expanded_like(tensor: Tensor) -> Tensor:
    """Return a "jax" tensor on the CPU, expanded there where it is expanded here: it may be of any size."""
    if tensor.layout is not torch.strided:
        return tensor.cpu()
    repeated = [n > 1 and s == 0 for n, s in zip(tensor.shape, tensor.stride(), strict=True)]
    if not any(repeated) or tensor.is_conj() or tensor.is_neg():
        return tensor.cpu()
    once = [1 if again else n for n, again in zip(tensor.shape, repeated, strict=True)]
    return restride(tensor, once, tensor.stride(), int(tensor.storage_offset())).cpu().expand(tensor.shape)


def stand_ins(values: Values, filled: bool = False) -> Values:
    """Return a call's arguments with CPU tensors, of zeros or ones, that lie in memory as those of the device do."""
    bases: dict[int, Tensor] = {}

    def make(tensor: Tensor) -> Tensor:
        nbytes, width = buffer_of(tensor).signature.nbytes, tensor.dtype.itemsize
        place = storage_id(tensor)
        if place not in bases:
            blank = torch.zeros(nbytes, dtype=torch.uint8)
            if filled:
                blank[: nbytes // width * width].view(tensor.dtype).fill_(1)
            bases[place] = blank
        typed = bases[place][: nbytes // width * width].view(tensor.dtype)
        return typed.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())

    return tuple(_replaced(value, make, {}) for value in values)


def compact(
    values: Values, sizes: dict[int, int], filled: bool = False, operands: Set[int] = frozenset()
) -> Values:
    """Return a call's arguments with CPU tensors of other sizes; a tensor that is passed twice still is.

    Numbers that are a size stand for the new size, but for those at the places ``operands``.
    """
    made: dict[Any, Tensor] = {}
    new = torch.ones if filled else torch.zeros

    def make(tensor: Tensor) -> Tensor:
        place = (storage_id(tensor), tensor.storage_offset(), tensor.shape, tensor.stride())
        if (place, tensor.dtype) not in made:
            made[place, tensor.dtype] = new([sizes.get(n, n) for n in tensor.shape], dtype=tensor.dtype)
        return made[place, tensor.dtype]

    return tuple(_replaced(v, make, {} if at in operands else sizes) for at, v in enumerate(values))


def _replaced(value: Any, make: Callable[[Tensor], Tensor], sizes: dict[int, int]) -> Any:
    """Return an argument with tensors that ``make`` made, and sizes that go with them."""
    if isinstance(value, Tensor):
        return make(value) if value.device.type in ("jax", "meta") else value
    if isinstance(value, (list, tuple)):
        return [_replaced(item, make, sizes) for item in value]
    if isinstance(value, torch.device):
        return torch.device("cpu")
    if isinstance(value, torch.Generator):
        return None
    return sizes.get(value, value) if type(value) is int else value


def tensors_of(values: Values) -> list[Tensor]:
    """Return the "jax" tensors of a call, those in lists among them."""
    return [tensor for tensor in _tensors(values) if tensor.device.type == "jax"]


def _tensors(values: Values) -> list[Tensor]:
    """Return the tensors of a call or its results, those in lists among them."""
    flat = [item for v in values for item in (v if isinstance(v, (list, tuple)) else (v,))]
    return [v for v in flat if isinstance(v, Tensor)]
