"""What a process did, and when: starts, steps, pauses, compilations and ends, on both clocks.

One file per process of a run, beside the metrics file, appended to by every restart;
`mfu_jax.runs.goodput.attempts` reads it.
"""
