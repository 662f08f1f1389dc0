"""Finished runs: their metrics files, wall clock, comparisons, reports and projections."""
