"""What one run of each computation costs: matmuls, kernels, bytes, collectives."""
