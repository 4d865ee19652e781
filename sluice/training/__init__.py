"""What makes the releases: the engine, both loops, executors."""
