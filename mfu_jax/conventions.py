"""Conventions: what a FLOP count counts, all of them side by side, and how to add one.

Public names; where they are defined may change (docs/conventions.md).
"""

from mfu_jax.flops.analytic.conventions import (
    CONVENTIONS,
    Convention,
    FlopsRow,
    find_convention,
    register_convention,
)
from mfu_jax.flops.analytic.inputs.overrides import load_model_config
from mfu_jax.flops.analytic.totals import compare_conventions, convert_mfu

__all__ = [
    "CONVENTIONS",
    "Convention",
    "FlopsRow",
    "compare_conventions",
    "convert_mfu",
    "find_convention",
    "load_model_config",
    "register_convention",
]
