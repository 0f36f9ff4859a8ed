"""Random numbers: distributions at fixed seeds, ranges, reproducibility, errors, and no recompilation."""

import threading

import numpy as np
import pytest
import torch
from scipy import stats

from isthmus._runtime import counters

N = 20_000
FLOATS = [torch.float16, torch.bfloat16, torch.float32, torch.float64]


def empty(*shape, dtype=torch.float32):
    return torch.empty(*shape, dtype=dtype, device="jax")


def sample(fill, dtype=torch.float32, n=N):
    """Numbers drawn into a new tensor, as float64 on the host."""
    found = fill(empty(n, dtype=dtype))
    assert found.device.type == "jax"
    assert found.dtype == dtype
    return found.cpu().double().numpy()


def follows(numbers, distribution):
    """Whether a Kolmogorov-Smirnov test finds nothing against the distribution; a wrong one is at 1e-50."""
    return stats.kstest(numbers, distribution.cdf).pvalue > 0.001


CONTINUOUS = {
    "uniform": (lambda t: t.uniform_(-2, 5), stats.uniform(-2, 7)),
    "normal": (lambda t: t.normal_(3, 2), stats.norm(3, 2)),
    "exponential": (lambda t: t.exponential_(0.5), stats.expon(scale=2)),
    "log_normal": (lambda t: t.log_normal_(0.5, 0.7), stats.lognorm(0.7, scale=np.exp(0.5))),
    "cauchy": (lambda t: t.cauchy_(1, 2), stats.cauchy(1, 2)),
    "rand": (lambda t: torch.rand(t.shape, dtype=t.dtype, device="jax"), stats.uniform()),
    "randn": (lambda t: torch.randn(t.shape, dtype=t.dtype, device="jax"), stats.norm()),
    "rand_like": (torch.rand_like, stats.uniform()),
    "randn_like": (torch.randn_like, stats.norm()),
    "normal around tensors": (
        lambda t: torch.normal(torch.full_like(t, 1), torch.full_like(t, 2)),
        stats.norm(1, 2),
    ),
    "normal around a tensor": (lambda t: torch.normal(torch.full_like(t, 1), 2.0), stats.norm(1, 2)),
    "normal of deviations": (lambda t: torch.normal(1.0, torch.full_like(t, 2)), stats.norm(1, 2)),
    "gamma": (lambda t: torch._standard_gamma(torch.full_like(t, 2.5)), stats.gamma(2.5)),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("name", CONTINUOUS)
def test_continuous_distribution(name, dtype):
    fill, distribution = CONTINUOUS[name]
    assert follows(sample(fill, dtype), distribution)


def test_seeds_and_offsets_are_independent():
    pvalues = []
    for seed in range(20):
        torch.manual_seed(seed)
        pvalues += [
            stats.kstest(sample(lambda t: t.uniform_(), n=5000), stats.uniform.cdf).pvalue for _ in range(5)
        ]
    assert follows(pvalues, stats.uniform())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", ["normal", "exponential", "uniform"])
def test_half_types_have_the_moments_of_the_distribution(name, dtype):
    fill, distribution = CONTINUOUS[name]
    numbers = sample(fill, dtype)
    assert abs(numbers.mean() - distribution.mean()) < 4 * distribution.std() / N**0.5 + 0.01
    assert abs(numbers.std() / distribution.std() - 1) < 0.03


def test_half_normals_reach_the_tails():
    assert np.abs(sample(lambda t: t.normal_(), torch.float16, 10**6)).max() > 4.3


def pvalue(counts, probabilities):
    counts = np.asarray(counts, np.float64)
    return stats.chisquare(counts, np.asarray(probabilities) * counts.sum()).pvalue


@pytest.mark.parametrize(
    "dtype", [torch.float16, torch.float32, torch.int32, torch.int64, torch.uint8], ids=str
)
def test_random_integers_are_uniform_and_in_range(dtype):
    numbers = sample(lambda t: t.random_(3, 9), dtype)
    values, counts = np.unique(numbers, return_counts=True)
    assert values.tolist() == [3, 4, 5, 6, 7, 8]
    assert pvalue(counts, [1 / 6] * 6) > 0.01


def test_randint_and_randint_like():
    numbers = torch.randint(-3, 4, (N,), device="jax")
    assert numbers.dtype == torch.int64
    assert numbers.min().item() == -3
    assert numbers.max().item() == 3
    assert torch.randint(5, (N,), device="jax", dtype=torch.int8).max().item() == 4
    like = torch.randint_like(empty(N), 2, 4)
    assert like.dtype == torch.float32
    assert sorted(set(like.tolist())) == [2.0, 3.0]


def test_random_spans_the_whole_dtype():
    whole = empty(N, dtype=torch.int64).random_(-(2**63), None).cpu()
    assert whole.min() < -(2**62)
    assert whole.max() > 2**62
    positive = empty(N, dtype=torch.int64).random_().cpu()
    assert positive.min() >= 0
    assert positive.max() > 2**62
    assert set(empty(N, dtype=torch.uint8).random_().cpu().tolist()) == set(range(256))
    assert set(empty(100, dtype=torch.bool).random_().cpu().tolist()) == {False, True}
    halves = empty(N, dtype=torch.float16).random_().cpu()
    assert halves.min() >= 0
    assert halves.max() <= 2048
    assert (halves == halves.round()).all()


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_uniform_excludes_its_upper_end(dtype):
    # A narrow interval far from 0 holds few numbers, so rounding would reach the end at once.
    low, high = (1000.0, 1008.0) if dtype in (torch.float16, torch.bfloat16) else (1e6, 1e6 + 1)
    found = empty(N, dtype=dtype).uniform_(low, high)
    assert (found >= low).all().item()
    assert (found < high).all().item()
    assert (empty(5, dtype=dtype).uniform_(2, 2) == 2).all().item()


def test_exponential_is_never_zero():
    assert (empty(10**6, dtype=torch.float32).exponential_() > 0).all().item()


@pytest.mark.parametrize("dtype", [torch.float32, torch.int64, torch.bool], ids=str)
def test_bernoulli_with_a_number(dtype):
    assert stats.binomtest(int(sample(lambda t: t.bernoulli_(0.3), dtype).sum()), N, 0.3).pvalue > 0.01


def test_bernoulli_with_tensors():
    odds = torch.tensor([0.0, 0.25, 1.0], device="jax").repeat(N, 1)
    for found in (torch.bernoulli(odds), torch.empty_like(odds).bernoulli_(odds)):
        zero, quarter, one = found.cpu().sum(0).int().tolist()
        assert zero == 0
        assert one == N
        assert stats.binomtest(quarter, N, 0.25).pvalue > 0.01


def test_geometric_poisson_and_binomial():
    numbers = sample(lambda t: t.geometric_(0.4))
    assert numbers.min() == 1
    counts = [(numbers == k).sum() for k in range(1, 6)] + [(numbers > 5).sum()]
    assert pvalue(counts, [*stats.geom(0.4).pmf(range(1, 6)), stats.geom(0.4).sf(5)]) > 0.01
    assert empty(9, dtype=torch.int64).geometric_(0.5).min().item() >= 1
    for rate in (0.5, 30.0):
        numbers = sample(lambda t: torch.poisson(torch.full_like(t, rate)))  # noqa: B023
        assert abs(numbers.mean() - rate) < 4 * (rate / N) ** 0.5
        assert abs(numbers.var() / rate - 1) < 0.05
    assert torch.poisson(torch.zeros(4, device="jax")).tolist() == [0.0] * 4
    numbers = sample(lambda t: torch.binomial(torch.full_like(t, 10), torch.full_like(t, 0.3)))
    trials = stats.binom(10, 0.3)
    counts = [*[(numbers == k).sum() for k in range(7)], (numbers > 6).sum()]
    assert pvalue(counts, [*trials.pmf(range(7)), trials.sf(6)]) > 0.01


def test_multinomial_with_replacement():
    weights = torch.tensor([1.0, 0.0, 3.0, 4.0, 0.0], device="jax")
    found = torch.multinomial(weights, N, replacement=True)
    assert found.dtype == torch.int64
    assert found.shape == (N,)
    counts = np.bincount(found.cpu().numpy(), minlength=5)
    assert counts[1] == counts[4] == 0
    assert pvalue(counts[[0, 2, 3]], [1 / 8, 3 / 8, 4 / 8]) > 0.01
    rows = torch.multinomial(weights.half().repeat(3, 1), 7, replacement=True)
    assert rows.shape == (3, 7)


def test_multinomial_without_replacement():
    weights = torch.tensor([1.0, 2.0, 3.0, 0.0], device="jax").repeat(N, 1)
    pairs = torch.multinomial(weights, 2).cpu()
    assert (pairs[:, 0] != pairs[:, 1]).all()
    assert (pairs != 3).all()
    assert pvalue(np.bincount(pairs[:, 0].numpy(), minlength=3), [1 / 6, 2 / 6, 3 / 6]) > 0.01
    second = pairs[pairs[:, 0] == 2, 1].numpy()
    assert pvalue(np.bincount(second, minlength=2), [1 / 3, 2 / 3]) > 0.01


def test_dirichlet_sums_to_one():
    found = torch._sample_dirichlet(torch.full((N, 3), 2.0, device="jax")).cpu()
    torch.testing.assert_close(found.sum(-1), torch.ones(N))
    assert follows(found[:, 0].double().numpy(), stats.beta(2, 4))


def test_gamma_can_be_differentiated():
    alpha = torch.tensor([0.5, 2.0, 7.0], device="jax", requires_grad=True)
    drawn = torch._standard_gamma(alpha)
    drawn.sum().backward()
    want = torch._standard_gamma_grad(alpha.detach().cpu(), drawn.detach().cpu())
    torch.testing.assert_close(alpha.grad.cpu(), want, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.float32], ids=str)
