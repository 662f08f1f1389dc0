"""Where the wall clock of a run went over all restarts, from the run logs beside its metrics."""

from mfu_jax.runs.goodput.wall_clock import read_run

__all__ = ["read_run"]
