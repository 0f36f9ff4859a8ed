"""Training steps and forward passes of eight models on a GPU: Isthmus beside CUDA's eager mode and TorchInductor.

    python benchmarks/gpu.py                                             # everything: about an hour
    python benchmarks/gpu.py --models llama bert --contenders inductor jit step
    python benchmarks/gpu.py --parallel 6 ...                            # first calls side by side, timings alone
    python benchmarks/gpu.py --profile ...                               # the kernels a step spends its time in
    python benchmarks/gpu.py --label monday --minutes 9 --resume         # again and again, until nothing is left
    python benchmarks/gpu.py --second --pairs llama:jit llama:inductor   # first calls, and those of a second process
    python benchmarks/gpu.py --exits 20 --pairs llama:cuda-step          # how as many processes end
    python benchmarks/gpu.py --tiny --device cpu ...                     # to try it without a GPU

Every contender runs in a process of its own, with a time limit. It builds the model, makes its first call and trains
five steps, whose losses are compared with CUDA's; then it waits until it has the GPU to itself, and is timed: steps
that are each waited for, and steps that are only waited for at the end. Fallbacks to the CPU, and nodes of compiled
graphs that stayed outside of programs, make it fail. ``--parallel`` lets several do the first part at a time, which
makes first calls slower and nothing else; without it one follows the other.

Results are printed as a table and appended to ``benchmarks/results/gpu.jsonl``, one line for each, with the ``--label``
they were measured under; ``--resume`` leaves out what that file has under the same label. ``benchmarks/generate.py``
measures ``generate()`` and keeps its results there too.
"""

from __future__ import annotations

import argparse
import json
import os
import select
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
Record = dict[str, Any]

CONTENDERS = {
    "cuda": "CUDA, eager",
    "inductor": "TorchInductor, whole step",
    "jit": "isthmus.jit",
    "step": 'torch.compile(backend="isthmus"), whole step',
    "model": 'torch.compile(backend="isthmus"), model alone',
    "lazy": "lazy",
    "eager": "eager",
    "cuda-step": 'torch.compile(backend="isthmus"), whole step, on CUDA tensors',
}
_OURS = frozenset({"jit", "step", "model", "lazy", "eager", "cuda-step"})
_RESULTS = Path(__file__).parent / "results" / "gpu.jsonl"
_LOSSES, _WARM, _REPEATS = 5, 3, 20
_TIMING = 60.0  # the seconds that the timed part may take at least


class Contender:
    """A model, its optimizer and its batch on a device, and the ways to run them."""

    def __init__(self, model: str, name: str, tiny: bool, foreign: str) -> None:
        if name in _OURS and name != "cuda-step":
            import isthmus

            self.isthmus = isthmus
        import torch
        from peers.models import build

        subject = build(model, tiny)
        self.name, self.loss = name, subject.loss
        self.device = "jax" if name in _OURS and name != "cuda-step" else foreign
        self.model = subject.model.to(self.device)
        self.batch = [t.to(self.device) for t in subject.batch]
        if subject.images and self.device != "jax":  # what one does on CUDA; XLA chooses its layouts itself
            self.model = self.model.to(memory_format=torch.channels_last)
            self.batch[0] = self.batch[0].contiguous(memory_format=torch.channels_last)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4, capturable=name == "jit")
        self.step = self._step()
        self.forward = self._forward()

    def _train(self) -> Any:
        loss = self.loss(self.model, *self.batch)
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.detach()

    def _step(self) -> Callable[[], Any]:
        """Return the training step, as this contender runs it."""
        import torch

        if self.name == "jit":
            train = self.isthmus.jit(lambda *batch: self._train())
            return lambda: train(*self.batch)
        if self.name == "lazy":

            def step() -> Any:
                with self.isthmus.lazy():
                    loss = self._train()
                    self.isthmus.sync()
                return loss

            return step
        if self.name in ("inductor", "step", "cuda-step"):
            return torch.compile(self._train, **self._backend())
        if self.name == "model":
            self.model.compile(**self._backend())
        return self._train

    def _backend(self) -> dict[str, Any]:
        # A node that nothing lowers raises, where it would run between two programs.
        ours = {"backend": "isthmus", "options": {"fallback": "error"}}
        return {"backend": "inductor"} if self.name == "inductor" else ours

    def _forward(self) -> Callable[[], Any]:
        """Return the forward pass without gradients, as this contender runs it."""
        import torch

        def plain(*batch: Any) -> Any:
            return self.loss(self.model, *batch)

        run: Callable[..., Any] = plain
        if self.name == "jit":
            run = self.isthmus.jit(plain)
        elif self.name in ("inductor", "step", "cuda-step"):
            run = torch.compile(plain, **self._backend())
        elif self.name == "lazy":

            def run(*batch: Any) -> Any:
                with self.isthmus.lazy():
                    loss = plain(*batch)
                    self.isthmus.sync()
                return loss

        def call() -> Any:
            with torch.no_grad():
                return run(*self.batch)

        return call

    def wait(self) -> None:
        """Wait for everything that was begun."""
        if self.name in _OURS:
            import jax

            jax.block_until_ready([array for array in jax.live_arrays() if not array.is_deleted()])
        if self.device == "cuda":
            import torch

            torch.cuda.synchronize()

    def peak(self) -> float:
        """Return the most GiB that were in use at a time, in both libraries' accounts."""
        total = 0
        if self.name in _OURS:
            import jax

            total += (jax.devices()[0].memory_stats() or {}).get("peak_bytes_in_use", 0)
        if self.device == "cuda":
            import torch

            total += torch.cuda.max_memory_allocated()
        return float(total / 2**30)

    def faults(self) -> str:
        """Return what did not run on the device, or ""."""
        if self.name not in _OURS:
            return ""
        # On CUDA tensors the backend has loaded it by now, without the device, which would take CUDA's place.
        import isthmus

        self.isthmus = isthmus
        return ", ".join(f"{op} on the CPU" for op in self.isthmus.metrics.fallbacks())