def test_randperm(dtype):
    found = torch.randperm(1000, device="jax", dtype=dtype)
    assert found.dtype == dtype
    assert sorted(found.tolist()) == list(range(1000))
    assert found[:5].tolist() != [0, 1, 2, 3, 4]
    assert torch.randperm(0, device="jax").shape == (0,)
    out = torch.empty(0, dtype=torch.int64, device="jax")
    assert sorted(torch.randperm(5, out=out).tolist()) == list(range(5))
    assert out.shape == (5,)


def test_complex_numbers():
    found = torch.randn(N, dtype=torch.complex64, device="jax").cpu().numpy()
    assert follows(found.real, stats.norm(0, 0.5**0.5))
    assert follows(found.imag, stats.norm(0, 0.5**0.5))
    shifted = empty(N, dtype=torch.complex128).normal_(2, 1).cpu().numpy()
    assert abs(shifted.real.mean() - 2) < 0.03
    assert abs(shifted.imag.mean() - 2) < 0.03
    assert follows(torch.rand(N, dtype=torch.complex64, device="jax").cpu().numpy().imag, stats.uniform())


def test_strides_of_the_model_are_kept():
    model = torch.empty(4, 6, device="jax").t()
    assert torch.rand_like(model).stride() == model.stride()
    base = torch.zeros(4, 6, device="jax")
    base[:, 1:3].uniform_(1, 2)
    assert (base.cpu()[:, 1:3] >= 1).all()
    assert (base.cpu()[:, 3:] == 0).all()
    assert torch.rand_like(base, device="cpu").device.type == "cpu"


