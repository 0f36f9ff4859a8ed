"""Pytrees that cross between torch and JAX: leaves that are not arrays, and containers JAX does not know.

A function that JAX traces may return arrays alone, while torch code returns whatever it likes beside its tensors: a
string, a number, a ``transformers`` output class. Two tools let a traced function return all of it::

    jax.eval_shape(lambda x: {"loss": x.sum(), "name": Static("mse")}, x)  # one leaf; the name is in the structure
    register_containers(model(ids))  # now jax.tree.map works on the ModelOutput

``torch_functions.py`` uses both, ``autograd_functions.py`` the first. Trees that stay in torch are flattened by
``_device/torch_glue/pytree.py``.
"""

from __future__ import annotations

from typing import Any

import jax

from isthmus._device.torch_glue import patches
from isthmus._device.torch_glue.private import container_of


@jax.tree_util.register_static
class Static:
    """A value that is part of a pytree's structure, not one of its leaves.

    Two of them are never equal: values need not be comparable or hashable, and JAX compares structures only where it
    merges two traces, which results with values of their own must not be.
    """

    def __init__(self, value: Any) -> None:
        self.value = value


def without_static(tree: Any) -> Any:
    """Return a tree with the value of each ``Static`` in its place."""
    is_static = lambda node: isinstance(node, Static)  # noqa: E731
    return jax.tree.map(lambda node: node.value if is_static(node) else node, tree, is_leaf=is_static)


def register_containers(tree: Any) -> None:
    """Register with JAX every container in a tree that torch's pytrees can flatten and JAX's cannot."""
    for leaf in jax.tree.leaves(tree):
        container = container_of(type(leaf))
        if container is not None:
            flatten, unflatten = container
            patches.register("jax.tree_util", "register_pytree_node", type(leaf), flatten, unflatten)
            # A container of a class seen for the first time may hold further ones.
            register_containers(flatten(leaf)[0])
