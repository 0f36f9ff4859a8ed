"""How a library's program is run: in a new interpreter, with the setting, its printed JSON returned."""

from __future__ import annotations

import importlib.util
import json
from typing import Any

import pytest

from tests.interpreters import fresh

GPT = """
import json, os, sys
os.environ["HF_HUB_OFFLINE"] = "1"
import torch, tests.integrations.torchvision_names, transformers
transformers.utils.logging.set_verbosity_error()

def gpt():
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        vocab_size=64, n_positions=16, n_embd=32, n_layer=2, n_head=2,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=0, eos_token_id=0,
    )
    return transformers.GPT2LMHeadModel(config)

# The same four sequences in each step, so that the loss falls and equal losses mean equal training.
torch.manual_seed(1)
DATA = [{"input_ids": ids, "labels": ids} for ids in torch.randint(0, 64, (4, 16)).repeat(20, 1)]
"""


def need(*libraries: str) -> pytest.MarkDecorator:
    """Skip where a library is not installed."""
    missing = [name for name in libraries if importlib.util.find_spec(name) is None]
    return pytest.mark.skipif(
        bool(missing), reason=f"{', '.join(missing)} is not installed: make test-integrations"
    )


def ran(code: str, libraries: str, *arguments: str) -> Any:
    """Run a program with ``ISTHMUS_LIBRARIES`` and return what its last line says in JSON."""
    done = fresh(code, *arguments, ISTHMUS_LIBRARIES=libraries, ISTHMUS_FALLBACK="error")
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])
