"""The border between torch and JAX: arrays, functions, modules, optimizers and checkpoints, and gradients across it."""
