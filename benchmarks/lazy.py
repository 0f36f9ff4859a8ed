"""What lazy mode and isthmus.jit cost: recording an op, a training step and the host's part of it, memory, leaks.

    python benchmarks/lazy.py                   # everything, for the CPU
    python benchmarks/lazy.py record gpt        # some of it

Contenders take turns in every round, so that a noisy machine is noisy for all of them; a time is the median of
its rounds. Every round waits for its results.
"""

from __future__ import annotations

import argparse
import copy
import gc
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import torch
import torch.nn.functional as F
from torch import nn

import isthmus

sys.path.insert(0, str(Path(__file__).parent))
from peers import gpt
from peers.cases import SMALL
from peers.race import race, report
from peers.training import OptaxTraining

# Next to nothing to compute, with as many arrays.
TINY = gpt.Size(layers=4, width=8, heads=2, context=4, vocabulary=16, batch=1)
STEPS = 5
OPS: dict[str, Callable[[Any, Any], Any]] = {
    "sin": lambda x, y: torch.sin(x),
    "add": lambda x, y: torch.add(x, y),
    "add, in place": lambda x, y: x.add_(y),
    "mul by a number": lambda x, y: torch.mul(x, 2.0),
    "mm": lambda x, y: torch.mm(x, y),
    "view": lambda x, y: x.t(),
    "view of a view of a view": lambda x, y: x.t()[1:].t(),
    "add to a view, in place": lambda x, y: x[1:].add_(1.0),
}


def best(call: Callable[[], Any], count: int = 2000, repeats: int = 7) -> float:
    """Return the microseconds of a call: the fastest of several rounds, in which the fewest others interfered."""
    found = float("inf")
    for _ in range(repeats):
        started = time.perf_counter()
        for _ in range(count):
            call()
        found = min(found, (time.perf_counter() - started) / count * 1e6)
        isthmus.sync()
    return found


def record(rounds: int) -> None:
    """The cost of recording an op that was recorded before, beside CPU torch's cost of running it."""
    isthmus.config.graph_size = 10**9
    print("recording, µs per op; at most 10 for functional and in-place ops")
    with torch.no_grad():
        for name, op in OPS.items():
            x, y = torch.ones(8, 8), torch.ones(8, 8)
            cpu = best(lambda op=op, x=x, y=y: op(x, y))
            with isthmus.lazy():
                a, b = x.to("jax") + 0.0, y.to("jax") + 0.0
                lazy = best(lambda op=op, a=a, b=b: op(a, b))
            print(f"    {name:26} {lazy:6.1f}   CPU torch {cpu:6.1f}   {lazy / cpu:5.1f} x")
    isthmus.config.graph_size = 5000


class Contender:
    """A GPT and its optimizer on a device, and the step that trains it."""

    def __init__(self, model: nn.Module, device: str, capturable: bool = False) -> None:
        self.model = copy.deepcopy(model).to(device)
        options = {"capturable": True} if capturable else {}
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3, **options)

    def __call__(self, tokens: Any, targets: Any) -> Any:
        """Run one step and return the loss."""
        loss = F.cross_entropy(self.model(tokens).flatten(0, 1), targets.flatten())
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        return loss.detach()


def several(step: Callable[[], Any]) -> Callable[[], Any]:
    """Return a few steps one after another, none of which waits for the one before it: what a training loop does."""

    def call() -> Any:
        for _ in range(STEPS):
            found = step()
        return found

    return call


def lazily(step: Contender, *batch: Any) -> Callable[[], Any]:
    """Return a few steps in lazy mode, each with a boundary at its end."""

    def call() -> Any:
        with isthmus.lazy():
            for _ in range(STEPS):
                found = step(*batch)
                isthmus.sync()
        return found

    return call


def steps(size: gpt.Size) -> dict[str, Callable[[], Any]]:
    """Return the training step of every contender, on the same weights and the same batch."""
    torch.manual_seed(0)
    model = gpt.GPT(size)
    tokens = torch.randint(size.vocabulary, (size.batch, size.context))
    targets = tokens.roll(-1, 1)
    here = (tokens.to("jax"), targets.to("jax"))
    there = (jnp.asarray(tokens.numpy()), jnp.asarray(targets.numpy()))
    training = OptaxTraining(gpt.parameters(model), lambda p, x, y: gpt.loss(p, x, y, size))
    eager, jitted = Contender(model, "jax"), isthmus.jit(Contender(model, "jax", True))
    compiled = torch.compile(Contender(model, "jax"), backend="isthmus")
    on_cpu = Contender(model, "cpu")
    found = {
        "jax.jit with optax": several(lambda: training(*there)),
        "isthmus.jit": several(lambda: jitted(*here)),
        "lazy": lazily(Contender(model, "jax"), *here),
        "torch.compile": several(lambda: compiled(*here)),
        "eager": several(lambda: eager(*here)),
        "CPU torch": several(lambda: on_cpu(tokens, targets)),
    }
    return found | peers(model, tokens, targets)


