"""The road between torch and JAX: the same arrays on both sides, and gradients across the border."""
