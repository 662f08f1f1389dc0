"""Finished runs: their metrics files, benchmarks, projections, published results."""
