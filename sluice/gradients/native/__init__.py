"""Kernels in C for what torch has no operation for; see `loading`."""
