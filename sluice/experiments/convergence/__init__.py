"""The DPSR-CG paper's convergence theorem where every constant is known, and a bound that holds (docs/convergence.md)."""
