"""Train a small character-level GPT on Python's own documentation: plain PyTorch, only the device is new.

python examples/char_gpt.py                  # trains on "jax" and writes some text
python examples/char_gpt.py --device cpu     # the same program on another device

``demo.py`` trains the same model in every mode there is.
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from collections.abc import Iterable, Iterator
from pydoc_data.topics import topics

import torch
import torch.nn.functional as F
from torch import Tensor, nn

CONTEXT, BATCH, WIDTH, HEADS, LAYERS = 64, 16, 96, 4, 3


class Block(nn.Module):
    """Causal self-attention and a perceptron, each on a residual path."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        batch, time, _ = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(batch, time, 3, HEADS, WIDTH // HEADS).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, time, WIDTH))
        return x + self.mlp(self.norm2(x))


class GPT(nn.Module):
    """Characters in, the logits of the next character out."""

    def __init__(self, vocabulary: int) -> None:
        super().__init__()
        self.token, self.position = nn.Embedding(vocabulary, WIDTH), nn.Embedding(CONTEXT, WIDTH)
        self.blocks = nn.Sequential(*[Block() for _ in range(LAYERS)])
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, vocabulary, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        return self.head(self.norm(self.blocks(self.token(tokens) + self.position(positions))))

    @torch.no_grad()
    def generate(self, tokens: Tensor, count: int, temperature: float = 0.8) -> Iterator[int]:
        """Yield ``count`` sampled characters that go on from ``tokens``."""
        for _ in range(count):
            logits = self(tokens[:, -CONTEXT:])[:, -1] / temperature
            chosen = torch.multinomial(F.softmax(logits, dim=-1), 1)
            tokens = torch.cat((tokens, chosen), dim=1)[:, -CONTEXT:]
            yield int(chosen)


class Text:
    """Python's documentation topics as numbers."""

    def __init__(self) -> None:
        text = "\n\n".join(topics[name] for name in sorted(topics))
        self.letters = sorted(set(text))
        codes = {letter: code for code, letter in enumerate(self.letters)}
        self.data = torch.tensor([codes[letter] for letter in text])

    def batches(self, device: str) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield random windows and the same windows one character later, the same ones every time."""
        order = torch.Generator().manual_seed(1337)
        windows = self.data.unfold(0, CONTEXT + 1, 1)
        while True:
            chosen = windows[torch.randint(len(windows), (BATCH,), generator=order)].to(device)
            yield chosen[:, :-1], chosen[:, 1:]

    def show(self, codes: Iterable[int]) -> str:
        return "".join(self.letters[code] for code in codes)

    def sample(self, model: GPT, device: str) -> str:
        """Return the beginning of the text, and what the model writes after it."""
        torch.manual_seed(0)
        prompt = self.data[:CONTEXT].tolist()
        written = self.show(model.generate(torch.tensor([prompt], device=device), 300))
        return "  " + (self.show(prompt) + "|" + written).replace("\n", "\n  ")


class Progress:
    """A bar on a terminal, nothing in a log."""

    def __init__(self, total: int) -> None:
        self.total, self.tty = total, sys.stderr.isatty()

    def __call__(self, done: int, note: str = "") -> None:
        if self.tty:
            filled = 30 * done // self.total
            bar = "#" * filled + "." * (30 - filled)
            print(f"\r  [{bar}] {done}/{self.total} {note}\033[K", end="", file=sys.stderr, flush=True)

    def clear(self) -> None:
        if self.tty:
            print("\r\033[K", end="", file=sys.stderr, flush=True)


class Training:
    """A model on a device, and the step that trains it: the same weights and batches on every device."""

    def __init__(self, text: Text, device: str, steps: int) -> None:
        torch.manual_seed(0)
        self.model = GPT(len(text.letters)).to(device)  # drawn on the CPU
        # In tensors the learning rate and the step can change without anything being compiled or recorded anew.
        rate = torch.tensor(3e-3, device=device)
        on_device = torch.device(device).type != "cpu"
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(), lr=rate, weight_decay=0.01, capturable=on_device
        )
        cosine = lambda step: 0.5 * (1 + math.cos(math.pi * step / steps))  # noqa: E731
        self.schedule = torch.optim.lr_scheduler.LambdaLR(self.optimizer, cosine)

    def step(self, inputs: Tensor, wanted: Tensor) -> Tensor:
        """Train on one batch and return its loss, which is still on the device."""
        loss = F.cross_entropy(self.model(inputs).flatten(0, 1), wanted.flatten())
        self.optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        return loss.detach()


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--device", default="jax", help='where to train: "jax" or any torch device')
    parser.add_argument("--steps", type=int, default=400, help="how many steps to train for (400)")
    options = parser.parse_args()
    if options.steps < 2:
        parser.error("--steps must be at least 2")
    text = Text()
    training = Training(text, options.device, options.steps)
    size = sum(p.numel() for p in training.model.parameters())
    print(f"A GPT of {size:,} parameters learns {len(text.data):,} characters of Python's documentation")
    print(f"on {options.device!r}, {options.steps} steps of {BATCH * CONTEXT} characters:")
    progress, losses, started = Progress(options.steps), [], time.perf_counter()
    every = max(1, options.steps // 10)
    for step, batch in zip(range(1, options.steps + 1), text.batches(options.device), strict=False):
        loss = training.step(*batch)
        training.schedule.step()
        progress(step, f"on {options.device}")
        if step == 1 or step % every == 0 or step == options.steps:
            losses.append(loss.item())  # waits for the device
            progress.clear()
            print(f"  step {step:4}  loss {losses[-1]:.3f}", flush=True)
    seconds = time.perf_counter() - started
    print(f"loss {losses[0]:.2f} -> {losses[-1]:.2f} in {seconds:.1f} s\n\nIt writes:\n")
    print(text.sample(training.model, options.device))
    return 0 if losses[-1] < losses[0] else 1


if __name__ == "__main__":
    sys.exit(main())
