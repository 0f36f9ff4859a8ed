"""Every private API of Dynamo that Isthmus uses; checked on torch 2.11 and 2.13 by tests/test_private.py."""

from __future__ import annotations

import functools
from typing import Any


@functools.cache
def keep_optimizer_steps_on_device() -> None:
    """Let Dynamo trace an optimizer on "jax" as it does on CUDA: with its step counts on the device.

    Left on the CPU, each parameter's count would cross to the device and back in every step.
    """
    from torch._dynamo.variables.optimizer import OptimizerVariable

    original = OptimizerVariable._set_capturable

    def set_capturable(self: Any, tx: Any) -> None:
        for group in self.value.param_groups:
            fresh = all(p.device.type == "jax" and p not in self.value.state for p in group["params"])
            if fresh and "capturable" in group:
                group["capturable"] = True
        original(self, tx)

    OptimizerVariable._set_capturable = set_capturable  # type: ignore[method-assign]
