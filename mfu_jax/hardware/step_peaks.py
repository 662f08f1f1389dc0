"""The peaks that a step is compared with: matmul rate by dtype, and memory bandwidth.

A step that mixes dtypes has no single peak. Its optimal time is the sum over dtypes of FLOPs /
peak, and utilisation is that time over the measured one.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
from collections.abc import Callable, Mapping
from fractions import Fraction

import jax

from mfu_jax.errors import UserError
from mfu_jax.hardware.chips import find
from mfu_jax.hardware.dtypes import DTYPES, canonical_dtype
from mfu_jax.hardware.peak import Peak
from mfu_jax.hardware.peak_sources import memory_bandwidth, resolve_peak

Exact = int | Fraction


def find_peak(
    device: jax.Device,
    dtype: object,
    *,
    peak_tflops_per_device: float | None = None,
    hardware_name: str | None = None,
) -> Peak:
    """The dense peak of `device` for matmuls of `dtype`: flag, table, or measured on CPUs.

    Raises:
        UserError: the chip is not in the table and no override is given.
    """
    return resolve_peak(
        device.device_kind,
        dtype,
        peak_tflops_per_device=peak_tflops_per_device,
        hardware=hardware_name,
        precision=jax.config.jax_default_matmul_precision,  # type: ignore[attr-defined, unused-ignore]
        compute_capability=getattr(device, "compute_capability", None),
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepPeaks:
    """Peaks of one device for the matmuls of a step.

    Attributes:
        main: peak of the dtype with most model FLOPs.
        by_dtype: dtype (`canonical_dtype`) → peak in FLOP/s, where known.
        bytes_per_sec: memory bandwidth; None if unknown.
        clock_state: of the device, as its flags set it; empty if it has only one.
        clock_note: what that state leaves; empty if the peaks hold there.
    """

    main: Peak
    by_dtype: Mapping[str, float]
    bytes_per_sec: float | None
    clock_state: str = ""
    clock_note: str = ""

    def of(self, dtype: str) -> float:
        """FLOP/s in a dtype; the main peak if its own is unknown."""
        return self._of(dtype) or self.main.flops_per_sec

    def seconds(self, flops_by_dtype: Mapping[str, int]) -> float:
        """Shortest time for these matmuls."""
        return sum(flops / self.of(dtype) for dtype, flops in flops_by_dtype.items())

    def optimal_seconds(self, flops: Exact, flops_by_dtype: Mapping[str, int]) -> float | None:
        """Shortest time for `flops`, with dtypes in the proportions of `flops_by_dtype`.

        None if all of them run at the main peak: the time is then `flops` / peak. FLOPs in a dtype
        without a known peak are timed at the main one, and `notes` mentions it.
        """
        whole = sum(flops_by_dtype.values())
        peaks = {dtype: self.of(dtype) for dtype in flops_by_dtype}
        if not whole or set(peaks.values()) == {self.main.flops_per_sec}:
            return None
        mixed = sum(n / Fraction(peaks[dtype]) for dtype, n in flops_by_dtype.items())
        return float(mixed * flops / whole)

    def notes(self, flops_by_dtype: Mapping[str, int]) -> tuple[str, ...]:
        """The assumptions of `optimal_seconds` about dtypes without a peak, if they matter.

        Dtypes with less than 1% of the FLOPs change utilisation by less than that.
        """
        whole = sum(flops_by_dtype.values())
        return tuple(
            f"{flops:,} FLOPs in {dtype}, which has no known peak here, are set at {self.main}"
            for dtype, flops in flops_by_dtype.items()
            if flops and 100 * flops >= whole and self._of(dtype) is None
        )

    def _of(self, dtype: str) -> float | None:
        try:
            return self.by_dtype.get(canonical_dtype(dtype))
        except UserError:  # for example complex numbers
            return None


def find_peaks(
    device: jax.Device,
    flops_by_dtype: Mapping[str, int],
    *,
    peak_tflops_per_device: float | None = None,
    hardware_name: str | None = None,
) -> StepPeaks:
    """The peaks that a step with these matmuls is compared with.

    Args:
        device: the device that it runs on.
        flops_by_dtype: FLOPs of its matmuls by dtype, at any scale; float32 if empty.
        peak_tflops_per_device: the user's own number, used for every dtype.
        hardware_name: a chip of the table, or 'calibrate'.

    Raises:
        UserError: the dtype with most FLOPs has no known peak.
    """
    peak_of = functools.partial(
        find_peak,
        device,
        peak_tflops_per_device=peak_tflops_per_device,
        hardware_name=hardware_name,
    )
    capability = getattr(device, "compute_capability", None)
    bandwidth = memory_bandwidth(device.device_kind, hardware_name, capability)
    peaks = peaks_by_dtype(peak_of, flops_by_dtype, bandwidth)
    if len(chips := find(device.device_kind)) != 1:
        return peaks
    state = chips[0].clock_set_by(os.environ.get("LIBTPU_INIT_ARGS", ""))
    return dataclasses.replace(peaks, clock_state=state, clock_note=chips[0].clock_note(state))


def peaks_by_dtype(
    peak_of: Callable[[str], Peak], flops_by_dtype: Mapping[str, int], bytes_per_sec: float | None
) -> StepPeaks:
    """The same from what gives the peak of a dtype, without a clock state."""
    counted = {dtype: flops for dtype, flops in flops_by_dtype.items() if flops} or {"f32": 0}
    main = peak_of(max(counted, key=lambda dtype: counted[dtype]))
    by_dtype = {main.dtype: main.flops_per_sec}
    # Measuring a peak takes seconds, so only the step's own dtypes are measured.
    for dtype in counted if main.kind == "calibrated" else DTYPES:
        with contextlib.suppress(UserError):
            peak = peak_of(dtype)
            by_dtype[peak.dtype] = peak.flops_per_sec
    return StepPeaks(main=main, by_dtype=by_dtype, bytes_per_sec=bytes_per_sec)
