"""Arguments of the wrong kind to public functions: refused at the call, in words that say what belongs there."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import isthmus
from isthmus import config
from isthmus._dynamo.options import parse
from isthmus.errors import ConfigError

CALLS: dict[str, tuple[Callable[[], Any], str]] = {
    "jit": (lambda: isthmus.jit(3), "isthmus.jit takes a function or a module, not int"),
    "jit, decorator": (
        lambda: isthmus.jit(donate=False)([]),
        "isthmus.jit takes a function or a module, not list",
    ),
    "explain": (
        lambda: isthmus.explain(torch.ones(2)),
        "isthmus.explain takes a function or a module, not Tensor",
    ),
    "functional": (
        lambda: isthmus.functional(torch.relu),
        "isthmus.functional takes a module, not .*; for a function of tensors there is isthmus.torch_function",
    ),
    "optax": (
        lambda: isthmus.optax.Optimizer([nn.Parameter(torch.ones(2, device="jax"))], 1e-3),
        r"isthmus.optax.Optimizer takes a transformation of optax's, such as optax.adam\(1e-3\), not float",
    ),
    "mesh, as torch's": (
        lambda: isthmus.distributed.init_device_mesh("jax", (1,)),
        r'takes a shape and names, such as \(\(4, 2\), \("dp", "tp"\)\), not \'jax\'',
    ),
}


@pytest.mark.parametrize("name", CALLS)
def test_says_what_belongs_there(name: str) -> None:
    call, text = CALLS[name]
    with pytest.raises(TypeError, match=text):
        call()


def test_a_mistyped_setting_is_answered_with_the_one_meant() -> None:
    with pytest.raises(
        ConfigError, match=r"has no setting 'falback'; did you mean fallback\? It has fallback, check"
    ):
        config.falback = "cpu"
    with pytest.raises(ConfigError, match="has no setting 'xyz'; it has fallback, check"):
        config.xyz = 1
    with pytest.raises(ConfigError, match=r"has no option 'freze'; did you mean freeze\? It has donate, "):
        parse({"freze": True})
