"""Sizes whose bytes overflow, and sizes no machine has: an error as on the CPU, never the end of the process."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch

import isthmus
from tests.interpreters import forked

# Every way to ask for a tensor: factories, their likes, resizes, and ops whose result is larger than what they read.
# No size is below 2**50: a machine that tried would not survive one it half has.
REFUSED = """\
torch.empty(2**62, 2, device=device)
torch.empty(2**61, device=device)
torch.empty(2**62, device=device)
torch.empty(2**53, device=device)
torch.zeros(2**62, 2, device=device)
torch.zeros(2**53, device=device)
torch.ones(2**62, 2, device=device)
torch.full((2**62, 2), 1., device=device)
torch.full((2**53,), 1., device=device)
torch.rand(2**62, 2, device=device)
torch.randn(2**62, 2, device=device)
torch.randn(2**53, device=device)
torch.randint(0, 3, (2**62, 2), device=device)
torch.randint(0, 3, (2**53,), device=device)
torch.empty_strided((2**62, 2), (2, 1), device=device)
torch.empty_strided((2, 2), (2**62, 1), device=device)
torch.empty_strided((3, 2), (2**62, 1), device=device)
torch.empty_strided((2**53,), (1,), device=device)
torch.empty_like(torch.empty(1, device=device).expand(2**62))
torch.empty_like(torch.empty(1, device=device).expand(2**62), memory_format=torch.contiguous_format)
torch.zeros_like(torch.empty(1, device=device).expand(2**53))
torch.ones_like(torch.empty(1, device=device).expand(2**53))
torch.full_like(torch.empty(1, device=device).expand(2**53), 2)
torch.rand_like(torch.empty(1, device=device).expand(2**53))
torch.empty(1, device=device).new_empty((2**62, 2))
torch.empty(1, device=device).new_zeros((2**62, 2))
torch.empty(1, device=device).new_ones((2**62, 2))
torch.empty(1, device=device).new_full((2**62, 2), 3)
torch.empty(1, device=device).new_empty_strided((2**62, 2), (2, 1))
torch.empty(1, device=device).resize_(2**62, 2)
torch.empty(1, device=device).resize_(2**61)
torch.empty(1, device=device).resize_(2**53)
torch.empty(1, device=device).expand(2**62).contiguous()
torch.empty(1, device=device).expand(2**61).clone()
torch.empty(1, device=device).expand(2**53).contiguous()
torch.empty(1, device=device).expand(2**53).clone()
torch.empty(1, device=device).expand(2**53) + 1
torch.empty(1, device=device).expand(2**62) + 1
torch.empty(1, device=device).repeat(2**62)
torch.empty(2, device=device).repeat(2**62)
torch.empty(2, device=device).repeat(2**52)
torch.empty(2, device=device).tile(2**62)
torch.empty(2, device=device).repeat_interleave(2**52)
torch.empty(2, device=device).repeat_interleave(2**62)
torch.arange(2**53, device=device)
torch.arange(2**62, device=device)
torch.linspace(0, 1, 2**53, device=device)
torch.linspace(0, 1, 2**62, device=device)
torch.logspace(0, 1, 2**62, device=device)
torch.eye(2**31, device=device)
torch.eye(2**32, device=device)
torch.eye(2**62, 2, device=device)
torch.eye(2**62, 8, device=device)
torch.empty(4, device=device).as_strided((2,), (2**62,))
torch.empty(4, device=device).as_strided((3,), (2**62,))
torch.empty(4, device=device).as_strided((2,), (1,), 2**62)
torch.empty(4, device=device).as_strided((2**62, 4), (0, 0))
torch.empty(4, device=device).expand(2**62, 4)
torch.empty(4, device=device).expand(2**62, 4).sum()
torch.empty(1, device=device).expand(2**31, 1) + torch.empty(1, device=device).expand(1, 2**31)
torch.empty(1, device=device).expand(2**31, 1) + torch.empty(1, device=device).expand(1, 2**32)
torch.empty(1, device=device).expand(2**31, 1) @ torch.empty(1, device=device).expand(1, 2**31)
torch.outer(torch.empty(1, device=device).expand(2**31), torch.empty(1, device=device).expand(2**31))
torch.cat([torch.empty(1, device=device).expand(2**62)]*2)
torch.cat([torch.empty(1, device=device).expand(2**53)]*2)
torch.stack([torch.empty(1, device=device).expand(2**62)]*2)
torch.nn.functional.pad(torch.empty(1, device=device), (0, 2**62))
torch.nn.functional.pad(torch.empty(1, device=device), (0, 2**53))
torch.nn.functional.one_hot(torch.zeros(2, dtype=torch.long, device=device), 2**53)
torch.nn.functional.one_hot(torch.zeros(2, dtype=torch.long, device=device), 2**62)
torch.zeros(2, dtype=torch.long, device=device).bincount(minlength=2**53)
torch.zeros(2, dtype=torch.long, device=device).bincount(minlength=2**62)
torch.histc(torch.zeros(2, device=device), 2**53)
torch.histc(torch.zeros(2, device=device), 2**62)
torch.randperm(2**53, device=device)
torch.randperm(2**62, device=device)
torch.UntypedStorage(2**62, device=device)
torch.UntypedStorage(2**53, device=device)
torch.empty(1, device=device).untyped_storage().resize_(2**53)
torch.empty(1, device=device).untyped_storage().resize_(2**63-4)
torch.nn.Linear(2**31, 2**31, device=device)
torch.nn.Linear(2**32, 2**31, device=device)
torch.empty(1, device=device).expand(2**53).to(torch.float64)
torch.empty(1, device=device).expand(2**60).to(torch.float64)
torch.empty(1, device=device).expand(2**53).sort()
torch.empty(1, device=device).expand(2**62).cumsum(0)
torch.empty(-1, device=device)
torch.zeros(-1, device=device)
torch.empty(2**63-1, device=device)
torch.empty(1, dtype=torch.uint8, device=device).expand(2**63-1) + 1
torch.empty(2**63-1, dtype=torch.uint8, device=device)
torch.add(torch.empty(1, device=device).expand(2**53), 1, out=torch.empty(0, device=device))
torch.zeros(2, device=device)[torch.zeros(1, dtype=torch.long, device=device).expand(2**53)]
torch.nn.functional.interpolate(torch.zeros(1,1,2,2, device=device), size=(2**27, 2**27))
torch.nn.functional.interpolate(torch.zeros(1,1,2,2, device=device), size=(2**31, 2**31))
torch.zeros(2, device=device).unfold(0, 1, 1).expand(2, 2**62).contiguous()
torch.bernoulli(torch.empty(1, device=device).expand(2**53))
torch.empty(1, device=device).expand(2**53).bernoulli()
torch.dropout(torch.empty(1, device=device).expand(2**53), 0.5, True)
torch.complex(torch.empty(1, device=device).expand(2**53), torch.empty(1, device=device).expand(2**53))
torch.empty(2**62, 2, dtype=torch.complex64, device=device)
torch.empty_permuted((2**62, 2), (0, 1), device=device)
torch.empty_permuted((2**53, 2), (1, 0), device=device)
torch.hann_window(2**53, device=device)
torch.tensor([1.], device=device).set_(torch.tensor([1.], device=device).untyped_storage(), 0, (2**62, 2), (2, 1))
torch.tensor([1.], device=device).set_(torch.tensor([1.], device=device).untyped_storage(), 0, (2**53,), (1,))
""".splitlines()
# torch allows them on the CPU, XLA has no such arrays.
UNCOUNTABLE = """\
torch.zeros(2**63-1, 0, device=device)
torch.empty(2**62, 0, 4, device=device)
torch.empty(2**62, 0, 4).to(device)
torch.empty(1).expand(2**53).to(device)
torch.empty(1).expand(2**62).to(device)
torch.empty(1, device=device).expand(2**53).cpu()
""".splitlines()
FINE = """\
torch.empty(4, device=device).expand(2**53, 4)
torch.empty(1, device=device).expand(2**53)[torch.zeros(2, dtype=torch.long, device=device)]
torch.meshgrid(torch.empty(1, device=device).expand(2**27), torch.empty(1, device=device).expand(2**27), indexing="ij")
torch.ones(3, device=device) + 1
""".splitlines()
# Dynamo traces each anew: some of each kind.
COMPILED = [*REFUSED[::9], *FINE]


def outcomes(codes: list[str], mode: str) -> list[list[Any]]:
    """Return the exception's bases, innermost first, and its message, for each line; [] where it raises nothing."""
    found: list[list[Any]] = []
    for code in codes:
        function = eval(f"lambda device: {code}")
        try:
            if mode == "lazy":
                with isthmus.lazy():
                    function("jax")
                    isthmus.sync()
            elif mode == "compiled":
                torch._dynamo.reset()
                torch.compile(function, backend="isthmus")("jax")
            else:
                function("jax")
        except Exception as error:
            found.append([[kind.__name__ for kind in type(error).__mro__], str(error)])
        else:
            found.append([])
    # What is too large to be made leaves the device as it was.
    assert (torch.arange(3, device="jax") + 1).tolist() == [1, 2, 3]
    return found


