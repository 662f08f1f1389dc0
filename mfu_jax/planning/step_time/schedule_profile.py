"""A profile for XLA's scheduler on GPUs: the planned duration of each instruction.

Without one, the scheduler takes every instruction for equally long, and a collective for thousands
of them. A run whose flags name a profile was scheduled by measured durations (JAX's docs, "Profile
guided latency estimation").
"""

from __future__ import annotations

from mfu_jax.flops.executed.records import ProgramCosts
from mfu_jax.planning.step_time.durations import Durations

_MICRO = 1e6


def schedule_profile(costs: ProgramCosts, durations: Durations) -> str:
    """The durations as XLA reads them: a ProfiledInstructionsProto, as text."""
    lines = []
    for record in costs.records.values():
        seconds = sum(part.seconds for part in durations.of(record))
        if seconds > 0:
            lines.append(f'costs {{ name: "{record.name}" cost_us: {seconds * _MICRO:.3f} }}\n')
    return "".join(lines)
