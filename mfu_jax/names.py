"""Strings on which rooms agree that do not import each other."""

PROFILE_POINTS = "profile/mfu_points"
"""Prefix of a metric for each bar of a profile's waterfall."""

PROFILE_READER = "mfu_jax.profiling.scalars"
"""The module that a run starts to read the numbers of its own device trace."""
