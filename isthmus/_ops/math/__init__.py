"""Elementwise math: one and several operands, special functions, complex numbers, Fourier transforms."""
