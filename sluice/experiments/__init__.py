"""From settings to certificates, and the tables made of them."""
