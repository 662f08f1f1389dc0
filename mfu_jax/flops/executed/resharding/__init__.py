"""Tensors that a partitioned program moves or repeats although nobody asked for it."""
