"""``torch.Generator(device="jax")``: reports the device, serves every random op, leaves other generators alone."""

from __future__ import annotations

import copy
import pickle
import textwrap
from collections.abc import Callable

import pytest
import torch

import isthmus
from tests.interpreters import fresh

DRAWS: dict[str, Callable[[torch.Generator], torch.Tensor]] = {
    "randn": lambda g: torch.randn(3, device="jax", generator=g),
    "rand": lambda g: torch.rand(3, device=g.device, generator=g),
    "randint": lambda g: torch.randint(0, 99, (3,), device="jax", generator=g),
    "randperm": lambda g: torch.randperm(9, device="jax", generator=g),
    "normal_": lambda g: torch.empty(3, device="jax").normal_(generator=g),
    "uniform_": lambda g: torch.empty(3, device="jax").uniform_(generator=g),
    "bernoulli": lambda g: torch.bernoulli(torch.full((32,), 0.5, device="jax"), generator=g),
    "multinomial": lambda g: torch.multinomial(torch.ones(9, device="jax"), 4, generator=g),
    "exponential_": lambda g: torch.empty(3, device="jax").exponential_(generator=g),
    "compiled": lambda g: torch.compile(
        lambda x: x + torch.rand(3, device="jax", generator=g), backend="isthmus"
    )(torch.zeros(3, device="jax")),
}


@pytest.mark.parametrize("draw", DRAWS.values(), ids=DRAWS)
def test_a_seed_gives_its_numbers_again(draw: Callable[[torch.Generator], torch.Tensor]) -> None:
    generator = torch.Generator(device="jax").manual_seed(3)
    first, second = draw(generator), draw(generator)
    assert not torch.equal(first, second)
    assert torch.equal(draw(torch.Generator("jax:0").manual_seed(3)), first)
    generator.manual_seed(3)
    assert torch.equal(draw(generator), first)


def test_states_pickles_and_copies() -> None:
    generator = torch.Generator("jax").manual_seed(7)
    torch.rand(2, device="jax", generator=generator)
    others = [generator.clone_state(), copy.deepcopy(generator), pickle.loads(pickle.dumps(generator))]
    saved = generator.get_state()
    expected = torch.rand(2, device="jax", generator=generator)
    for other in others:
        assert other.device == torch.device("jax:0")
        assert torch.equal(torch.rand(2, device="jax", generator=other), expected)
    generator.set_state(saved)
    assert torch.equal(torch.rand(2, device="jax", generator=generator), expected)
    assert pickle.loads(pickle.dumps(generator)).initial_seed() == 7


def test_the_default_generator_draws_what_ops_without_one_draw() -> None:
    (default,) = torch.jax.default_generators
    torch.manual_seed(5)
    expected = torch.rand(3, device="jax"), torch.rand(3, device="jax")
    assert default.initial_seed() == 5
    assert default.get_offset() == 2
    assert default.manual_seed(5) is default
    saved = default.get_state()
    assert torch.equal(saved, torch.jax.get_rng_state())
    assert torch.equal(torch.rand(3, device="jax", generator=default), expected[0])
    assert torch.equal(torch.rand(3, device="jax"), expected[1])
    default.set_state(saved)
    draw = isthmus.jit(lambda: (torch.rand(3, device="jax", generator=default), torch.rand(3, device="jax")))
    for _ in range(3):  # recorded, then replayed
        default.manual_seed(5)
        assert all(map(torch.equal, draw(), expected))
    with isthmus.lazy():
        default.manual_seed(5)
        drawn = torch.rand(3, device="jax"), torch.rand(3, device="jax", generator=default)
    assert all(map(torch.equal, drawn, expected))
    assert default.seed() == torch.jax.initial_seed()
    for copied in (default.clone_state, lambda: copy.deepcopy(default), lambda: pickle.dumps(default)):
        with pytest.raises(NotImplementedError, match="get_state"):
            copied()


def test_other_generators_are_torchs_own() -> None:
    generator = torch.Generator()
    assert type(generator) is torch._C.Generator
    assert isinstance(generator, torch.Generator)
    assert isinstance(torch.default_generator, torch.Generator)
    assert isinstance(torch.Generator("jax"), torch.Generator)
    assert issubclass(torch._C.Generator, torch.Generator)
    assert not isinstance(3, torch.Generator)
    with pytest.raises(RuntimeError, match="invalid device ordinal"):
        torch.Generator("jax:3")
    with pytest.raises(RuntimeError, match="Expected one of"):
        torch.Generator("nonsense")


def test_it_may_be_the_first_use_of_the_device() -> None:
    code = """
    import torch
    generator = torch.Generator(device="jax").manual_seed(1)
    assert generator.device.type == "jax"
    print(torch.rand(2, device="jax", generator=generator).shape)
    """
    ran = fresh(textwrap.dedent(code))
    assert ran.returncode == 0, ran.stderr
    assert "torch.Size([2])" in ran.stdout


def _scripted(n: int, generator: torch.Generator) -> torch.Tensor:
    return torch.rand([n], generator=generator)


def test_torch_script_takes_the_annotation() -> None:
    draw = torch.jit.script(_scripted)
    assert torch.equal(draw(3, torch.Generator().manual_seed(5)), draw(3, torch.Generator().manual_seed(5)))
