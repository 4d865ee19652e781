"""One rule for each kind of layer."""
