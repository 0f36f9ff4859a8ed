"""Plain tensors on device "jax": buffers on storages, views by strides, one executable per op."""