def times(call: Callable[[], Any], wait: Callable[[], None]) -> tuple[float, float]:
    """Return the milliseconds of a call: the median of calls each waited for, and the mean of calls that are not."""
    for _ in range(_WARM):
        call()
    wait()
    waiting = []
    for _ in range(_REPEATS):
        started = time.perf_counter()
        call()
        wait()
        waiting.append(time.perf_counter() - started)
    started = time.perf_counter()
    for _ in range(_REPEATS):
        call()
    wait()
    return 1e3 * statistics.median(waiting), 1e3 * (time.perf_counter() - started) / _REPEATS


def contend(options: argparse.Namespace) -> None:
    """Be one contender: print a line when warm, wait for one, print the results."""
    contender = Contender(options.models[0], options.contenders[0], options.tiny, options.device)
    started = time.perf_counter()
    losses = [contender.step()]
    contender.wait()
    first = time.perf_counter() - started
    losses += [contender.step() for _ in range(_LOSSES - 1)]
    contender.wait()
    record: Record = {"first call s": first, "losses": [float(loss) for loss in losses]}
    if options.first:
        print(json.dumps(record), flush=True)
        return
    if options.forward:
        contender.model.eval()
        contender.forward()
        contender.wait()
        contender.model.train()
    print("ready", flush=True)
    sys.stdin.readline()
    record["step ms"], record["step ms, not waiting"] = times(contender.step, contender.wait)
    record["peak GiB"] = contender.peak()
    if options.forward:
        contender.model.eval()
        found = times(contender.forward, contender.wait)
        record["forward ms"], record["forward ms, not waiting"] = found
        contender.model.train()
    record["faults"] = contender.faults()
    if options.profile:
        from peers import profiles

        record["kernels"] = profiles.kernels(contender.step, contender.wait, contender.name in _OURS)
    print(json.dumps(record), flush=True)


