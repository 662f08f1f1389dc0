"""Analytic count: a config becomes layers, and layers become matmul formulas. Needs no JAX."""
