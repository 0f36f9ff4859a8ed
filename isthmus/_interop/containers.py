"""Containers that torch's pytrees know and JAX's do not, such as the outputs of ``transformers``."""

from __future__ import annotations

from typing import Any

import jax

from isthmus._device.torch_glue import patches
from isthmus._device.torch_glue.private import container_of


def teach(tree: Any) -> None:
    """Tell JAX of every container in a tree that torch knows how to take apart."""
    for leaf in jax.tree.leaves(tree):
        container = container_of(type(leaf))
        if container is not None:
            flatten, unflatten = container
            patches.register("jax.tree_util", "register_pytree_node", type(leaf), flatten, unflatten)
            teach(flatten(leaf)[0])