class Process:
    """A contender in a process of its own."""

    def __init__(self, model: str, contender: str, options: argparse.Namespace) -> None:
        self.model, self.contender = model, contender
        self.deadline = time.monotonic() + options.limit
        command = [sys.executable, __file__, "--be", "--models", model, "--contenders", contender]
        command += ["--device", options.device, *(["--tiny"] if options.tiny else [])]
        command += [] if options.forward else ["--no-forward"]
        command += ["--profile"] if options.profile else []
        environment = {**os.environ, "ISTHMUS_FALLBACK": "error"}
        if contender == "inductor":
            environment.pop("ISTHMUS_AUTOLOAD", None)
        if options.parallel > 1 or contender == "cuda-step":  # JAX takes three quarters of the memory at once
            environment["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"
        pipe = subprocess.PIPE
        self.errors = tempfile.TemporaryFile("w+")  # noqa: SIM115  # a pipe that nobody reads fills up, and stops the process
        self.process = subprocess.Popen(
            command, stdin=pipe, stdout=pipe, stderr=self.errors, text=True, env=environment, bufsize=1
        )

    def _line(self) -> str | None:
        """Return the next line of its output, None at its end or at the time limit."""
        assert self.process.stdout is not None
        while time.monotonic() < self.deadline:
            if select.select([self.process.stdout], [], [], 0.2)[0]:
                return self.process.stdout.readline().strip() or None
        return None

    def ready(self) -> bool:
        """Wait until it is warm; return False where it failed."""
        line = self._line()
        while line is not None and line != "ready":
            line = self._line()
        return line == "ready"

    def finish(self, ready: bool) -> Record:
        """Let it be timed, and return its results."""
        found: Record = {"model": self.model, "contender": self.contender}
        line = None
        if ready:
            assert self.process.stdin is not None
            # Those that were warm first have waited for the others, which is no fault of theirs.
            self.deadline = max(self.deadline, time.monotonic() + _TIMING)
            self.process.stdin.write("go\n")
            line = self._line()
        late = time.monotonic() >= self.deadline
        if line is None:
            self.process.kill()
        try:
            self.process.communicate(timeout=30)
        except subprocess.TimeoutExpired:  # it has told its results, and does not end
            self.process.kill()
            self.process.communicate()
            found["exit"] = "killed"
        if line is not None:
            found |= json.loads(line) | {"exit": found.get("exit", self.process.returncode)}
        else:
            self.errors.seek(0)
            found["failed"] = "no answer in time" if late else self.errors.read().strip()[-1500:]
        self.errors.close()
        return found


def wanted(options: argparse.Namespace) -> list[tuple[str, str]]:
    """Return the models and contenders to run, in their order, without those that ``--resume`` leaves out."""
    pairs = [(model, contender) for model in options.models for contender in options.contenders]
    if options.pairs:
        pairs = [
            (model, contender) for model, _, contender in (pair.partition(":") for pair in options.pairs)
        ]
    done = set()
    if options.resume and options.results.exists():
        rows = [json.loads(line) for line in options.results.read_text().splitlines()]
        # A row of another kind (exits, second processes, generate()) has no time of a step.
        rows = [row for row in rows if row.get("label") == options.label and "step ms" in row]
        done = {(row["model"], row["contender"]) for row in rows}
    return [pair for pair in pairs if pair not in done]


def run(options: argparse.Namespace) -> Iterator[Record]:
    """Run the contenders that are chosen, as many as there is time for, and give the results of each."""
    pairs, ends = wanted(options), time.monotonic() + 60 * options.minutes
    for at in range(0, len(pairs), options.parallel):
        # The timed parts follow one another.
        together = pairs[at : at + options.parallel]
        if time.monotonic() + options.limit + _TIMING * (len(together) - 1) > ends:
            print("no time left for " + " ".join(":".join(pair) for pair in pairs[at:]), flush=True)
            return
        processes = [Process(model, contender, options) for model, contender in together]
        ready = [process.ready() for process in processes]
        for process, warm in zip(processes, ready, strict=True):
            yield process.finish(warm)


def first_call(model: str, contender: str, options: argparse.Namespace, caches: Path) -> tuple[int, float]:
    """Return how a process ends that makes its first call with these caches on disk, and the seconds of that call."""
    command = [sys.executable, __file__, "--be", "--first", "--models", model, "--contenders", contender]
    command += ["--device", options.device, *(["--tiny"] if options.tiny else [])]
    environment = {**os.environ, "ISTHMUS_FALLBACK": "error", "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    environment |= {
        "ISTHMUS_CACHE": str(caches / "isthmus"),
        "TORCHINDUCTOR_CACHE_DIR": str(caches / "inductor"),
    }
    if contender in ("cuda", "inductor"):
        environment.pop("ISTHMUS_AUTOLOAD", None)
    try:
        done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=options.limit)
    except subprocess.TimeoutExpired:
        return -1, float("nan")
    lines = done.stdout.strip().splitlines()
    # One that answered and then ended badly has both: its answer and its exit status.
    return done.returncode, json.loads(lines[-1])["first call s"] if lines else float("nan")


