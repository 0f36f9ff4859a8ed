"""On a GPU a program's arrays lie where they lay at the step before, though small results outlive their step."""

import jax
import pytest
import torch

from isthmus._dynamo import compile_log
from isthmus._runtime import gpu_alloc_gaps
from isthmus._runtime.compiler import platform


@pytest.mark.skipif(platform() == "gpu", reason="a GPU's memory has gaps")
def test_only_a_gpu_has_gaps():
    gpu_alloc_gaps.leave(jax.local_devices()[0])
    assert not gpu_alloc_gaps._stays


@pytest.mark.skipif(platform() != "gpu", reason="it is a GPU's allocator that moves arrays about")
def test_results_lie_where_they_lay(monkeypatch):
    places = []
    build = compile_log.compile

    def watched(specialization, bundled=True):
        program = build(specialization, bundled)
        call = program.call

        def run(*inputs):
            outputs = call(*inputs)
            places.append([found.unsafe_buffer_pointer() for found in outputs if found.nbytes > 256])
            return outputs

        program.call = run
        return program

    monkeypatch.setattr(compile_log, "compile", watched)
    model = torch.nn.Sequential(torch.nn.Linear(256, 512), torch.nn.GELU(), torch.nn.Linear(512, 256))
    model = model.to("jax")
    optimizer = torch.optim.AdamW(model.parameters())
    x = torch.randn(64, 256, device="jax")

    @torch.compile(backend="isthmus")
    def step(x):
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    for _ in range(8):
        loss = step(x)  # the last one's loss is still there
        loss.item()
    programs = len(places) // 8
    assert places[-programs:] == places[-2 * programs : -programs]
