"""Integers of a jaxpr that no data reaches, in the exact arithmetic of their dtypes."""
