"""Random numbers: samples of distributions, and new tensors of them."""
