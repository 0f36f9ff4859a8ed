"""The models of the benchmarks, in plain PyTorch and written by hand in JAX."""
