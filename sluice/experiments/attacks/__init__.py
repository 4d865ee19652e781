"""Targets and shadow models of membership attacks, trained as any run is, and the tables made of them."""
