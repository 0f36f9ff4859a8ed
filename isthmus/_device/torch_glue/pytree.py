"""torch's pytree functions, which are private (``torch.utils._pytree``), imported in one place.

Trees that torch owns (batches, the arguments and results of an ``nn.Module``) are flattened by these, since torch's
registry knows containers such as the outputs of ``transformers``; trees of JAX arrays are flattened by ``jax.tree``.

>>> leaves, spec = tree_flatten({"ids": 1, "mask": [2, 3]})
>>> leaves
[1, 2, 3]
>>> tree_unflatten(leaves, spec)
{'ids': 1, 'mask': [2, 3]}
"""

from torch.utils._pytree import TreeSpec, tree_flatten, tree_leaves, tree_map, tree_unflatten

# The functions themselves, not wrappers: Dynamo traces through torch's own by their identity.
__all__ = ["TreeSpec", "tree_flatten", "tree_leaves", "tree_map", "tree_unflatten"]
