"""Integers in a jaxpr that do not depend on data, in the exact arithmetic of their dtypes."""
