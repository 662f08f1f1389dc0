"""What a jaxpr calls without showing it: Pallas kernels, fused attention."""
