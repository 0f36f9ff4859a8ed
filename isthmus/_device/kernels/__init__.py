"""Kernels of single ops that need more than a lowering, and the registration of all kernels."""
