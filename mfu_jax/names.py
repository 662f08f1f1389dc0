"""Strings on which rooms agree that do not import each other."""

PROFILE_POINTS = "profile/mfu_points"
"""Prefix of a metric for each bar of a profile's waterfall."""

PROFILE_READER = "mfu_jax.profiling.scalars"
"""The module that a run starts to read the numbers of its own device trace."""

PROFILE_SECONDS = "profile/waterfall"
"""As `PROFILE_POINTS`, for the bars' seconds."""

# Bars of a profile's waterfall, or how their names begin.
IDLE = "idle"
EXPOSED_COMMUNICATION = "exposed communication: "
NO_INSTRUCTION = "ops without an instruction"
LOOPS = "loop overhead"
EXPOSED_COPIES = "exposed copies"
VECTOR_WORK = "memory-bound and vector work"
BELOW_PEAK = "matmuls below peak"
MFU = "MFU"

# Causes of a gap to a plan, by a profile or by a run's log.
WAITING_HOST = "waiting host"
LOWER_CLOCK = "lower clock"
UNEXPLAINED = "unexplained"
