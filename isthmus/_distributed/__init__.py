"""Many devices: ``torch.distributed`` on device "jax", a process for each device."""
