"""Counts FLOPs from any JAX function's jaxpr, with its loops, masks and kernels."""
