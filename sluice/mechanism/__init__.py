"""What is promised: frozen, public, and without torch."""
