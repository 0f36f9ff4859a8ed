"""What a replay would not do again: reading, changing and drawing tensors of the CPU, refused while recording.

Ops on the device are recorded; ops on tensors of the CPU run once, now, and a replay leaves them out. That is right for
tensors that the function has made itself (a constant of the recording) and wrong for all others. ``Capture`` runs the
function inside of both watches here: ``OpWatch`` sees every op, ``ApiWatch`` the few calls that read a CPU tensor
without one (``tolist``, ``numpy``). What they refuse raises ``JitError`` with the line and what to do instead.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from isthmus._device.torch_glue.private import in_backward
from isthmus._device.torch_glue.pytree import tree_flatten
from isthmus._graph.schema import schema_of
from isthmus._runtime.user_frames import user_line
from isthmus.errors import JitError

_READS = (Tensor.tolist, Tensor.numpy, Tensor.__array__, Tensor.__dlpack__, Tensor.__iter__)


class OpWatch(TorchDispatchMode):
    """Looks at every op: those on the CPU may only use tensors that were made inside."""

    def __init__(self) -> None:
        super().__init__()
        self.born: dict[int, Tensor] = {}
        self.differentiates = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an op, or refuse it."""
        kwargs = kwargs or {}
        # Backward inside the function means that a result's own graph is not needed.
        self.differentiates = self.differentiates or in_backward()
        tensors = tensors_in((args, kwargs))
        # Ops of the device are recorded; these would run now and never again.
        if tensors and not any(t.device.type == "jax" for t in tensors):
            self._check(func, tensors, args, kwargs)
        result = func(*args, **kwargs)
        # A CPU tensor that was made in here is a constant of the recording, so ops on it are harmless.
        created = [t for t in tensors_in(result) if t.device.type != "jax"]
        if created and torch.Tag.nondeterministic_seeded in func.tags:
            raise JitError(
                f"isthmus.jit: {func} draws random numbers on the CPU ({user_line()}), which a replay would "
                f'not draw again; draw them on the device, with device="jax"'
            )
        self.born |= {id(t): t for t in created}
        return result

    def _check(self, func: Any, given: list[Tensor], args: Any, kwargs: Any) -> None:
        if func is torch.ops.aten.lift_fresh.default:
            return  # torch.tensor(...) passes what it has just made through here
        # A move to the device is repeated by the replay (``Capture.note_host``).
        moves = any(isinstance(v, torch.device) and v.type == "jax" for v in (*args, *kwargs.values()))
        if moves or all(id(t) in self.born for t in given):
            return
        schema = schema_of(func)
        written = [v for n, v in schema.bind(args, kwargs).items() if n in schema.mutated]
        if any(id(t) not in self.born for t in tensors_in(written)):
            raise JitError(
                f"isthmus.jit: {func} changes a tensor on the CPU ({user_line()}), which a replay would not do "
                f"again. An optimizer's step counter stays on the device with capturable=True; move other "
                f'tensors to "jax" before the call'
            )
        raise JitError(
            f"isthmus.jit: {func} computes with a tensor on the CPU ({user_line()}), which a replay would not do "
            f'again; move the tensor to "jax" first'
        )


class ApiWatch(TorchFunctionMode):
    """Looks at the few calls that read a tensor of the CPU without an op."""

    def __init__(self, ops: OpWatch) -> None:
        super().__init__()
        self.ops = ops

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run a call, or refuse it."""
        if func in _READS and args[0].device.type != "jax" and id(args[0]) not in self.ops.born:
            raise JitError(
                f"isthmus.jit: a tensor on the CPU is read ({user_line()}), which a replay would not do again; pass "
                f"the numbers as arguments"
            )
        return func(*args, **(kwargs or {}))


def tensors_in(value: Any) -> list[Tensor]:
    """Return the tensors in nested containers."""
    return [leaf for leaf in tree_flatten(value)[0] if isinstance(leaf, Tensor)]
