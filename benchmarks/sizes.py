"""Sizes that change: compilations and seconds of Isthmus beside CPU torch, hand-written JAX and TorchInductor.

    python benchmarks/sizes.py                                    # every task, each contender in a process of its own
    python benchmarks/sizes.py generate --contenders lazy jax     # some of it
    python benchmarks/sizes.py fill                               # padded steps beside exact ones
    python benchmarks/sizes.py --cpu-time                         # on a machine that others use too

``generate`` continues a prompt by 64 tokens with a Llama of transformers and the cache it has by default, which grows
by a token at a time. ``lengths`` trains a GPT with AdamW on sentences of 20 lengths, ``batches`` on two epochs whose
last batch is short. Each runs for some sizes, then for *other* sizes, then for those once more: what a program for a
range of sizes saves is the second, what it may cost is the third. ``fill`` is a training step on 100 tokens that are
padded to 128 beside its exact program, and beside the exact step on 128 tokens (``static``): what a padded one takes if
true sizes and masks cost nothing. Each has a process of its own that keeps its memory (docs/performance.md): a step on
128 tokens needs 37 MiB, and from 32 MiB on glibc gets a program's memory from the system at every run, which would be
most of the difference. ``--faults`` measures that too.

TorchInductor compiles with ``dynamic=True`` into an empty cache. JAX is as one writes it first, ``jax.jit`` of a
function of the sizes there are; in ``generate`` also with a cache of full size. Whether tokens and losses are those of
the first contender is printed. ``--cpu-time`` gives every contender one thread for its products and counts seconds of
processors, of C++ compilers too.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

OURS = ("lazy", "compile", "jit", "eager")
CONTENDERS = {
    "generate": ("cpu", "inductor", "jax", "jax-static", "lazy", "compile", "eager"),
    "lengths": ("cpu", "inductor", "jax", "lazy", "compile", "jit"),
    "batches": ("cpu", "inductor", "jax", "lazy", "compile", "jit"),
}
_NEW = 64
# Prompts, sentences (batches of 4 of them) and batches: (rows, tokens) of each step. The others are of other sizes.
_LENGTHS = [54, 34, 23, 40, 42, 13, 14, 25, 52, 39, 27, 20, 19, 30, 36, 29, 37, 47, 45, 55]
SIZES: dict[str, tuple[list[tuple[int, int]], list[tuple[int, int]]]] = {
    "generate": ([(1, 7)], [(1, 12)]),
    "lengths": ([(4, n) for n in _LENGTHS], [(4, n + 1) for n in _LENGTHS]),
    "batches": ([(8, 32)] * 6 + [(5, 32)], [(8, 32)] * 6 + [(3, 32)]),
}
_FILL, _PADDED, _STEPS, _MOST = 100, 128, 2, 1.3
_KEEP_MEMORY = {
    "MALLOC_ARENA_MAX": "1",
    "MALLOC_MMAP_THRESHOLD_": "4294967296",
    "MALLOC_TRIM_THRESHOLD_": "8589934592",
}

Run = Callable[[Sequence[tuple[int, int]]], list[Any]]


def _tokens(rows: int, length: int, vocabulary: int) -> Any:
    import torch

    generator = torch.Generator().manual_seed(rows * 1000 + length)
    return torch.randint(2, vocabulary, (rows, length), generator=generator)


def _llama() -> Any:
    import torch
    import transformers

    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        hidden_size=256, intermediate_size=512, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=1024, max_position_embeddings=256, eos_token_id=None, pad_token_id=0, bos_token_id=1,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config).eval()


def _around(name: str) -> contextlib.AbstractContextManager[Any]:
    """Return what a contender runs in."""
    if name != "lazy":
        return contextlib.nullcontext()
    import isthmus

    return isthmus.lazy()


def torch_generate(name: str) -> Run:
    """Return what generates after prompts of some sizes."""
    import torch

    model = _llama().to("jax" if name in OURS else "cpu")
    if name in ("compile", "inductor"):
        backend = "isthmus" if name == "compile" else "inductor"
        model.forward = torch.compile(model.forward, backend=backend, dynamic=name == "inductor" or None)

    def run(sizes: Sequence[tuple[int, int]]) -> list[Any]:
        found = []
        for size in sizes:
            prompt = _tokens(*size, 1024).to(model.device)
            with torch.no_grad(), _around(name):
                tokens = model.generate(prompt, max_new_tokens=_NEW, do_sample=False)
                found += tokens.cpu()[:, size[1] :].flatten().tolist()
        return found

    return run


def jax_generate(name: str) -> Run:
    """The same in JAX: one jitted function, whose cache grows, or has its full size at once (``jax-static``)."""
    import jax
    import jax.numpy as jnp
    from peers import llama

    model = _llama()
    p, size = llama.parameters(model), llama.Size.of(model.config)
    del model
    step = jax.jit(partial(llama.step, size=size), donate_argnums=2 if name == "jax-static" else ())

    def run(sizes: Sequence[tuple[int, int]]) -> list[Any]:
        found = []
        for rows, length in sizes:
            tokens = jnp.asarray(_tokens(rows, length, 1024).numpy(), jnp.int32)
            cache = llama.empty_cache(size, rows, 128 if name == "jax-static" else None)
            at, made = 0, []
            for _ in range(_NEW):
                tokens, cache = step(p, tokens, cache, at if name == "jax-static" else None)
                at = length + len(made)
                made.append(tokens)
            found += jnp.concatenate(made, 1).flatten().tolist()
        return found

    return run


def _gpt() -> Any:
    import torch
    from peers import gpt

    size = gpt.Size(layers=2, width=128, heads=4, context=128, vocabulary=512)
    torch.manual_seed(0)
    return gpt.GPT(size), size


def _token_loss(model: Any, tokens: Any) -> Any:
    from peers.cases import token_loss

    return token_loss(model(tokens[:, :-1]), tokens[:, 1:])


def torch_training(name: str, shapes: str | None = None) -> Callable[[Any], Any]:
    """Return a training step in plain PyTorch on tokens, as a contender runs it."""
    import torch

    model = _gpt()[0].to("jax" if name in OURS else "cpu")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, capturable=name in OURS)
    loss_of = _token_loss
    if name == "compile":
        options = {"shapes": shapes} if shapes else {}
        loss_of = torch.compile(_token_loss, backend="isthmus", options=options)
    elif name == "inductor":
        loss_of = torch.compile(_token_loss, dynamic=True)

    def step(tokens: Any) -> Any:
        loss = loss_of(model, tokens)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    if name == "jit":
        import isthmus

        return isthmus.jit(step)
    return step


def training(name: str) -> Run:
    """Return what trains on batches of some sizes."""
    if name == "jax":
        import jax.numpy as jnp
        from peers import gpt
        from peers.training import JaxTraining

        model, size = _gpt()
        train = JaxTraining(gpt.parameters(model), lambda p, x, y: gpt.loss(p, x, y, size))

        def step(tokens: Any) -> Any:
            tokens = tokens.numpy()
            return train(jnp.asarray(tokens[:, :-1]), jnp.asarray(tokens[:, 1:]))
    else:
        torch_step = torch_training(name)

        def step(tokens: Any) -> Any:
            return torch_step(tokens.to("jax" if name in OURS else "cpu"))

    def run(sizes: Sequence[tuple[int, int]]) -> list[Any]:
        losses = []
        for size in sizes:
            with _around(name):
                losses.append(float(step(_tokens(*size, 512))))
        return losses

    return run


def clock(cpu_time: bool) -> float:
    """Return seconds that have passed, or seconds of processors that this process and those it has ended took."""
    return sum(os.times()[:4]) if cpu_time else time.perf_counter()


class Compilations:
    """How many programs a contender has compiled so far."""

    def __init__(self, name: str) -> None:
        self._name, self._seen = name, 0
        if name.startswith("jax"):
            import jax

            jax.monitoring.register_event_duration_secs_listener(self._listen)

    def _listen(self, event: str, *_: Any, **__: Any) -> None:
        self._seen += event == "/jax/core/compile/backend_compile_duration"

    @property
    def count(self) -> int:
        """Return the number; of TorchInductor that of graphs, forward and backward."""
        if self._name in OURS:
            import isthmus

            return int(isthmus.metrics.counts()["compilations"])
        if self._name == "inductor":
            from torch._dynamo.utils import counters

            return int(counters["inductor"]["fxgraph_cache_miss"])
        return self._seen


def contend(task: str, name: str, cpu_time: bool) -> None:
    """Be one contender, and print what it took."""
    if name in OURS:
        import isthmus

        isthmus.config.shapes = "auto"
        isthmus.config.small_ops = "host"
    compilations = Compilations(name)
    make = training if task != "generate" else jax_generate if name.startswith("jax") else torch_generate
    run = make(name)
    first, others = SIZES[task]
    found: dict[str, Any] = {"results": [], "seconds": [], "compilations": []}
    for sizes in (first, others, others):
        before, started = compilations.count, clock(cpu_time)
        found["results"] += run(sizes)
        found["seconds"].append(clock(cpu_time) - started)
        found["compilations"].append(compilations.count - before)
    print(json.dumps(found), flush=True)


def be_filled(mode: str, contender: str) -> None:
    """Be a contender of ``fill``: for each line that comes, run steps and print the seconds that one took."""
    import isthmus

    isthmus.config.shapes = shapes = "auto" if contender == "padded" else "exact"
    isthmus.config.buckets = 1  # no narrower range, however often the size comes
    step = torch_training(mode, shapes)
    batches = {n: _tokens(8, n + 1, 512).to("jax") for n in (_FILL, _PADDED - 8, _PADDED - 4, _PADDED)}

    def call(n: int) -> None:
        with _around(mode):
            loss = step(batches[n])
            isthmus.sync()
        loss.item()

    if contender == "padded":  # programs for ranges come with the second size
        for n in (_PADDED - 8, _PADDED - 4) * 2:
            call(n)
    size = _PADDED if contender == "static" else _FILL
    for _ in range(2):
        call(size)
    before = isthmus.metrics.counts()
    print(json.dumps("ready"), flush=True)
    for _ in sys.stdin:
        cpu, wall = time.process_time(), time.perf_counter()
        for _ in range(_STEPS):
            call(size)
        seconds = [time.process_time() - cpu, time.perf_counter() - wall]
        print(json.dumps([each / _STEPS for each in seconds]), flush=True)
    after = isthmus.metrics.counts()
    assert after["compilations"] == before["compilations"], "compiled while it was timed"
    padded = after.get("padding added", 0) > before.get("padding added", 0)
    assert padded == (contender == "padded"), f"{contender}: padding was {'added' if padded else 'not added'}"


def fill(options: argparse.Namespace) -> None:
    """Race a step on 100 tokens that are padded to 128 against its exact program, in each mode."""
    environment = os.environ if options.faults else {**os.environ, **_KEEP_MEMORY}
    for mode in options.contenders or ("lazy", "compile", "jit"):
        processes = {}
        for name in ("exact", "static", "padded"):
            command = [sys.executable, __file__, "fill", "--be", f"{mode}-{name}"]
            pipe = subprocess.PIPE
            processes[name] = subprocess.Popen(
                command, stdin=pipe, stdout=pipe, text=True, bufsize=1, env=environment
            )
        for process in processes.values():
            assert _answer(process) == "ready"
        times: dict[str, list[list[float]]] = {name: [] for name in processes}
        # A size that has come 64 times gets its exact program.
        for _ in range(min(options.rounds, 60 // _STEPS)):
            for name, process in processes.items():
                assert process.stdin is not None
                process.stdin.write("go\n")
                times[name].append(_answer(process))
        for process in processes.values():
            process.communicate()
            assert process.returncode == 0
        medians = {
            name: [statistics.median(each) for each in zip(*rows, strict=True)]
            for name, rows in times.items()
        }
        print(
            f"{mode}: a step on {_FILL} tokens, exactly and padded to {_PADDED}; on {_PADDED} tokens (static)"
        )
        for name, seconds in medians.items():
            pairs = zip(("processors", "wall"), seconds, medians["exact"], strict=True)
            print(
                f"    {name:8}", *[f"  {what} {s * 1e3:7.2f} ms {s / peer:5.2f} x" for what, s, peer in pairs]
            )
        ratio = medians["padded"][0] / medians["exact"][0]
        print(f"    {'ok' if ratio <= _MOST else 'MISSED'}: {ratio:.2f} x, at most {_MOST} x", flush=True)


def _answer(process: subprocess.Popen[str]) -> Any:
    """Return what a process answers in one line."""
    assert process.stdout is not None
    return json.loads(process.stdout.readline())


def show(task: str, options: argparse.Namespace) -> None:
    """Run the contenders of a task one after another, and print a row for each."""
    print(f"{task}: seconds (compilations)        first, other sizes, those again", flush=True)
    expected = None
    for name in options.contenders or CONTENDERS[task]:
        if name not in CONTENDERS[task]:
            continue
        with tempfile.TemporaryDirectory() as caches:
            environment = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": caches}
            if name not in OURS:
                environment.pop("ISTHMUS_AUTOLOAD", None)
            command = [sys.executable, __file__, task, "--be", name]
            if options.cpu_time:
                command.append("--cpu-time")
                environment |= {"OMP_NUM_THREADS": "1", "TORCHINDUCTOR_COMPILE_THREADS": "1"}
            try:
                done = subprocess.run(
                    command, capture_output=True, text=True, timeout=options.limit, env=environment
                )
            except subprocess.TimeoutExpired:
                print(f"    {name:12} no answer in {options.limit:.0f} s", flush=True)
                continue
        if done.returncode or not done.stdout.strip():
            print(f"    {name:12} failed: {done.stderr.strip()[-800:]}", flush=True)
            continue
        found = json.loads(done.stdout.strip().splitlines()[-1])
        expected = expected or found["results"]
        off = max(abs(a - b) for a, b in zip(expected, found["results"], strict=True))
        pairs = zip(found["seconds"], found["compilations"], strict=True)
        cells = chain.from_iterable(f"{seconds:9.2f} ({count:3})" for seconds, count in pairs)
        same = "equal" if off == 0 else f"off by {off:.1e}"
        print(f"    {name:12}{''.join(cells)}   {same}", flush=True)


def main() -> None:
    """Run what is chosen."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("tasks", nargs="*", choices=[*CONTENDERS, "fill", []], default=[])
    parser.add_argument("--contenders", nargs="+", default=[])
    parser.add_argument("--rounds", type=int, default=20, help="rounds of fill")
    parser.add_argument(
        "--faults", action="store_true", help="fill: let glibc give memory back after each step"
    )
    parser.add_argument("--limit", type=float, default=600, help="seconds that a process may take")
    parser.add_argument("--cpu-time", action="store_true", help="count seconds of processors")
    parser.add_argument("--be", help=argparse.SUPPRESS)
    options = parser.parse_args()
    for task in options.tasks or [*CONTENDERS, "fill"]:
        if options.be and task == "fill":
            be_filled(*options.be.split("-"))
        elif options.be:
            contend(task, options.be, options.cpu_time)
        elif task == "fill":
            fill(options)
        else:
            show(task, options)


if __name__ == "__main__":
    main()
