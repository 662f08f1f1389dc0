"""Peaks of accelerators: looked up by JAX's `device_kind`, named by the user, or given by flag.

The numbers are in `hardware.yml`, dense and per JAX device, each row with its sources. Nothing is
guessed: an unknown device kind is an error that says what to do.

>>> lookup("TPU v5 lite").peak_flops_per_sec("bf16") / 1e12
197.0
>>> named("h100").peak_flops_per_sec("fp8") / 1e12
1978.9
>>> resolve_peak("TPU v5", "bf16").source
'table: TPU v5p, bf16'

Nothing here imports jax or numpy; `hardware.calibration` measures peaks, `hardware.gpus` and
`hardware.counters` read what the attached devices tell of themselves while they run.
"""

from __future__ import annotations

from mfu_jax.hardware.chips import Chip, find, lookup, named, table
from mfu_jax.hardware.dtypes import canonical_dtype
from mfu_jax.hardware.peak import Peak
from mfu_jax.hardware.peak_sources import CALIBRATE, resolve_peak

__all__ = [
    "CALIBRATE",
    "Chip",
    "Peak",
    "canonical_dtype",
    "find",
    "lookup",
    "named",
    "resolve_peak",
    "table",
]
