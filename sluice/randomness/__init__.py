"""Noise, samples, and the state of generators inside models."""
