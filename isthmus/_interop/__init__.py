"""The road between torch and JAX: the same arrays on both sides, and gradients across the border."""

from isthmus._device.torch_glue.registration import load

# Tensors made of arrays are the first on the device here: the kernels must be there before them.
load()
