"""Analytic count: a config becomes layers, layers become matmul formulas. Needs no JAX."""
