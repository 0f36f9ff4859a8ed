"""``isthmus.jit`` and ``isthmus.train_step`` with sizes that change: few programs, no Python for a size seen before."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import isthmus
from isthmus._device.core.buffer import buffer_of
from isthmus._device.core.donation import Resident
from isthmus._device.core.slack import Slack
from tests.lazy.test_size_ranges import TWENTY, Block, Compilations, scores


@pytest.fixture(autouse=True)
def changing_sizes() -> Iterator[None]:
    before = isthmus.config.shapes
    isthmus.config.shapes = "auto"
    isthmus.clear_caches()
    torch.ones(1).to("jax")  # the device's own first program
    try:
        yield
    finally:
        isthmus.config.shapes = before
        isthmus.clear_caches()


def small(dropout: float = 0.0) -> nn.Module:
    return nn.Sequential(nn.Embedding(40, 8), nn.Dropout(dropout), nn.Linear(8, 40))


class Step:
    """A training step, how often its Python ran, and how many programs its calls compiled."""

    def __init__(self, device: str, make: Callable[[], nn.Module], jit: bool = True) -> None:
        torch.manual_seed(0)
        self.model: Any = make().to(device)
        self.runs = self.compilations = 0
        options: dict[str, Any] = {"capturable": True} if device == "jax" else {}
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01, **options)
        self.device = device
        self.call: Callable[..., Tensor] = isthmus.jit(self.step) if jit else self.step

    def step(self, tokens: Tensor) -> Tensor:
        self.runs += 1
        loss = F.cross_entropy(self.model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.detach()

    def tokens(self, n: int, batch: int = 4) -> Tensor:
        seed = torch.Generator().manual_seed(n)
        return torch.randint(0, 40, (batch, n), generator=seed).to(self.device)

    def train(self, lengths: list[int]) -> list[float]:
        losses = []
        for n in lengths:
            tokens, compilations = self.tokens(n), Compilations()
            losses.append(self.call(tokens).item())
            self.compilations += compilations.count
        return losses


def test_training_on_sentences_of_many_lengths() -> None:
    step, cpu = Step("jax", lambda: Block(0.0)), Step("cpu", lambda: Block(0.0), jit=False)
    torch.testing.assert_close(step.train(TWENTY), cpu.train(TWENTY), rtol=1e-5, atol=1e-5)
    assert step.compilations <= 8
    runs, compilations = step.runs, step.compilations
    again = TWENTY[1:6]  # the state of the optimizer is new in the first step, so that one is recorded again
    torch.testing.assert_close(step.train(again), cpu.train(again), rtol=1e-5, atol=1e-5)
    assert (step.runs, step.compilations) == (runs, compilations), "a length seen before is a replay"
    found, expected = (dict(each.model.named_parameters()) for each in (step, cpu))
    for name in ("embed.weight", "head.weight"):
        torch.testing.assert_close(found[name].detach().cpu(), expected[name].detach(), rtol=1e-4, atol=1e-4)


def test_dropout_has_the_losses_of_exact_programs_and_state_stays() -> None:
    lengths = [13, 9, 12, 20, 12, 9]
    step = Step("jax", lambda: small(0.3))
    found = step.train(lengths)
    assert all(type(buffer_of(p).held) is Resident for p in step.model.parameters())
    isthmus.config.shapes = "exact"
    torch.testing.assert_close(found, Step("jax", lambda: small(0.3)).train(lengths), rtol=1e-5, atol=1e-5)


def test_the_last_batch_of_an_epoch_compiles_once() -> None:
    step, cpu = Step("jax", small), Step("cpu", small, jit=False)
    counts = []
    for batch in (8, 8, 8, 5) * 3:
        compilations = Compilations()
        loss = step.call(step.tokens(11, batch))
        torch.testing.assert_close(loss.item(), cpu.call(cpu.tokens(11, batch)).item(), rtol=1e-5, atol=1e-5)
        counts.append(compilations.count)
    # The first step without and with state, each with its state's small programs; then one for the short batch.
    assert sum(counts[3:]) == 1, counts


def test_train_step_runs_by_programs_for_ranges() -> None:
    losses = {}
    for device in ("jax", "cpu"):
        torch.manual_seed(0)
        model = small().to(device)
        sgd = torch.optim.SGD(model.parameters(), lr=0.1)

        def loss_of(model: nn.Module, tokens: Tensor) -> Tensor:
            return F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())

        step = isthmus.train_step(model, loss_of, sgd)
        compilations, losses[device] = Compilations(), []
        for n in (5, 9, 10, 16, 12, 11, 9):
            tokens = torch.randint(0, 40, (2, n), generator=torch.Generator().manual_seed(n)).to(device)
            losses[device].append(
                float(step(tokens)) if device == "jax" else _by_hand(model, loss_of, sgd, tokens)
            )
        assert compilations.count <= 3
    torch.testing.assert_close(losses["jax"], losses["cpu"], rtol=1e-5, atol=1e-5)


def _by_hand(model: Any, loss_of: Any, optimizer: torch.optim.Optimizer, tokens: Tensor) -> float:
    optimizer.zero_grad()
    loss = loss_of(model, tokens)
    loss.backward()
    optimizer.step()
    return float(loss.detach())


def agree(sizes: list[tuple[int, ...]], function: Callable[..., Any] = scores) -> int:
    """Check a jitted function, called twice for each size, against the CPU; return how many programs were compiled."""
    jitted, compilations = isthmus.jit(function), Compilations()
    for size in sizes:
        for seed in range(2):
            x = torch.randn(size, generator=torch.Generator().manual_seed(seed))
            torch.testing.assert_close(
                jitted(x.to("jax")).cpu(), function(x), rtol=1e-5, atol=1e-5, equal_nan=True
            )
    return compilations.count


def test_sizes_at_the_edges() -> None:
    assert agree([(2, n, 8) for n in (5, 7, 0, 1, 2, 3, 15, 16, 17, 8, 9)]) <= 7


def test_two_sizes_and_sizes_equal_by_chance() -> None:
    assert agree([(b, s, 8) for b, s in ((5, 5), (7, 7), (3, 5), (3, 9), (5, 9), (6, 13), (8, 16))]) <= 7


def test_results_stay_padded_and_go_into_the_next_call() -> None:
    jitted = isthmus.jit(lambda x: x * 2)
    for n in (5, 9, 10):
        y = jitted(torch.arange(float(n)).to("jax"))
    assert type(buffer_of(y).held) is Slack
    assert jitted(y).tolist() == [4.0 * n for n in range(10)]
    assert (y + 1).tolist() == [2.0 * n + 1 for n in range(10)]


def test_arguments_are_written_in_place_unless_something_holds_them() -> None:
    def step(x: Tensor, total: Tensor) -> Tensor:
        x.mul_(2)
        total.add_(x.sum())
        return x[1:] + total

    jitted, total, expected = isthmus.jit(step), torch.zeros(()).to("jax"), torch.zeros(())
    compilations = Compilations()
    for n in (5, 9, 10, 16, 12, 2):
        x = torch.arange(float(n))
        y = x.to("jax")
        kept = y.detach()
        held = buffer_of(kept).value
        for call in range(3):
            torch.testing.assert_close(jitted(y, total).cpu(), step(x, expected))
            if call == 0:
                assert held.tolist() == [float(k) for k in range(n)]
        torch.testing.assert_close(y.cpu(), x)
        torch.testing.assert_close(kept.cpu(), x)
        torch.testing.assert_close(total.cpu(), expected)
    assert compilations.count <= 4


def test_a_failed_value_check_raises_and_loses_nothing() -> None:
    """An index past the true size is in the padding; the step it is in happens, as in a program of its size."""
    total = torch.zeros(()).to("jax")

    def step(x: Tensor, at: Tensor) -> Tensor:
        total.add_(1)
        return x[at]

    jitted = isthmus.jit(step)
    for n in (5, 9, 10, 11):
        x = torch.arange(float(n)).to("jax")
        for _ in range(2):
            assert jitted(x, torch.tensor([n - 1]).to("jax")).item() == n - 1
    for n in (10, 13):  # a replay, and a recording
        x = torch.arange(float(n)).to("jax")
        with pytest.raises(IndexError, match="out of"):
            jitted(x, torch.tensor([n]).to("jax")).item()
        assert jitted(x, torch.tensor([3]).to("jax")).item() == 3
    assert total.item() == 12


def test_an_exception_leaves_every_tensor_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    step, cpu = Step("jax", small), Step("cpu", small, jit=False)
    step.train([9, 9, 12, 13])
    cpu.train([9, 9, 12, 13])

    class Failure(RuntimeError):
        pass

    def fail(*_: Any, **__: Any) -> Any:
        raise Failure

    # While a new length is recorded, before anything has run; then in the step's own Python.
    monkeypatch.setattr("isthmus._program.ranged_program.RangedProgram.run", fail)
    with pytest.raises(Failure):
        step.call(step.tokens(11))
    with pytest.raises(Failure):
        step.call(step.tokens(13))
    monkeypatch.undo()
    again = [11, 13, 11, 10]
    torch.testing.assert_close(step.train(again), cpu.train(again), rtol=1e-5, atol=1e-5)


def test_truths_of_arguments_are_guarded_by_programs_for_ranges() -> None:
    def masked(x: Tensor, mask: Tensor) -> Tensor:
        return x.sum() if mask.all() else (x * mask).sum() + 100

    jitted, compilations = isthmus.jit(masked), Compilations()
    for n in (5, 9, 10, 16, 12, 11):
        x = torch.arange(float(n))
        for last in (True, False, True):
            mask = torch.ones(n, dtype=torch.bool)
            mask[-1] = last
            assert jitted(x.to("jax"), mask.to("jax")).item() == masked(x, mask).item()
    # Of the first size, and up to 16: the truth, and the function for each of its values.
    assert compilations.count <= 6


def test_state_that_is_read_between_steps() -> None:
    """Evaluation between steps of many lengths reads the parameters out of the program that keeps them."""
    step, cpu = Step("jax", small), Step("cpu", small, jit=False)
    for n in (9, 9, 12, 13, 9, 12, 20, 13):
        torch.testing.assert_close(step.train([n]), cpu.train([n]), rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(
            step.model[2].bias.sum().item(), cpu.model[2].bias.sum().item(), rtol=1e-4, atol=1e-5
        )


def test_state_whose_size_varies() -> None:
    """A cache that is exchanged for one of another size is no resident state; it travels in its buffer."""

    class Holder:
        cache = torch.zeros(2, 4)

    holder, expected = Holder(), Holder()

    def step(holder: Holder, x: Tensor) -> Tensor:
        holder.cache.add_(x.sum())
        return holder.cache.mean(0)

    jitted = isthmus.jit(lambda x: step(holder, x))
    for n in (4, 7, 9, 10, 7, 9):
        holder.cache, expected.cache = torch.zeros(2, n).to("jax"), torch.zeros(2, n)
        for _ in range(3):
            x = torch.ones(3)
            torch.testing.assert_close(jitted(x.to("jax")).cpu(), step(expected, x))
        torch.testing.assert_close(holder.cache.cpu(), expected.cache)


def test_without_donation_nothing_is_overwritten() -> None:
    state = torch.zeros(2, 3).to("jax")

    def step(x: Tensor) -> Tensor:
        state.add_(x.sum())
        return x * 2

    jitted = isthmus.jit(step, donate=False)
    total = 0.0
    for n in (5, 9, 10, 12, 10):
        before = buffer_of(state).value
        jitted(torch.ones(n).to("jax"))
        assert before[0, 0] == total
        total += n
        assert state[0, 0].item() == total


def test_a_marked_largest_size_is_the_padded_size() -> None:
    jitted, compilations = isthmus.jit(scores), Compilations()
    for n in (5, 9, 3, 30, 17, 40, 10):
        x = torch.randn(2, n, 8)
        marked = x.to("jax")
        torch._dynamo.mark_dynamic(marked, 1, min=2, max=40)
        torch.testing.assert_close(jitted(marked).cpu(), scores(x), rtol=1e-5, atol=1e-5)
    assert compilations.count == 2, "the first size exactly, then one program up to 40"
