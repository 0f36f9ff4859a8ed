"""Models of many families, compiled, compute and train as on the CPU in eager mode, with no op on the CPU."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters

import isthmus
from tests.families import FAMILIES, Family
from tests.families.family import Batch, momentum

STEPS = 5


def _to(batch: Batch, device: str) -> Batch:
    return {k: v.to(device) if isinstance(v, Tensor) else v for k, v in batch.items()}


def _compiled(model: nn.Module) -> Any:
    return torch.compile(model, backend="isthmus", options={"fallback": "error"})


def _outputs(result: Any) -> list[Tensor]:
    """Return the tensors of a model's result, the loss first."""
    if isinstance(result, dict):
        result = tuple(result.values())
    if isinstance(result, (list, tuple)):
        return [t for item in result for t in _outputs(item)]
    return [result] if isinstance(result, Tensor) else []


def _train(model: Any, parameters: list[nn.Parameter], family: Family, batches: list[Batch]) -> list[Tensor]:
    """Return the losses of a few steps."""
    optimizer = (family.optimizer or momentum)(parameters)
    losses = []
    for step in range(STEPS):
        loss = _outputs(model(**batches[step % len(batches)]))[0]
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return losses


def _check(family: Family, device: str) -> None:
    torch.manual_seed(0)
    model = family.model()
    ours = copy.deepcopy(model).to(device)
    g = torch.Generator().manual_seed(1)
    batches = [family.batch(g) for _ in range(2)]
    moved = [_to(batch, device) for batch in batches]
    compiled = _compiled(ours)
    import time
    with torch.no_grad():
        model.eval(), ours.eval()
        want = _outputs(model(**batches[0]))
        t=time.time()
        got = _outputs(compiled(**moved[0]))
        t1=time.time()
    dist("eval", got, want)
    model.train(), ours.train()
    want = _train(model, list(model.parameters()), family, batches)
    t2=time.time()
    got = _train(compiled, list(ours.parameters()), family, moved)
    t3=time.time()
    print(f"eval {t1-t:.1f} train {t3-t2:.1f}", [round(float(x), 4) for x in want])
    dist("loss", got, want)
    dist("params", list(ours.state_dict().values()), list(model.state_dict().values()), list(ours.state_dict()))
    print(dict(counters["stats"]), dict(counters["graph_break"]), isthmus.metrics.fallbacks())

def dist(what, got, want, names=None):
    assert len(got)==len(want), (len(got), len(want))
    worst=(0,)
    for n,(a,b) in enumerate(zip(got,want)):
        assert a.shape==b.shape and a.dtype==b.dtype
        a=a.detach().cpu().double(); b=b.detach().double()
        r=((a-b).abs()/(1e-5+1e-4*b.abs()))
        if r.numel() and not (r.max() <= worst[0]): worst=(r.max().item(), names[n] if names else n, (a-b).abs().max().item(), b.abs().max().item())
    print(what, len(got), worst)
