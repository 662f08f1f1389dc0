"""Where the wall clock of a run went over all restarts, from the run logs beside its metrics.

`attempts` reads the logs, `wall_clock` places the processes on one clock and finds the steps that
were repeated, `attribution` gives each moment its category.
"""

from mfu_jax.runs.goodput.wall_clock import read_run

__all__ = ["read_run"]
