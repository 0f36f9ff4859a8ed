"""What optimizers reach: fused steps, and ops on lists of tensors."""
