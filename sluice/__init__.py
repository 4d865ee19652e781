"""Differentially private training of PyTorch models by selective release."""

__version__ = "0.1.0"
