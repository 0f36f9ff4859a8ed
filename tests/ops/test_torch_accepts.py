"""Calls that torch accepts and a device with its own kernels could forget: in every mode, as on the CPU or on CUDA."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

import isthmus

MODES = ["eager", "lazy", "compiled"]


def run(function: Callable[..., Any], mode: str, *args: Any) -> Any:
    """Run a function of tensors on the device, in this mode."""
    moved = [arg.to("jax") if isinstance(arg, torch.Tensor) else arg for arg in args]
    if mode == "lazy":
        with isthmus.lazy():
            return function(*moved).cpu()
    if mode == "compiled":
        torch._dynamo.reset()
        return torch.compile(function, backend="isthmus")(*moved).cpu()
    return function(*moved).cpu()


INTEGERS = [torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("dtype", INTEGERS, ids=str)
def test_histc_counts_integers_as_cuda_does(mode: str, dtype: torch.dtype) -> None:
    x = torch.tensor([0, 1, 2, 3, 1, 5, 7, 7, 9], dtype=dtype)
    cases = {(8, 0, 7): [1, 2, 1, 1, 0, 1, 0, 2], (3, 1, 6): [3, 1, 1], (4, 0, 0): [4, 1, 1, 3]}
    for (bins, low, high), counts in cases.items():
        got = run(lambda t, b=bins, i=low, j=high: torch.histc(t, b, i, j), mode, x)
        assert got.dtype == dtype
        assert got.tolist() == counts
    assert run(lambda t: torch.histc(t[:1], 2), mode, x).tolist() == [0, 1]
    assert run(lambda t: torch.histc(t[:0], 2), mode, x).tolist() == [0, 0]


@pytest.mark.usefixtures("strict_fallback")
def test_histc_of_integers_agrees_with_counts() -> None:
    # What models with experts ask for: how many tokens each of them gets.
    chosen = torch.randint(0, 16, (200,), generator=torch.Generator().manual_seed(0))
    for dtype in (torch.int32, torch.int64):
        got = torch.histc(chosen.to("jax", dtype), bins=16, min=0, max=15)
        assert got.tolist() == torch.bincount(chosen, minlength=16).tolist()


def test_histc_refuses_what_cuda_refuses() -> None:
    x = torch.arange(4, device="jax")
    with pytest.raises(RuntimeError, match="max must be larger than min"):
        torch.histc(x, 3, 5, 1)
    with pytest.raises(NotImplementedError, match="not implemented for 'Bool'"):
        torch.histc(x.bool(), 3)
    with pytest.raises(RuntimeError):
        torch.histc(x, 0)


MIXTURES = {
    "mixtral": {"num_local_experts": 4},
    "qwen3_moe": {"num_experts": 4, "moe_intermediate_size": 16, "head_dim": 8},
    "deepseek_v3": {
        "n_routed_experts": 4, "n_group": 2, "topk_group": 1, "moe_intermediate_size": 16,
        "first_k_dense_replace": 1, "q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 8, "v_head_dim": 8, "num_key_value_heads": 4,
    },
    "gpt_oss": {"num_local_experts": 4, "head_dim": 8},
}  # fmt: skip


RUNS = [(name, "eager") for name in MIXTURES] + [("mixtral", "lazy")]
OTHERS = [pytest.param(name, "lazy", marks=pytest.mark.slow) for name in MIXTURES if name != "mixtral"]


@pytest.mark.parametrize(("name", "mode"), [*RUNS, *OTHERS])
def test_mixtures_of_experts_train(name: str, mode: str) -> None:
    transformers = pytest.importorskip("transformers")
    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "num_experts_per_tok": 2}
    config = transformers.AutoConfig.for_model(name, **{**sizes, **heads, **MIXTURES[name]})
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    ids = torch.randint(0, 64, (2, 9))
    want = model(input_ids=ids, labels=ids).loss
    want.backward()
    wanted = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    model.to("jax")
    isthmus.set_mode(mode)
    try:
        got = model(input_ids=ids.to("jax"), labels=ids.to("jax")).loss
        got.backward()
        torch.testing.assert_close(got.cpu(), want, rtol=1e-4, atol=1e-5)
        grads = {n: p.grad.cpu() for n, p in model.named_parameters() if p.grad is not None}
    finally:
        isthmus.set_mode("eager")
    torch.testing.assert_close(grads, wanted, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("value", [2.5, -3, True, 2**40], ids=str)
@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.float64, torch.int32, torch.complex64, torch.bool], ids=str
)
def test_copy_of_a_number(dtype: torch.dtype, value: Any, mode: str) -> None:
    base = torch.zeros(2, 3, dtype=dtype)

    def write(t: torch.Tensor) -> torch.Tensor:
        t = t + torch.zeros_like(t)
        t[:, 1:].copy_(value)
        return t

    want = write(base)
    got = run(write, mode, base)
    assert got.dtype == want.dtype
    assert torch.equal(got, want)


def test_copy_of_a_complex_number() -> None:
    x = torch.zeros(3, dtype=torch.complex64, device="jax")
    assert x.copy_(1 + 2j).tolist() == [1 + 2j] * 3
    conjugate = torch.zeros(3, dtype=torch.complex64, device="jax").conj()
    assert conjugate.copy_(1 + 2j).tolist() == [1 + 2j] * 3
    assert x.real.copy_(3).tolist() == [3] * 3
    assert x.tolist() == [3 + 2j] * 3


RANGES = [
    (0, 5, 0.5, torch.int32), (5, 0, -0.5, torch.int32), (0.5, 5, 1, torch.int64), (-1.5, 5.5, 1, torch.uint8),
    (0, 5.5, 1, torch.int16), (0, 3, 0.7, torch.int8), (0, 5, 0.5, torch.bfloat16), (0, 5, 1.5, torch.int64),
    (0, 5, 0.5, torch.int64), (0, 5, 0.5, torch.bool), (0.0, 2.0, 1.0, torch.int32),
]  # fmt: skip


@pytest.mark.parametrize("mode", ["eager", "lazy"])  # torch's own tracing cannot infer such ranges
@pytest.mark.parametrize("case", RANGES, ids=str)
def test_ranges_of_fractions_in_integers(case: tuple[Any, ...], mode: str) -> None:
    *bounds, dtype = case

    def make(like: torch.Tensor) -> torch.Tensor:
        return torch.arange(*bounds, dtype=dtype, device=like.device)

    def write(like: torch.Tensor) -> torch.Tensor:
        return torch.arange(*bounds, out=torch.empty(0, dtype=dtype, device=like.device))

    for function in (make, write):
        try:
            want = function(torch.empty(0))
        except Exception as error:
            with pytest.raises(type(error)):
                run(function, mode, torch.empty(0))
            continue
        got = run(function, mode, torch.empty(0))
        assert got.dtype == want.dtype
        assert got.tolist() == want.tolist()


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("kind", ["float", "bool", "row", "whole"])
def test_attention_that_is_causal_and_masked(kind: str, mode: str) -> None:
    generator = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(2, 3, n, 6, generator=generator) for n in (4, 5, 5))
    mask = torch.randn(4, 5, generator=generator)
    mask = {"float": mask, "bool": mask > -1, "row": mask[:1], "whole": mask.expand(2, 3, 4, 5)}[kind]
    if kind == "bool":
        mask[:, 0] = True

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, m: torch.Tensor) -> torch.Tensor:
        q = q.detach().requires_grad_()
        out = scaled_dot_product_attention(q, k, v, attn_mask=m, is_causal=True)
        (grad,) = torch.autograd.grad(out.square().sum(), q)
        return torch.cat([out.detach(), grad])

    if mode == "compiled":  # the gradient is asked for outside, as AOTAutograd wants it

        def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, m: torch.Tensor) -> torch.Tensor:
            return scaled_dot_product_attention(q, k, v, attn_mask=m, is_causal=True)

    # By hand: torch 2.15 refuses the two together on the CPU.
    seen = torch.ones(4, 5, dtype=torch.bool).tril()
    both = mask & seen if kind == "bool" else torch.where(seen, mask, -torch.inf)
    reference = partial(scaled_dot_product_attention, attn_mask=both)
    query_ = query.clone().requires_grad_()
    want = reference(query_, key, value)
    if mode != "compiled":
        (grad,) = torch.autograd.grad(want.square().sum(), query_)
        want = torch.cat([want, grad])
    torch.testing.assert_close(run(attend, mode, query, key, value, mask), want.detach())


def test_attention_refuses_a_mask_as_the_cpu_does() -> None:
    query, mask = torch.randn(3, 4, 6), torch.randn(4, 4)
    for device in ("cpu", "jax"):
        q = query.to(device)
        with pytest.raises(RuntimeError, match="Explicit attn_mask should not be set"):
            scaled_dot_product_attention(q, q, q, attn_mask=mask.to(device), is_causal=True)


@pytest.mark.parametrize("mode", ["eager", "lazy"])
def test_lazy_clone_shares_nothing(mode: str) -> None:
    def write(base: torch.Tensor) -> torch.Tensor:
        view = base.view(2, 3).t()[1:]
        copied = torch._lazy_clone(view)
        assert copied.stride() == view.stride()
        assert copied.storage_offset() == view.storage_offset()
        copied.add_(10)
        base.mul_(2)
        return torch.cat([copied, view])

    base = torch.arange(6.0)
    assert torch.equal(run(write, mode, base), write(base.clone()))


PINNED: dict[str, Callable[..., torch.Tensor]] = {
    "empty": lambda **o: torch.empty(3, **o),
    "zeros": lambda **o: torch.zeros(3, **o),
    "ones": lambda **o: torch.ones(3, **o),
    "full": lambda **o: torch.full((3,), 2.0, **o),
    "rand": lambda **o: torch.rand(3, **o),
    "randint": lambda **o: torch.randint(0, 3, (3,), **o),
    "randperm": lambda **o: torch.randperm(3, **o),
    "arange": lambda **o: torch.arange(3, **o),
    "linspace": lambda **o: torch.linspace(0, 1, 3, **o),
    "eye": lambda **o: torch.eye(3, **o),
    "empty_strided": lambda **o: torch.empty_strided((3,), (1,), **o),
    "zeros_like": lambda **o: torch.zeros_like(torch.ones(3, device="jax"), **o),
    "empty_like": lambda **o: torch.empty_like(torch.ones(3, device="jax"), **o),
    "rand_like": lambda **o: torch.rand_like(torch.ones(3, device="jax"), **o),
    "new_empty": lambda **o: torch.ones(3, device="jax").new_empty(3, **o),
    "new_zeros": lambda **o: torch.ones(3, device="jax").new_zeros(3, **o),
}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", PINNED)
def test_memory_that_would_be_pinned(name: str, mode: str) -> None:
    made = run(lambda like: PINNED[name](device="jax", pin_memory=True) + like, mode, torch.zeros(1))
    assert made.shape[0] == 3
    assert not PINNED[name](device="jax", pin_memory=True).is_pinned()


@pytest.mark.parametrize("mode", ["eager", "lazy"])
def test_writes_to_lists_are_counted(mode: str) -> None:
    """Backward has to see that a tensor it saved has changed."""
    isthmus.set_mode(mode)
    try:
        for device in ("cpu", "jax"):
            x, y = torch.ones(3, device=device, requires_grad=True), torch.ones(3, device=device)
            out = (x * y).sum()
            torch._foreach_add_([y], 1)
            torch._foreach_copy_([y], [torch.zeros(3, device=device)])
            torch._foreach_addcmul_([y], [y], [y], torch.tensor([2.0]))
            assert y._version == 3
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                out.backward()
        with torch.inference_mode():
            z = torch.ones(3, device="jax")
            torch._foreach_add_([z], 1)
            assert z.tolist() == [2, 2, 2]
    finally:
        isthmus.set_mode("eager")


@pytest.mark.parametrize("shape", [(4,), (3, 4), (2, 3, 2)], ids=str)
def test_nonzero_is_laid_out_by_columns(shape: tuple[int, ...]) -> None:
    x = torch.arange(torch.Size(shape).numel()).reshape(shape) % 3
    want, got = x.nonzero(), x.to("jax").nonzero()
    assert got.stride() == want.stride()
    assert torch.equal(got.cpu(), want)
    written = torch.nonzero(x.to("jax"), out=torch.empty(0, dtype=torch.int64, device="jax"))
    assert torch.equal(written.cpu(), want)
    for a, b in zip(x.to("jax").nonzero(as_tuple=True), x.nonzero(as_tuple=True), strict=True):
        assert torch.equal(a.cpu(), b)


@pytest.mark.parametrize("mode", ["eager", "lazy"])
@pytest.mark.parametrize("dtype", [torch.int64, torch.float64, torch.bool], ids=str)
def test_a_scalar_of_the_cpu_is_a_number_behind_a_mask(dtype: torch.dtype, mode: str) -> None:
    scalar = torch.tensor([5, 2, 1]).to(dtype)[1]

    def write(t: torch.Tensor) -> torch.Tensor:
        t = t.clone()
        t[t > 1] = scalar
        t[(t == 0)[:, 0]] = scalar
        return t

    for target in (torch.float32, torch.int32, torch.uint8):
        base = torch.arange(6).reshape(2, 3).to(target)
        assert torch.equal(run(write, mode, base), write(base))
    with pytest.raises(RuntimeError, match="dtypes match"):
        torch.zeros(3, device="jax")[torch.ones(3, dtype=torch.bool, device="jax")] = torch.tensor(1j)