def test_the_same_seed_gives_the_same_numbers():
    torch.manual_seed(7)
    first, second = torch.rand(5, device="jax"), torch.rand(5, device="jax")
    torch.manual_seed(7)
    again = torch.rand(5, device="jax")
    assert torch.equal(first.cpu(), again.cpu())
    assert not torch.equal(first.cpu(), second.cpu())
    torch.jax.manual_seed(8)
    assert not torch.equal(torch.rand(5, device="jax").cpu(), first.cpu())
    assert torch.jax.initial_seed() == 8


def test_states_and_forks():
    state = torch.jax.get_rng_state()
    first = torch.randn(3, device="jax")
    with torch.random.fork_rng(device_type="jax"):
        torch.manual_seed(123)
        torch.randn(3, device="jax")
    second = torch.randn(3, device="jax")
    torch.jax.set_rng_state(state)
    assert torch.equal(torch.randn(3, device="jax").cpu(), first.cpu())
    assert torch.equal(torch.randn(3, device="jax").cpu(), second.cpu())
    with pytest.raises(TypeError, match="16-byte"):
        torch.jax.set_rng_state(torch.zeros(3, dtype=torch.uint8))


def test_a_cpu_generator_seeds_us():
    def draw(seed):
        g = torch.Generator().manual_seed(seed)
        made = [torch.rand(4, device="jax", generator=g), empty(4).normal_(generator=g)]
        made += [
            torch.poisson(torch.full((4,), 9.0, device="jax"), generator=g),
            torch.randperm(9, device="jax", generator=g),
        ]
        return [m.cpu() for m in made]

    before = torch.jax.get_rng_state()
    first, again, other = draw(1), draw(1), draw(2)
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    assert not torch.equal(first[0], other[0])
    assert torch.equal(torch.jax.get_rng_state(), before)
    torch.set_default_device("jax")
    try:
        assert torch.equal(draw(1)[0], first[0])
    finally:
        torch.set_default_device(None)


