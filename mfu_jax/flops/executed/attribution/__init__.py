"""What the matmuls that run are for: phase, padding, repetition, replication."""
