"""Train the GPT of char_gpt.py in every mode beside CPU torch: a table of speeds, and a picture of the losses.

python examples/demo.py                      # what `make demo` runs; the picture is build/demo.svg
python examples/demo.py --steps 50 --modes lazy jit
"""

from __future__ import annotations

import argparse
import contextlib
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import torch
from char_gpt import BATCH, CONTEXT, Progress, Text, Training
from torch import Tensor

import isthmus

MODES = {
    "CPU torch": "plain PyTorch, without this device",
    "eager": "a program for each op",
    "lazy": "isthmus.lazy(): a program for each step, recorded by running the Python",
    "torch.compile": 'torch.compile(step, backend="isthmus")',
    "isthmus.jit": "isthmus.jit(step): one program, and no Python of the step",
}
COLOURS = {
    "CPU torch": "#777777",
    "eager": "#d1495b",
    "lazy": "#edae49",
    "torch.compile": "#00798c",
    "isthmus.jit": "#30638e",
}
EVERY = 10
"""Steps between two reads of the losses: each read waits for the device."""


@dataclass
class Run:
    """One mode's training: the loss of each step, and the seconds after every ``EVERY`` steps."""

    mode: str
    losses: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)

    @property
    def warm(self) -> float:
        """Return the seconds in which everything compiled: those of the first two reads."""
        return self.seconds[min(1, len(self.seconds) - 1)]

    @property
    def step(self) -> float:
        """Return the median seconds of a step after that."""
        spans = sorted(b - a for a, b in zip(self.seconds[1:], self.seconds[2:], strict=False))
        return spans[len(spans) // 2] / EVERY

    def means(self) -> list[float]:
        """Return the mean loss of the steps between two reads."""
        return [sum(self.losses[n : n + EVERY]) / EVERY for n in range(0, len(self.losses), EVERY)]


def stepper(mode: str, training: Training) -> Callable[[Tensor, Tensor], Tensor]:
    """Return the training step in a mode; the step itself is the same for all."""
    if mode == "torch.compile":
        return torch.compile(training.step, backend="isthmus")
    return isthmus.jit(training.step) if mode == "isthmus.jit" else training.step


def train(mode: str, text: Text, steps: int) -> tuple[Run, Training]:
    """Train in a mode from the start."""
    device = "cpu" if mode == "CPU torch" else "jax"
    training, run = Training(text, device, steps), Run(mode)
    step, batches, progress = stepper(mode, training), text.batches(device), Progress(steps)
    unread: list[Tensor] = []
    started = time.perf_counter()
    with isthmus.lazy() if mode == "lazy" else contextlib.nullcontext():
        for done in range(1, steps + 1):
            unread.append(step(*next(batches)))
            training.schedule.step()
            if mode == "lazy":
                isthmus.sync()
            if done % EVERY == 0:
                run.losses += torch.stack(unread).tolist()
                run.seconds.append(time.perf_counter() - started)
                unread.clear()
            progress(done, mode)
    progress.clear()
    return run, training


def table(runs: list[Run]) -> str:
    """Return the table of what each mode took and where its loss ended."""
    peer = next((run for run in runs if run.mode == "CPU torch"), None)
    lines = [f"  {'mode':15}{'characters/s':>14}{'to CPU torch':>14}{'first steps':>13}{'last loss':>12}"]
    for run in runs:
        ratio = f"{peer.step / run.step:.2f} x" if peer is not None else "-"
        speed, last = BATCH * CONTEXT / run.step, run.means()[-1]
        lines.append(f"  {run.mode:15}{speed:14,.0f}{ratio:>14}{run.warm:11.1f} s{last:12.5f}")
    return "\n".join(lines)


def picture(runs: list[Run]) -> str:
    """Return the loss curves as SVG: over steps, where all lie on one another, and over seconds."""
    width, height, left, top = 360, 240, 60, 50
    every = [run.means() for run in runs]
    low, high = min(min(means) for means in every), max(max(means) for means in every)
    high = high if high > low else low + 1
    parts = [
        '<svg xmlns="http://www.w3.org/2000/svg" width="960" height="360" font-family="sans-serif" font-size="12">',
        '<rect width="960" height="360" fill="white"/>',
    ]
    panels: list[tuple[str, list[list[float]]]] = [
        ("steps", [[EVERY * (n + 1.0) for n in range(len(run.seconds))] for run in runs]),
        ("seconds, compilation included", [run.seconds for run in runs]),
    ]
    for panel, (label, places) in enumerate(panels):
        x0, end = left + panel * (width + 80), max(max(across) for across in places)
        parts.append(
            f'<rect x="{x0}" y="{top}" width="{width}" height="{height}" fill="none" stroke="#999"/>'
        )
        parts.append(
            f'<text x="{x0 + width / 2}" y="{top + height + 38}" text-anchor="middle">{label}</text>'
        )
        for mark in range(5):
            x, y = x0 + width * mark / 4, top + height * mark / 4
            loss = high - (high - low) * mark / 4
            parts.append(
                f'<text x="{x:.1f}" y="{top + height + 18}" text-anchor="middle">{end * mark / 4:.0f}</text>'
            )
            parts.append(f'<text x="{x0 - 6}" y="{y + 4:.1f}" text-anchor="end">{loss:.2f}</text>')
        for n, (run, across, means) in enumerate(zip(runs, places, every, strict=True)):
            points = " ".join(
                f"{x0 + width * x / end:.1f},{top + height * (high - loss) / (high - low):.1f}"
                for x, loss in zip(across, means, strict=True)
            )
            # Broader below, so that curves on one another can all be seen.
            stroke = f'stroke="{COLOURS[run.mode]}" stroke-width="{2 * (len(runs) - n):.0f}"'
            parts.append(f'<polyline points="{points}" fill="none" {stroke} opacity="0.8"/>')
    for n, run in enumerate(runs):
        x = left + 150 * n
        parts.append(f'<rect x="{x}" y="20" width="12" height="12" fill="{COLOURS[run.mode]}"/>')
        parts.append(f'<text x="{x + 18}" y="30">{run.mode}</text>')
    return "\n".join([*parts, "</svg>", ""])


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument(
        "--steps", type=int, default=200, help="how many steps to train for in each mode (200)"
    )
    parser.add_argument("--modes", nargs="+", choices=list(MODES), default=list(MODES), metavar="MODE")
    parser.add_argument("--picture", type=Path, default=Path("build/demo.svg"), help="where the picture goes")
    options = parser.parse_args()
    if options.steps < 4 * EVERY or options.steps % EVERY:
        parser.error(f"--steps must be a multiple of {EVERY}, at least {4 * EVERY}")
    text = Text()
    print(
        f"A small GPT learns {len(text.data):,} characters of Python's documentation, {options.steps} steps of"
    )
    print(
        f"{BATCH * CONTEXT} characters, in {len(options.modes)} modes on {torch.get_num_threads()} threads:\n"
    )
    runs = []
    for mode in options.modes:
        print(f"  {mode:15}{MODES[mode]}", flush=True)
        run, training = train(mode, text, options.steps)
        runs.append(run)
    print("\n" + table(runs))
    apart = max(abs(a - b) for run in runs for a, b in zip(run.losses, runs[0].losses, strict=True))
    print(f"\nThe losses of one step differ between modes by {apart:.1g} at most.")
    fallen = ", ".join(f"{op} ({times} times)" for op, times in isthmus.metrics.fallbacks().items())
    print(f"Ops of this device that ran on the CPU: {fallen or 'none'}.")
    options.picture.parent.mkdir(parents=True, exist_ok=True)
    options.picture.write_text(picture(runs))
    print(f"The loss curves are in {options.picture}.\n\nThe model trained last writes:\n")
    with torch.inference_mode():
        print(text.sample(training.model, "cpu" if options.modes[-1] == "CPU torch" else "jax"))
    return 0 if all(run.means()[-1] < run.means()[0] for run in runs) else 1


if __name__ == "__main__":
    sys.exit(main())
