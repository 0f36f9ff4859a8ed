"""What the passes on graphs save: XLA's temporary memory for a training step of a small GPT, with and without each.

    python benchmarks/passes.py                 # lazy mode, isthmus.jit and torch.compile

The number is XLA's own: the bytes its plan reserves for intermediate values beside arguments and results, the largest
of the programs that a step runs. For torch.compile the bytes that forward saves for backward are shown as well.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

import isthmus
from isthmus._dynamo import joint
from isthmus._graph import passes
from isthmus._runtime import compiler

sys.path.insert(0, str(Path(__file__).parent))
from peers import gpt

# A vocabulary that is large beside the width, as language models have it.
SIZE = gpt.Size(layers=2, width=128, heads=4, context=128, vocabulary=8192, batch=8)


def step_of(model: torch.nn.Module, optimizer: Any, way: str) -> Callable[[torch.Tensor], torch.Tensor]:
    """Return a training step that runs in a mode."""

    def loss_of(tokens: torch.Tensor) -> torch.Tensor:
        logits = model(tokens[:, :-1])
        return F.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten())

    forward = torch.compile(loss_of, backend="isthmus") if way == "compile" else loss_of

    def step(tokens: torch.Tensor) -> torch.Tensor:
        loss = forward(tokens)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    if way == "jit":
        return isthmus.jit(step)
    if way != "lazy":
        return step

    def lazy(tokens: torch.Tensor) -> torch.Tensor:
        with isthmus.lazy():
            return step(tokens)

    return lazy


def measure(way: str, without: str = "") -> dict[str, float]:
    """Return the MiB that a step's programs take, without one of the passes."""
    torch.manual_seed(0)
    torch._dynamo.reset()
    isthmus.clear_caches()
    model = gpt.GPT(SIZE).to("jax", torch.bfloat16)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    tokens = torch.randint(SIZE.vocabulary, (SIZE.batch, SIZE.context), device="jax")
    executables: list[Any] = []
    build, every = compiler.build, passes.PASSES

    def watched(*args: Any, **kwargs: Any) -> compiler.Executable:
        executables.append(build(*args, **kwargs))
        return executables[-1]

    compiler.build = watched  # every program is compiled through it
    passes.PASSES = tuple(each for each in every if each.name != without)
    joint.PASSES = passes.PASSES
    try:
        step_of(model, optimizer, way)(tokens).item()
    finally:
        compiler.build, passes.PASSES, joint.PASSES = build, every, every
    analyses = [each.compiled.memory_analysis() for each in executables]
    sizes = {"temporary": max(each.temp_size_in_bytes for each in analyses) / 2**20}
    if way == "compile":
        large = [each for each in analyses if each.output_size_in_bytes > 2**16]
        sizes["saved by forward"] = large[0].output_size_in_bytes / 2**20
    return sizes


def main() -> None:
    """Print a row for each mode and pass."""
    for way in ("lazy", "jit", "compile"):
        modes = {"compile", "joint"} if way == "compile" else {"lazy"}
        whole = measure(way)
        print(f"{way:8} all passes            " + ", ".join(f"{k} {v:8.1f} MiB" for k, v in whole.items()))
        for each in passes.PASSES:
            if each.modes & modes:
                less = measure(way, each.name)
                row = ", ".join(f"{k} {v:8.1f} MiB" for k, v in less.items())
                print(f"{way:8} without {each.name:14}{row}")


if __name__ == "__main__":
    main()
