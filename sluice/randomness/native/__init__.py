"""Noise in C: see `kernels`."""
