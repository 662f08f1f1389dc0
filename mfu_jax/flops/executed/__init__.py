"""Executed count: what the optimised HLO of a compiled program runs."""