def test_threads_never_draw_the_same_numbers():
    found: list[float] = []

    def work():
        found.extend([torch.rand(1, device="jax").item() for _ in range(50)])

    work()
    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(found)) == 250


def test_numbers_that_change_do_not_recompile():
    t, i = empty(8), empty(8, dtype=torch.int64)

    def step(k):
        t.uniform_(-k, k + 0.5)
        t.normal_(k, k + 0.5)
        t.exponential_(k + 0.5)
        t.log_normal_(k, k + 1.0)
        t.cauchy_(k, k + 1.0)
        t.geometric_(0.5 / (k + 1))
        t.bernoulli_(0.5 / (k + 1))
        i.random_(k, 10 + k)
        i.random_(k + 1)
        torch.randint(k, 9 + k, (4,), device="jax")
        torch.rand(4, device="jax")
        torch.normal(float(k), 1.0 + k, (4,), device="jax")
        torch.nn.functional.dropout(t, 0.1 + k / 20)
        torch.poisson(t.abs(), generator=torch.Generator().manual_seed(k))

    step(0)
    step(1)
    before = counters.counts["compilations"]
    for k in range(2, 8):
        step(k)
    assert counters.counts["compilations"] == before


def test_dropout_keeps_the_mean_and_masks_the_gradient():
    x = torch.ones(N, device="jax", requires_grad=True)
    y = torch.nn.functional.dropout(x, 0.25)
    y.sum().backward()
    kept = y.detach().cpu() != 0
    assert stats.binomtest(int(kept.sum()), N, 0.75).pvalue > 0.01
    torch.testing.assert_close(y.detach().cpu(), kept / 0.75)
    torch.testing.assert_close(x.grad.cpu(), kept / 0.75)
    assert torch.nn.functional.dropout(x, 0.25, training=False) is x
    assert (torch.nn.functional.dropout(x, 1.0) == 0).all().item()


MODULES = {
    "Dropout": lambda: torch.nn.Dropout(0.5),
    "Dropout in place": lambda: torch.nn.Dropout(0.5, inplace=True),
    "AlphaDropout": lambda: torch.nn.AlphaDropout(0.5),
    "FeatureAlphaDropout": lambda: torch.nn.FeatureAlphaDropout(0.5),
    "Dropout1d": lambda: torch.nn.Dropout1d(0.5),
    "Dropout2d": lambda: torch.nn.Dropout2d(0.5),
    "Dropout3d": lambda: torch.nn.Dropout3d(0.5),
}


