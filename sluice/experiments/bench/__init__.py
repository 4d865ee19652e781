"""Measuring per-sample gradients against ordinary training and against Opacus, interleaved in one run."""
