"""What torch asks of a device: registration, ``torch.jax``, patches, autocast, saving, private names."""
