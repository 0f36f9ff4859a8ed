"""What the border between torch and JAX costs: crossing it, calling across it, training across it.

    python benchmarks/interop.py                    # everything
    python benchmarks/interop.py cross call         # some of it

Contenders take turns in every round, so that a noisy machine is noisy for all of them. torchax takes part where it
is installed.
"""

from __future__ import annotations

import argparse
import copy
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import optax
import torch
import torch.nn.functional as F

import isthmus

sys.path.insert(0, str(Path(__file__).parent))
from peers import torchax_peer
from peers.cases import CASES
from peers.race import race, report
from peers.training import OptaxTraining

STEPS = 5


def best(calls: dict[str, Callable[[], Any]], count: int = 1000, rounds: int = 9) -> dict[str, float]:
    """Return the microseconds of each call: the fastest of rounds in which all take turns."""
    found = dict.fromkeys(calls, float("inf"))
    for _ in range(rounds):
        for name, call in calls.items():
            started = time.perf_counter()
            for _ in range(count):
                call()
            found[name] = min(found[name], (time.perf_counter() - started) / count * 1e6)
    return found


def cross() -> None:
    """Crossing costs the same for a kilobyte and a gigabyte, because nothing is copied."""
    found = {}
    for title, count in (("1 KB", 2**8), ("1 GB", 2**28)):
        tensor = torch.zeros(count, device="jax")
        array = isthmus.to_jax(tensor)
        assert (
            isthmus.to_jax(isthmus.from_jax(array)).unsafe_buffer_pointer() == array.unsafe_buffer_pointer()
        )
        calls = {
            "to_jax": lambda t=tensor: isthmus.to_jax(t),
            "from_jax": lambda a=array: isthmus.from_jax(a),
        }
        found[title] = best(calls)
    print("crossing")
    for name in ("to_jax", "from_jax"):
        small, large = found["1 KB"][name], found["1 GB"][name]
        verdict = "ok" if large < 2 * small else "MISSED"
        print(f"    {name:24} 1 KB {small:6.1f} µs   1 GB {large:6.1f} µs   {verdict}: independent of size")


def call() -> None:
    """A call of a JAX function costs at most 1.5 x that of jax.jit and an eager op together."""
    x = torch.ones(8, 8, device="jax")
    array, jitted, function = isthmus.to_jax(x), jax.jit(jnp.tanh), isthmus.jax_function(jnp.tanh)
    calls = {
        "jax.jit": lambda: jitted(array),
        "eager op": lambda: torch.tanh(x),
        "isthmus.jax_function": lambda: function(x),
    }
    found = best(calls)
    print("calling")
    for name, value in found.items():
        print(f"    {name:24} {value:6.1f} µs")
    ratio = found["isthmus.jax_function"] / (found["jax.jit"] + found["eager op"])
    print(f"    {'ok' if ratio <= 1.5 else 'MISSED'}: {ratio:.2f} x jax.jit + eager op, at most 1.5 x")


def loss_of(model: Any, tokens: Any, targets: Any) -> Any:
    return F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten())


def train(rounds: int) -> None:
    """A step of the small GPT costs at most 1.1 x that of hand-written JAX with optax."""
    case = CASES["small"]()
    original = case.model
    arrays = [jnp.asarray(part.numpy(), jnp.int32) for part in case.batch]
    ours = [part.to("jax") for part in case.batch]
    contenders: dict[str, Callable[[], Any]] = {"jax.jit + optax": case.step}
    with_torch, with_optax = (copy.deepcopy(original).to("jax") for _ in range(2))
    step = isthmus.train_step(with_torch, loss_of, torch.optim.AdamW(with_torch.parameters(), 1e-3))
    contenders["isthmus, torch.optim"] = lambda: step(*ours)
    optimizer = isthmus.optax.Optimizer(with_optax.parameters(), optax.adamw(1e-3, weight_decay=0.01))
    other = isthmus.train_step(with_optax, loss_of, optimizer)
    contenders["isthmus, optax"] = lambda: other(*ours)
    pure = functional_training(original)
    contenders["isthmus.functional"] = lambda: pure(*arrays)
    times = race({name: repeated(run) for name, run in contenders.items()}, rounds)
    for name in ("isthmus, torch.optim", "isthmus, optax", "isthmus.functional"):
        report(f"{STEPS} training steps: {name}", times, "jax.jit + optax", 1.1, name)
    torchax_peer.beside("small", rounds)


def repeated(run: Callable[[], Any]) -> Callable[[], Any]:
    def several() -> Any:
        for _ in range(STEPS):
            found = run()
        return found

    return several


def functional_training(original: Any) -> Any:
    params, apply = isthmus.functional(original)

    def loss(p: Any, tokens: Any, targets: Any) -> Any:
        logits = apply(p, tokens).astype(jnp.float32)
        chosen = jnp.take_along_axis(logits, targets[..., None], -1)[..., 0]
        return (jax.nn.logsumexp(logits, axis=-1) - chosen).mean()

    return OptaxTraining({name: jnp.array(value) for name, value in params.items()}, loss)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("parts", nargs="*", default=["cross", "call", "train"])
    parser.add_argument("--rounds", type=int, default=15)
    chosen = parser.parse_args()
    if "cross" in chosen.parts:
        cross()
    if "call" in chosen.parts:
        call()
    if "train" in chosen.parts:
        train(chosen.rounds)


if __name__ == "__main__":
    main()
