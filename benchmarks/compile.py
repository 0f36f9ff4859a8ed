"""What a compiled call and a compiled model cost: backend "isthmus" beside hand-written JAX, TorchInductor, torchax.

    python benchmarks/compile.py                 # everything, for the CPU
    python benchmarks/compile.py overhead gpt    # some of it
    python benchmarks/compile.py gpt2            # the 124M training step, for a GPU

Contenders take turns in every round, so that a noisy machine is noisy for all of them; a time is the median of
its rounds. Every round waits for its results.
"""

from __future__ import annotations

import argparse
import copy
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).parent))
from peers import gpt, torchax_peer
from peers.cases import CASES, token_loss
from peers.race import Thunk, race, report
from peers.training import JaxTraining

DEVICE = "jax"


def overhead(rounds: int) -> None:
    """A compiled function of one op, beside the bare jitted call plus Dynamo with a backend that does nothing.

    Beside them Dynamo with a backend that makes the bare jitted call: both in turn take longer than the sum of each
    alone, whose caches stay warm.
    """
    x, a = torch.randn(4, 4, device=DEVICE), jnp.ones((4, 4))
    done = (x + 1,)
    jitted = jax.jit(lambda a: a + 1)
    nothing = torch.compile(lambda x: x + 1, backend=lambda module, inputs: lambda *args: done)
    least = torch.compile(lambda x: x + 1, backend=lambda module, inputs: lambda *args: (jitted(a), done)[1])
    compiled = torch.compile(lambda x: x + 1, backend="isthmus")
    times = race(
        {
            "jax.jit": lambda: jitted(a),
            "dynamo": lambda: nothing(x),
            "jax.jit in dynamo": lambda: least(x),
            "isthmus": lambda: compiled(x),
        },
        rounds,
        500,
    )
    times["jax.jit + dynamo"] = times["jax.jit"] + times["dynamo"]
    report("one op", times, "jax.jit + dynamo", 1.3)


def torch_step(model: nn.Module, backend: str, optimizer: Any, loss: Any) -> Callable[..., Any]:
    """Return a training step in plain PyTorch, all of it given to torch.compile."""

    @torch.compile(backend=backend)
    def step(x: Any, y: Any) -> Any:
        found = loss(model(x), y)
        found.backward()
        optimizer.step()
        optimizer.zero_grad()
        return found.detach()

    return step


def run_gpt(rounds: int) -> None:
    """The forward pass and the training step of a GPT of four layers."""
    compare("gpt", rounds)


def run_resnet(rounds: int) -> None:
    """The forward pass and the training step of a ResNet-18."""
    compare("resnet", rounds)


def compare(name: str, rounds: int) -> None:
    """Race the contenders through the forward pass and through the training step of a model."""
    case = CASES[name]()
    contenders: dict[str, Thunk] = {"jax": case.forward}
    steps: dict[str, Thunk] = {"jax": case.step}
    for backend, device in {"isthmus": DEVICE, **PEERS}.items():
        torch._dynamo.reset()
        x, y = case.batch[0].to(device), case.batch[1].to(device)
        mine = copy.deepcopy(case.model).to(device).eval()
        compiled = torch.compile(mine, backend=backend)
        contenders[backend] = no_grad(compiled, x)
        other = copy.deepcopy(case.model).to(device)
        optimizer = torch.optim.AdamW(other.parameters(), lr=1e-3)
        steps[backend] = bound(torch_step(other, backend, optimizer, case.loss), x, y)
    report(f"{case.title}, forward", race(contenders, rounds), "jax", 1.1)
    report(f"{case.title}, training step", race(steps, rounds), "jax", 1.1)
    torchax_peer.beside(name, rounds)


def no_grad(function: Callable[..., Any], x: Any) -> Thunk:
    """Return a call without gradients."""

    def call() -> Any:
        with torch.no_grad():
            return function(x)

    return call


def bound(function: Callable[..., Any], *args: Any) -> Thunk:
    """Return a call of a function with these arguments."""
    return lambda: function(*args)


def has_compiler() -> bool:
    """Return whether TorchInductor finds the C++ compiler it needs."""
    import shutil

    return shutil.which("g++") is not None or shutil.which("clang++") is not None


