"""One lowering per ATen op: pure functions on jax arrays, in family files."""
