"""The peak to divide by: given, named, looked up for the attached device, or measured."""

from __future__ import annotations

import math

from mfu_jax.errors import UserError
from mfu_jax.hardware.chips import lookup, named
from mfu_jax.hardware.dtypes import canonical_dtype
from mfu_jax.hardware.peak import Peak

# hardware=calibrate: measure the attached device instead of reading the table
CALIBRATE = "calibrate"
# No chip is within a factor of five of this: a larger flag is in FLOP/s, not TFLOP/s.
_LARGEST_PLAUSIBLE_TFLOPS = 100_000


def is_measured_peak(device_kind: str | None, hardware: str | None) -> bool:
    """Whether `resolve_peak` measures the peak, or reads what was measured, unless one is given."""
    return hardware == CALIBRATE or (not hardware and device_kind == "cpu")


def resolve_peak(
    device_kind: str | None,
    dtype: object,
    *,
    peak_tflops_per_device: float | None = None,
    hardware: str | None = None,
    precision: str | None = None,
    compute_capability: str | None = None,
) -> Peak:
    """The peak to divide by: the flag, else the named chip, else the attached device's row.

    A CPU has no row: it is measured (`hardware.calibration.calibrate`, which needs jax), and so is
    anything with `hardware="calibrate"`. An unknown accelerator is an error, never a guess.

    Args:
        device_kind: `jax.devices()[0].device_kind`; None if a flag or `hardware` is given.
        dtype: dtype of the matmul operands, by any of its names in numpy, JAX or HLO.
        peak_tflops_per_device: dense TFLOP/s of one JAX device, from the user.
        hardware: a chip's name (see `named`), or 'calibrate'.
        precision: `jax_default_matmul_precision`; only float32 depends on it.
        compute_capability: `device.compute_capability`, if the device has one.

    Raises:
        UserError: no peak is known, or the override is implausible.
    """
    name = canonical_dtype(dtype)
    if peak_tflops_per_device is not None:
        value = checked_peak(peak_tflops_per_device)
        return Peak(
            flops_per_sec=value * 1e12,
            dtype=name,
            kind="flag",
            source=f"flag: peak_tflops_per_device={value:g}",
        )
    if is_measured_peak(device_kind, hardware):
        from mfu_jax.hardware.calibration import calibrate

        return calibrate(name)
    if hardware:
        chip, how = named(hardware), f" (hardware={hardware})"
    elif device_kind:
        chip, how = lookup(device_kind, compute_capability), ""
    else:
        raise UserError(
            "no device and no hardware is given; expected a device kind, hardware=… or "
            "peak_tflops_per_device=…",
            hint="usually an empty key; pass, for example, hardware=h100",
        )
    return Peak(
        flops_per_sec=chip.peak_flops_per_sec(name, precision),
        dtype=name,
        kind="table",
        source=f"table: {chip._describe(name, precision)}{how}",
    )


def memory_bandwidth(
    device_kind: str, hardware: str | None, compute_capability: str | None = None
) -> float | None:
    """Peak bytes/s of the named chip, else of the attached device's row; None if unknown.

    Args:
        device_kind: as for `resolve_peak`; empty if unknown.
        hardware: as for `resolve_peak`.
        compute_capability: as for `resolve_peak`.
    """
    try:
        if hardware and hardware != CALIBRATE:
            return named(hardware).memory_bandwidth_bytes_per_sec
        return lookup(device_kind, compute_capability).memory_bandwidth_bytes_per_sec
    except UserError:  # without it there is no MBU; only the peak is required
        return None


def checked_peak(value: object) -> float:
    """A TFLOP/s flag as a float; zero, negative numbers, NaN and FLOP/s are rejected."""
    try:
        number = float(value) if not isinstance(value, bool) else math.nan  # type: ignore[arg-type]
    except (TypeError, ValueError):
        number = math.nan
    if not (math.isfinite(number) and number > 0):
        raise UserError(
            f"peak_tflops_per_device={value!r} is not a peak; expected a positive number of "
            "TFLOP/s",
            hint="usually a wrong unit or an empty value; give the dense TFLOP/s of one JAX device",
        )
    if number > _LARGEST_PLAUSIBLE_TFLOPS:
        raise UserError(
            f"peak_tflops_per_device={value!r} is more than any chip has; expected TFLOP/s (10¹²)",
            hint=f"usually FLOP/s; if so pass peak_tflops_per_device={number / 1000000000000.0:g}",
        )
    return number
