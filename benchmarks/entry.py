"""What the generated entries of ops save: µs per call beside a loop over the schema that makes the same key.

    python benchmarks/entry.py --repeats 40 --calls 2000

``isthmus/_device/core/entry.py`` writes a Python function per op, so that a call runs no loop over its arguments. Here
the same work is done by such a loop. Both find the same plan and run the same program; the difference is the entry.
Times are CPU time of the thread, so that other processes on the machine matter little.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

import isthmus  # noqa: F401  # registers the device
from isthmus._device.core.buffer import buffer_of
from isthmus._device.core.dispatch import Kernel, kernel_for
from isthmus._device.core.entry import alias_pattern, foreign, list_part, number_part, static_part
from isthmus._device.torch_glue.registration import load
from isthmus._runtime.host_arrays import device_number

aten = torch.ops.aten


def looped(kernel: Kernel) -> Callable[..., Any]:
    """Return an entry that walks the schema at every call, for ops without random numbers or suspicious ones."""
    schema, dynamic = kernel.schema, kernel.dynamic

    def part(argument: Any, value: Any, inputs: list[Any]) -> Any:
        if isinstance(value, torch.Tensor):
            buffer, offset = buffer_of(value), value.storage_offset()
            inputs.append(buffer.held)
            if offset:
                inputs.append(device_number(offset))
            return (buffer.signature, value.dtype, value.shape, value.stride(), offset != 0)
        if argument.kind == "tensor":
            return number_part(value, inputs, device_number) if dynamic[argument.name] else static_part(value)
        if argument.kind == "tensors" or dynamic[argument.name]:
            if type(value) is not list:
                return number_part(value, inputs, device_number)
            return list_part(value, True, inputs, device_number, None, device_number, foreign)
        if isinstance(value, list):
            return tuple(value)
        return static_part(value) if type(value) in (float, complex) else value

    def entry(*args: Any, **kwargs: Any) -> Any:
        values = schema.ordered(args, kwargs)
        inputs: list[Any] = []
        parts = [part(a, v, inputs) for a, v in zip(schema.arguments, values, strict=True)]
        extras: list[Any] = [torch.get_default_dtype()]
        if kernel.matmul:
            extras.append(torch.get_float32_matmul_precision())
        if schema.mutated:
            extras.append(alias_pattern(values))
        plan = kernel.plans.get((*extras, *parts))
        assert plan is not None, "the loop makes another key than the entry"
        return plan(inputs, values)

    return entry


def cases() -> dict[str, tuple[Any, tuple[Any, ...]]]:
    """Return ops with arguments."""
    x, row = torch.ones(8, 8, device="jax"), torch.ones(8, device="jax")
    return {
        "add": (aten.add.Tensor, (x, x)),
        "mm": (aten.mm.default, (x, x)),
        "layer_norm": (aten.native_layer_norm.default, (x, [8], row, row, 1e-5)),
        "softmax": (aten._softmax.default, (x, -1, False)),
        "add_ to a slice": (aten.add_.Tensor, (torch.ones(8, 8, device="jax")[1], row)),
    }


def microseconds(call: Callable[..., Any], args: tuple[Any, ...], calls: int) -> float:
    """Return the CPU time of one call, of many in a row."""
    start = time.thread_time()
    for _ in range(calls):
        call(*args)
    return (time.thread_time() - start) / calls * 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--repeats", type=int, default=40, help="rounds (40)")
    parser.add_argument("--calls", type=int, default=2000, help="calls in a round (2000)")
    options = parser.parse_args()
    load()
    print(f"{'op':16}{'loop µs':>10}{'entry µs':>10}{'saved':>8}")
    for name, (op, args) in cases().items():
        entry: Any = kernel_for(op)
        kernel = entry.__globals__["_new_plan"].__self__
        contenders = {"loop": looped(kernel), "entry": entry}
        entry(*args)  # compiles
        times: dict[str, list[float]] = {"loop": [], "entry": []}
        for _ in range(options.repeats):
            for contender, call in contenders.items():
                times[contender].append(microseconds(call, args, options.calls))
        loop, generated = statistics.median(times["loop"]), statistics.median(times["entry"])
        print(f"{name:16}{loop:10.2f}{generated:10.2f}{1 - generated / loop:8.0%}")


if __name__ == "__main__":
    main()
