"""A run around the loop: its processes, signals, checkpoints and logger."""