def peers(model: nn.Module, tokens: Any, targets: Any) -> dict[str, Callable[[], Any]]:
    """Return the step on torch_xla, where it is installed; torchax does not run a step of torch's own optimizers."""
    try:
        import torch_xla
    except ImportError:
        return {}
    device = torch_xla.device()
    step, batch = Contender(model, device), (tokens.to(device), targets.to(device))

    def call() -> Any:
        found = step(*batch)
        torch_xla.sync()
        return found

    return {"torch_xla": lambda: several(call)().cpu()}


def run_gpt(rounds: int) -> None:
    """The training step of a small GPT, every way there is."""
    times = {name: seconds / STEPS for name, seconds in race(steps(SMALL), rounds).items()}
    report("GPT L4 D128 T64 B4, AdamW step", times, "jax.jit with optax", 1.15, "isthmus.jit")
    ratio = times["eager"] / times["lazy"]
    print(f"    {'ok' if ratio >= 2 else 'MISSED'}: lazy is {ratio:.2f} x as fast as eager, at least 2 x")


def bytes_of(analysis: Any) -> int:
    """Return the peak of a program from XLA's own account: what it is given, makes and needs between."""
    shared = analysis.alias_size_in_bytes
    total = analysis.argument_size_in_bytes + analysis.output_size_in_bytes + analysis.temp_size_in_bytes
    return int(total - shared)


def memory(rounds: int) -> None:
    """XLA's memory analysis of the lazy step beside the JAX step's."""
    from isthmus._lazy import programs

    torch.manual_seed(0)
    model = gpt.GPT(SMALL)
    tokens = torch.randint(SMALL.vocabulary, (SMALL.batch, SMALL.context))
    step, batch = Contender(model, "jax"), (tokens.to("jax"), tokens.roll(-1, 1).to("jax"))
    for _ in range(4):
        lazily(step, *batch)()
    family = next(reversed(programs._families.values()))
    ours = bytes_of(list(family.programs.values())[-1].executable.compiled.memory_analysis())
    training = OptaxTraining(gpt.parameters(model), lambda p, x, y: gpt.loss(p, x, y, SMALL))
    there = (jnp.asarray(tokens.numpy()), jnp.asarray(tokens.roll(-1, 1).numpy()))
    theirs = bytes_of(training.step.lower(training.state, *there).compile().memory_analysis())
    ratio = ours / theirs
    print(f"peak memory: lazy {ours / 2**20:.1f} MiB, jax.jit {theirs / 2**20:.1f} MiB")
    print(f"    {'ok' if ratio <= 1.15 else 'MISSED'}: {ratio:.2f} x, at most 1.15 x")


def leaks(rounds: int) -> None:
    """Five thousand lazy steps of a perceptron: nodes, programs and arrays before and after."""
    from isthmus._graph.nodes import TABLE
    from isthmus._lazy import programs

    model = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 4)).to("jax")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def step() -> None:
        x = torch.randn(4, 8, device="jax")
        loss = model(x).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        isthmus.sync()

    def counts() -> tuple[int, int, int]:
        gc.collect()
        return len(TABLE), len(programs._families), len(jax.live_arrays())

    with isthmus.lazy():
        for _ in range(10):
            step()
        before = counts()
        for _ in range(5000):
            step()
        after = counts()
    print(f"nodes, programs, arrays after 10 steps {before}, after 5,010 {after}")
    print(f"    {'ok' if before == after else 'MISSED'}: nothing leaks")


def host(rounds: int) -> None:
    """The same step with next to nothing to compute: what the host does for it, in Python and in the runtimes."""
    times = {name: seconds / STEPS for name, seconds in race(steps(TINY), rounds).items()}
    report("GPT L4 D8 T4 B1, AdamW step", times, "jax.jit with optax")


PARTS = {"record": record, "gpt": run_gpt, "host": host, "memory": memory, "leaks": leaks}


def main() -> None:
    """Run the parts that are named, or all of them."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("parts", nargs="*", choices=[*PARTS, []], default=[])
    parser.add_argument("--rounds", type=int, default=15)
    options = parser.parse_args()
    for name in options.parts or PARTS:
        PARTS[name](options.rounds)


if __name__ == "__main__":
    main()
