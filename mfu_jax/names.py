"""Strings on which rooms agree that do not import each other."""

PROFILE_POINTS = "profile/mfu_points"
"""Prefix of a metric for each bar of a profile's waterfall."""

PROFILE_READER = "mfu_jax.profiling.scalars"
"""The module that a run starts to read the numbers of its own device trace."""

PROFILE_SECONDS = "profile/waterfall"
"""As `PROFILE_POINTS`, for the bars' seconds."""

AS_GIVEN = "as given"
"""The convention of model FLOPs that are a user's number."""

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

# Metrics of what the devices count themselves, which one room writes and others read.
TENSOR_ACTIVE = "hardware/tensor_active"
"""Share of cycles in which the tensor cores worked, from the devices' own counters: 0 to 1."""

TENSOR_ACTIVE_BY_COUNT = "hardware/tensor_active_by_count"
"""The same share from executed FLOPs, over the same seconds and at the same clock."""

THROTTLE_SCORE = "hardware/throttle_score"

HARDWARE = ("gpu/", "hardware/")
"""How the names begin of what is read from devices every few seconds."""