@pytest.mark.parametrize("mode", ["eager", "lazy", "compiled"])
def test_sizes_that_cannot_be(mode: str) -> None:
    codes = COMPILED if mode == "compiled" else [*REFUSED, *UNCOUNTABLE, *FINE]
    script = (
        "import json, sys; from tests.ops.test_sizes import outcomes; "
        "print(json.dumps(outcomes(json.loads(sys.argv[1]), sys.argv[2])))"
    )
    # In a process of its own, since the failure is its end.
    ran = forked(script, json.dumps(codes), mode)
    assert ran.returncode == 0, ran.stderr[-2000:]
    for code, outcome in zip(codes, json.loads(ran.stdout.splitlines()[-1]), strict=True):
        if code in FINE:
            assert not outcome, (code, outcome)
        else:
            assert outcome, f"{code} raised nothing"
            assert "RuntimeError" in outcome[0], (code, outcome)


def test_the_cpu_refuses_them_with_a_runtime_error() -> None:
    for code in REFUSED:
        with pytest.raises(RuntimeError):
            eval(code, {"torch": torch, "device": "cpu"})


def test_messages_say_what_is_too_large() -> None:
    with pytest.raises(
        RuntimeError, match=r"Storage size calculation overflowed with sizes=\[4611686018427387904, 2\]"
    ):
        torch.empty(2**62, 2, device="jax")
    with pytest.raises(torch.OutOfMemoryError, match="tried to allocate 36028797018963968 bytes"):
        torch.empty(2**53, device="jax")


def test_a_recording_survives_an_op_that_is_too_large() -> None:
    with isthmus.lazy():
        x = torch.arange(4.0, device="jax") * 2
        with pytest.raises(torch.OutOfMemoryError):
            x.repeat(2**52)
        assert (x + 1).tolist() == [1, 3, 5, 7]


def test_an_expanded_tensor_reaches_the_cpu_as_it_is() -> None:
    # The CPU is asked for its words: it must not be given 2**33 elements.
    wide = torch.ones(1, device="jax").expand(2**43, 1)
    with pytest.raises(RuntimeError, match="Storage size calculation overflowed"):
        wide + torch.ones(1, device="jax").expand(1, 2**19)
