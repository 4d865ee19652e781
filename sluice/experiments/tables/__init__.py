"""The tables of the DPSR-CG paper, recomputed cell by cell."""
