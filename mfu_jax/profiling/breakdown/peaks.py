"""The peaks that a profile is compared with; the machine that reads it need not have the chip."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Mapping
from dataclasses import dataclass, replace

from mfu_jax import hardware
from mfu_jax.errors import UserError
from mfu_jax.hardware.peak import Peak
from mfu_jax.hardware.peak_sources import memory_bandwidth
from mfu_jax.profiling.attribution.device_times import OpTime


@dataclass(frozen=True, kw_only=True)
class Peaks:
    """Peaks of one device.

    Attributes:
        main: peak in the dtype with the most FLOPs.
        by_dtype: FLOP/s, by the dtypes of the programs.
        bytes_per_second: peak of its memory; None if unknown.
        bfloat16: FLOP/s in bf16, whatever the programs use; None if unknown.
    """

    main: Peak
    by_dtype: Mapping[str, float]
    bytes_per_second: float | None
    bfloat16: float | None = None

    def of(self, dtype: str) -> float:
        """FLOP/s in a dtype; the main peak if unknown."""
        return self.by_dtype.get(dtype, self.main.flops_per_sec)

    def seconds(self, flops_by_dtype: Mapping[str, int]) -> float:
        """Shortest time for these matmuls."""
        return sum(flops / self.of(dtype) for dtype, flops in flops_by_dtype.items())

    def shortest(self, op: OpTime) -> float:
        """The time of an op's matmuls at the peak."""
        record = op.op.record
        return 0.0 if record is None else op.runs * self.seconds(record.flops_by_dtype)


def find_peaks(
    kind: str,
    flops_by_dtype: Mapping[str, int],
    *,
    devices_per_host: int,
    peak_tflops_per_device: float | None = None,
    hardware_name: str = "",
) -> Peaks:
    """The peaks of a trace's devices.

    Args:
        kind: JAX's device kind; ``cpu`` is measured on this machine.
        flops_by_dtype: FLOPs of the programs.
        devices_per_host: devices per host in the trace; virtual CPU devices share the host's peak.
        peak_tflops_per_device: the user's own number, used for every dtype.
        hardware_name: a chip of the table, or 'calibrate'.

    Raises:
        UserError: the dtype with the most FLOPs has no known peak.
    """
    counted = {dtype: n for dtype, n in flops_by_dtype.items() if n} or {"f32": 0}
    most = max(counted, key=lambda dtype: counted[dtype])
    peak_of = functools.partial(
        hardware.resolve_peak,
        kind or None,
        peak_tflops_per_device=peak_tflops_per_device,
        hardware=hardware_name or None,
    )
    main = peak_of(most)
    by_dtype: dict[str, float] = {}
    for dtype in counted:
        with contextlib.suppress(UserError):  # falls back to the main peak
            by_dtype[dtype] = peak_of(dtype).flops_per_sec
    bfloat16 = None
    # Not worth calibrating: CPUs are no faster in bf16.
    if main.kind not in ("flag", "calibrated"):
        with contextlib.suppress(UserError):
            bfloat16 = peak_of("bf16").flops_per_sec
    peaks = Peaks(
        main=main,
        by_dtype=by_dtype,
        bytes_per_second=memory_bandwidth(kind, hardware_name),
        bfloat16=bfloat16,
    )
    is_share = main.kind == "calibrated" and kind == "cpu"
    return _shared(peaks, devices_per_host) if is_share else peaks


def _shared(peaks: Peaks, devices: int) -> Peaks:
    """Rescales a calibrated share of this machine to the number of devices in the trace."""
    import jax

    share = len(jax.local_devices()) / devices
    shared = f"; shared by the {devices} devices of the trace" if devices > 1 else ""
    source = f"{peaks.main.source}{shared}"
    main = replace(peaks.main, flops_per_sec=peaks.main.flops_per_sec * share, source=source)
    by_dtype = {dtype: flops * share for dtype, flops in peaks.by_dtype.items()}
    return replace(peaks, main=main, by_dtype=by_dtype)
