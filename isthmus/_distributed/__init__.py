"""Many devices: a mesh that one program runs over, and ranks of torch.distributed."""