def again(options: argparse.Namespace) -> Iterator[Record]:
    """Run each contender in several processes that share caches on disk: their first calls, and how they end."""
    for model, contender in wanted(options):
        with tempfile.TemporaryDirectory() as caches:
            found = [
                first_call(model, contender, options, Path(caches)) for _ in range(max(2, options.exits))
            ]
        statuses, seconds = zip(*found, strict=True)
        yield {
            "model": model,
            "contender": contender,
            "processes": len(found),
            "bad exits": [status for status in statuses if status],
            "first call s": seconds[0],
            "second process s": seconds[1],
        }


def show(records: list[Record]) -> None:
    """Print a table: times in ms as waiting (not waiting), with their ratios to TorchInductor's."""
    peers = {r["model"]: r for r in records if r["contender"] == "inductor" and "failed" not in r}
    eager = {r["model"]: r for r in records if r["contender"] == "cuda" and "failed" not in r}
    columns = f"{'step ms':>22}{'x Inductor':>16}{'forward ms':>20}{'GiB':>7}{'first s':>9}  losses"
    print(f"{'model':10}{'contender':12}{columns}")
    for record in records:
        head = f"{record['model']:10}{record['contender']:12}"
        if "failed" in record:
            print(f"{head}  failed: {record['failed'].splitlines()[-1][:150] if record['failed'] else ''}")
            continue
        peer, cuda = peers.get(record["model"]), eager.get(record["model"])
        pair = [record["step ms"], record["step ms, not waiting"]]
        ratio = ""
        if peer:
            ratio = f"{pair[0] / peer['step ms']:.2f} ({pair[1] / peer['step ms, not waiting']:.2f})"
        forward = ""
        if "forward ms" in record:
            forward = f"{record['forward ms']:.1f} ({record['forward ms, not waiting']:.1f})"
        off = ""
        if cuda:
            pairs = zip(record["losses"], cuda["losses"], strict=True)
            off = f", off CUDA's by {max(abs(a - b) for a, b in pairs):.4f}"
        step = f"{pair[0]:.1f} ({pair[1]:.1f})"
        print(
            f"{head}{step:>22}{ratio:>16}{forward:>20}{record['peak GiB']:7.2f}{record['first call s']:9.1f}"
            f"  {record['losses'][0]:.3f} to {record['losses'][-1]:.3f}{off}"
            f"{'  FAULTS: ' + record['faults'] if record['faults'] else ''}"
            f"{'' if record['exit'] == 0 else '  EXIT ' + str(record['exit'])}"
        )


def main() -> None:
    """Run what is chosen, print the table, and keep the results."""
    from peers.models import MODELS

    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--contenders", nargs="+", choices=CONTENDERS, default=list(CONTENDERS))
    parser.add_argument("--pairs", nargs="+", default=[], help="instead of both: llama:jit bert:step")
    parser.add_argument("--parallel", type=int, default=1, help="processes at a time, until they are timed")
    parser.add_argument("--label", default="", help="what rows of these results are marked with")
    parser.add_argument(
        "--resume", action="store_true", help="leave out what the file of results has, by label"
    )
    parser.add_argument("--minutes", type=float, default=600, help="start nothing that may not end by then")
    parser.add_argument(
        "--second", action="store_true", help="first calls in two processes that share caches"
    )
    parser.add_argument(
        "--exits", type=int, default=0, help="the same in so many processes, and how each ends"
    )
    parser.add_argument("--limit", type=float, default=300, help="seconds that a process may take")
    parser.add_argument("--no-forward", dest="forward", action="store_false", help="training steps alone")
    parser.add_argument("--profile", action="store_true", help="also list the kernels of a step")
    parser.add_argument("--tiny", action="store_true", help="models that a CPU trains")
    parser.add_argument("--device", default="cuda", help="torch's own device")
    parser.add_argument(
        "--results", type=Path, default=_RESULTS, help="the file that results are appended to"
    )
    parser.add_argument("--be", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--first", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.be:
        contend(options)
        return
    records = []
    options.results.parent.mkdir(parents=True, exist_ok=True)
    several = options.second or options.exits > 0
    for record in again(options) if several else run(options):
        record["label"] = options.label
        records.append(record)
        with options.results.open("a") as file:
            file.write(json.dumps(record) + "\n")
        print(json.dumps({k: v for k, v in record.items() if k != "kernels"})[:600], flush=True)
        for name, share in record.get("kernels", []):
            print(f"    {share:8.3f} ms  {name[:150]}")
    if not several:
        show(records)


if __name__ == "__main__":
    main()
