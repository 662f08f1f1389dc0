"""Pallas kernels and fused attention in a jaxpr: what they compute, and for which pairs."""
