"""What ``torch.nn.functional`` reaches: activations, normalization, convolution, pooling, losses, attention."""
