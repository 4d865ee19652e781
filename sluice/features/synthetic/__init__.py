"""Synthetic images, drawn by chance alone: what features learn from instead of real images."""
