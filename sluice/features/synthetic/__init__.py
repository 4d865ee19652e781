"""Synthetic images, drawn from random numbers alone: what the constants of features are made from."""