@pytest.mark.parametrize("name", MODULES)
def test_dropout_modules(name):
    module, dims = MODULES[name](), int(name[7]) if name[7:8].isdigit() else 1
    shape = (40, 30, *[2] * dims)
    want = sorted(set(module(torch.ones(shape)).flatten().tolist()))
    got = module(torch.ones(shape, device="jax")).cpu()
    np.testing.assert_allclose(sorted(set(got.flatten().tolist())), want, rtol=1e-5)
    features = got.flatten(2)
    if name not in ("Dropout", "Dropout in place", "AlphaDropout"):
        assert (features == features[..., :1]).all()
    assert abs((got == got.max()).double().mean() - 0.5) < 0.1


FAILS = {
    "uniform_ expects to return": lambda: empty(3).uniform_(1, 0),
    "to is out of bounds for float": lambda: empty(3).uniform_(0, 1e39),
    "normal expects std >= 0.0, but found std -1": lambda: empty(3).normal_(0, -1),
    "normal expects all elements of std": lambda: torch.normal(0.0, torch.full((2,), -1.0, device="jax")),
    "expects lambda > 0.0": lambda: empty(3).exponential_(0),
    "expects p to be in \\(0, 1\\)": lambda: empty(3).geometric_(1),
    "expects sigma > 0.0": lambda: empty(3).cauchy_(0, 0),
    "log_normal_ expects std > 0.0": lambda: empty(3).log_normal_(0, 0),
    "expects p to be in \\[0, 1\\]": lambda: empty(3).bernoulli_(2),
    "Expected p_in >= 0": lambda: torch.bernoulli(torch.full((3,), 2.0, device="jax")),
    "'from' to be less than 'to', but got from=5 >= to=5": lambda: torch.randint(5, 5, (2,), device="jax"),
    "to - 1 is out of bounds for signed char": lambda: empty(3, dtype=torch.int8).random_(0, 300),
    "contains either `inf`, `nan` or element < 0": lambda: torch.multinomial(
        torch.full((3,), -1.0, device="jax"), 1
    ),
    "sum of probabilities <= 0": lambda: torch.multinomial(torch.zeros(3, device="jax"), 1),
    "n_sample > prob_dist.size": lambda: torch.multinomial(torch.ones(3, device="jax"), 4),
    "encountering probability entry < 0": lambda: torch.multinomial(
        torch.full((3,), -1.0, device="jax"), 2, True
    ),
    "invalid Poisson rate": lambda: torch.poisson(torch.full((3,), -1.0, device="jax")),
    "dropout probability has to be between 0 and 1, but got 2": lambda: torch.nn.functional.alpha_dropout(
        empty(3), 2
    ),
    "negative dimension": lambda: torch.rand(-1, device="jax"),
    "n cannot be greater than 2049": lambda: torch.randperm(5000, dtype=torch.float16, device="jax"),
}


@pytest.mark.parametrize("message", FAILS)
def test_mistakes_raise_in_torchs_words(message):
    with pytest.raises((RuntimeError, ValueError), match=message):
        FAILS[message]()


def test_a_mistake_leaves_the_tensor_as_it_was():
    t = torch.ones(3, device="jax")
    with pytest.raises(RuntimeError, match="p_in"):
        t.bernoulli_(torch.full((3,), 2.0, device="jax"))
    assert t.tolist() == [1.0] * 3


def test_integers_have_no_continuous_distribution():
    with pytest.raises(NotImplementedError, match="not implemented for 'Long'"):
        empty(3, dtype=torch.int64).uniform_()
    with pytest.raises(RuntimeError, match="dtype must be a floating point"):
        empty(3, dtype=torch.int64).exponential_()