def recompilations(rounds: int) -> None:
    """Compilations over 50 calls of one size, and Dynamo's over 20 batch sizes."""
    from torch._dynamo.utils import counters

    import isthmus

    model = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 4)).to(DEVICE)
    compiled = torch.compile(model, backend="isthmus")
    compiled(torch.randn(8, 16, device=DEVICE))
    x = torch.randn(8, 16, device=DEVICE)
    before = isthmus.metrics.counts()["compilations"]
    for _ in range(50):
        compiled(x)
    print(f"recompilations over 50 calls: {isthmus.metrics.counts()['compilations'] - before}, at most 0")
    torch._dynamo.reset()
    counters.clear()
    dynamic = torch.compile(model, backend="isthmus", dynamic=True)
    for batch in range(2, 22):
        dynamic(torch.randn(batch, 16, device=DEVICE))
    print(f"Dynamo's graphs over 20 batch sizes: {counters['stats']['unique_graphs']}, at most 2")


PEERS = {"inductor": "cpu"} if has_compiler() else {}
GPT2 = gpt.Size(layers=12, width=768, heads=12, context=1024, vocabulary=50304, batch=8)


def gpt2(rounds: int) -> None:
    """The training step of GPT-2 124M in bfloat16 on a GPU, each contender in a process of its own."""
    times = {}
    for name in ("jax", "inductor", "eager", "isthmus", "isthmus.jit", "lazy"):
        command = [sys.executable, __file__, "--contender", name, "--rounds", str(rounds)]
        found = subprocess.run(command, capture_output=True, text=True, check=False)
        print("\n".join(line for line in found.stdout.splitlines() if not line.startswith("seconds")))
        seconds = [line.split()[1] for line in found.stdout.splitlines() if line.startswith("seconds")]
        if seconds:
            times[name] = float(seconds[0])
        else:
            print(f"    {name} failed: {found.stderr[-2000:]}")
    for ours in ("isthmus", "isthmus.jit"):
        report("GPT-2 124M, training step, bfloat16", times, "inductor", 1.1, ours)


def contend(name: str, rounds: int) -> None:
    """Run the training step of GPT-2 124M as one contender, and print its seconds."""
    torch.manual_seed(0)
    model = gpt.GPT(GPT2).to(torch.bfloat16)
    tokens = torch.randint(GPT2.vocabulary, (GPT2.batch, GPT2.context))
    targets = tokens.roll(-1, 1)
    if name == "jax":
        p = {key: value.astype(jnp.bfloat16) for key, value in gpt.parameters(model).items()}
        training = JaxTraining(p, lambda p, x, y: gpt.loss(p, x, y, GPT2, "cudnn"))
        batch = (jnp.asarray(tokens.numpy()), jnp.asarray(targets.numpy()))
        run = bound(training, *batch)
    else:
        run = torch_contender(name, model, tokens, targets)
    print(f"seconds {race({name: run}, rounds)[name]}")


def torch_contender(name: str, model: nn.Module, tokens: Any, targets: Any) -> Thunk:
    """Return the training step in plain PyTorch on the contender's device."""
    ours = name in ("isthmus", "isthmus.jit", "lazy")
    device = "jax" if ours else "cuda"
    if ours:
        import isthmus
    model = model.to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, capturable=name == "isthmus.jit")
    step = torch_step(model, "isthmus" if ours else name, optimizer, token_loss)
    plain = step._torchdynamo_orig_callable  # type: ignore[attr-defined]
    if name == "eager":
        step = plain
    elif name == "isthmus.jit":
        step = isthmus.jit(plain)
    elif name == "lazy":
        step = isthmus.lazy()(plain)
    return bound(step, tokens.to(device), targets.to(device))


PARTS = {
    "overhead": overhead,
    "gpt": run_gpt,
    "resnet": run_resnet,
    "recompilations": recompilations,
    "gpt2": gpt2,
}


def main() -> None:
    """Run the parts that are named, or all of them."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("parts", nargs="*", choices=[*PARTS, []], default=[])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--without-inductor", action="store_true", help="its first call takes minutes")
    parser.add_argument("--contender", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.contender:
        contend(options.contender, options.rounds)
        return
    if options.without_inductor:
        PEERS.pop("inductor", None)
    for name in options.parts or [name for name in PARTS if name != "gpt2"]:
        PARTS[name](options.rounds)


if __name__ == "__main__":
    main()
