"""The scattering transform in C: see `kernels`."""
