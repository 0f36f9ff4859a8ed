"""torch.compile: FX graphs of functional ATen calls become XLA programs."""
