"""Checks of a checkpoint that one job saves and another, of a different number of ranks, loads."""

from __future__ import annotations

import os

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict
from torch.distributed.fsdp import fully_shard

from tests.distributed.models import make


def check_save(rank: int, world: int) -> None:
    module = fully_shard(make("gpt").to("jax"))
    dcp.save(get_model_state_dict(module), checkpoint_id=os.environ["CHECKPOINT"])


def check_load(rank: int, world: int) -> None:
    module = fully_shard(make("gpt").to("jax"))
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.zero_()
    state = get_model_state_dict(module)
    dcp.load(state, checkpoint_id=os.environ["CHECKPOINT"])
    set_model_state_dict(module, state)
    for (name, got), want in zip(module.named_parameters(), make("gpt").parameters(), strict=True):
        assert got.to_local().shape[0] == -(-want.shape[0] // world), name
        torch.testing.assert_close(got.full_tensor().cpu(), want.detach(), rtol=0, atol=0)
