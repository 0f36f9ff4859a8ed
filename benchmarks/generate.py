"""Tokens per second of ``generate()``: a Llama of 134M on a GPU, Isthmus beside CUDA's eager mode.

    python benchmarks/generate.py                                   # every contender, each in a process of its own
    python benchmarks/generate.py --contenders cuda lazy-static
    python benchmarks/generate.py --tiny --device cpu               # to try it without a GPU

Eight rows of 128 tokens are continued by 64, greedily, in bfloat16 with random weights. The first run is timed with
what it compiles; then the median of ``--repeats`` runs. Whether the tokens are those of the first contender is printed:
bfloat16 rounds otherwise in other kernels, so contenders on other devices may leave it at a near tie. Results are
appended to ``benchmarks/results/gpu.jsonl``.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from itertools import chain
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

CONTENDERS = {
    "cuda": "CUDA, eager",
    "cuda-static": 'CUDA, cache_implementation="static", which compiles with TorchInductor',
    "eager": "eager",
    "lazy": "lazy",
    "lazy-static": "lazy, static cache",
    "compile-static": 'torch.compile(backend="isthmus"), static cache',
    "generate": "isthmus.generate: the loop on the device",
}
_NEW = 64
_RESULTS = Path(__file__).parent / "results" / "gpu.jsonl"


def _runner(name: str, model: Any, prompt: Any) -> Callable[[], Any]:
    """Return what generates, as this contender does it."""
    options: dict[str, Any] = {"max_new_tokens": _NEW, "min_new_tokens": _NEW, "do_sample": False}
    if name.endswith("static"):
        options["cache_implementation"] = "static"
    if name == "compile-static":
        from transformers import CompileConfig

        options["compile_config"] = CompileConfig(backend="isthmus", mode=None, fullgraph=False)
    if name == "generate":
        import isthmus

        model.generate = functools.partial(isthmus.generate, model)
    if name.startswith("lazy"):
        import isthmus

        def lazy() -> Any:
            with isthmus.lazy():
                return model.generate(prompt, **options)

        return lazy
    return lambda: model.generate(prompt, **options)


def contend(options: argparse.Namespace) -> None:
    """Be one contender, and print the results."""
    name = options.contenders[0]
    foreign = name.startswith("cuda")
    if not foreign:
        import isthmus  # noqa: F401
    import torch
    from peers.models import build

    subject = build("llama", options.tiny)
    device = options.device if foreign else "jax"
    model = subject.model.to(device).eval()
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0
    prompt = (subject.batch[0] if options.tiny else subject.batch[0][:, :128]).to(device)
    run = _runner(name, model, prompt)
    found: dict[str, Any] = {"contender": name}
    with torch.no_grad():
        taken = []
        for _ in range(1 + options.repeats):
            started = time.perf_counter()
            tokens = run().cpu().tolist()
            taken.append(time.perf_counter() - started)
    made = len(tokens) * (len(tokens[0]) - prompt.shape[1])
    found |= {"first run s": taken[0], "tokens/s": made / statistics.median(taken[1:])}
    print(json.dumps(found | {"tokens": [row[prompt.shape[1] :] for row in tokens]}), flush=True)


def main() -> None:
    """Run what is chosen and print a table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--contenders", nargs="+", choices=CONTENDERS, default=list(CONTENDERS))
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--limit", type=float, default=120, help="seconds that a process may take")
    parser.add_argument("--tiny", action="store_true", help="a model for the CPU")
    parser.add_argument("--device", default="cuda", help="torch's own device")
    parser.add_argument("--label", default="", help="what rows of these results are marked with")
    parser.add_argument("--results", type=Path, default=_RESULTS, help="the file they are appended to")
    parser.add_argument("--be", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.be:
        contend(options)
        return
    first = None
    options.results.parent.mkdir(parents=True, exist_ok=True)

    def keep(found: dict[str, Any]) -> None:
        with options.results.open("a") as file:
            file.write(json.dumps({"benchmark": "generate", "label": options.label, **found}) + "\n")

    for name in options.contenders:
        command = [sys.executable, __file__, "--be", "--contenders", name, "--device", options.device]
        command += ["--repeats", str(options.repeats), *(["--tiny"] if options.tiny else [])]
        environment = dict(os.environ)
        if name.startswith("cuda"):
            environment.pop("ISTHMUS_AUTOLOAD", None)
        try:
            done = subprocess.run(
                command, capture_output=True, text=True, timeout=options.limit, env=environment
            )
        except subprocess.TimeoutExpired:
            print(f"{name:16} no answer in time", flush=True)
            keep({"contender": name, "failed": "no answer in time"})
            continue
        if done.returncode or not done.stdout.strip():
            print(f"{name:16} failed: {done.stderr.strip()[-600:]}", flush=True)
            keep({"contender": name, "failed": done.stderr.strip()[-1500:], "exit": done.returncode})
            continue
        found = json.loads(done.stdout.strip().splitlines()[-1])
        tokens = found.pop("tokens")
        first = first or tokens
        pairs = list(zip(chain(*first), chain(*tokens), strict=True))
        same = sum(a == b for a, b in pairs) / len(pairs)
        keep({**found, "tokens as the first's": same})
        print(
            f"{name:16}{found['tokens/s']:10.0f} tokens/s   first run {found['first run s']:6.1f} s   "
            f"{same:.0%} of the tokens of the first",
            flush=True,
        )


if __name__ == "__main__":
    main()
