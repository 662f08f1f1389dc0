"""Power, clocks, temperature and throttling of NVIDIA GPUs, and from these, tokens per joule.

NVML is queried on a separate thread, so it may take any length of time.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Sequence

import jax

from mfu_jax.errors import UserError
from mfu_jax.logger.health.finding import NOTHING, Health
from mfu_jax.logger.health.nvml import GpuReading, Gpus
from mfu_jax.logger.records.step_record import StepRecord
from mfu_jax.util.failsafe import Boundary, failsafe
from mfu_jax.util.optional_deps import require

_log = logging.getLogger("mfu_jax")

# Consecutive readings with the same reason before it is reported: a brief spike is not.
_PERSISTS = 3
_MAX_REPORTS = 10
_TOKENS = "perf/per_device_tokens_per_sec"
# How to reduce the readings to one number for all GPUs of a process.
_OF_ALL: dict[str, Callable[[list[float]], float]] = {
    "power_watts": sum,
    "energy_joules": sum,
    "sm_clock_mhz": min,
    "memory_clock_mhz": min,
    "temperature_celsius": max,
}


class GpuWatch:
    """Reads the GPUs of this process every few seconds; without GPUs it does nothing.

    Args:
        period_seconds: time between two readings; 0: no readings.
        boundary: where failures are reported.
        find: finds the GPUs; by default those that JAX uses, once a step completes.
    """

    def __init__(
        self,
        period_seconds: float,
        boundary: Boundary,
        *,
        find: Callable[[], Gpus | None] | None = None,
    ) -> None:
        self._period_seconds = period_seconds
        self._boundary = boundary
        self._find = find or gpus_of_jax
        self._readings: deque[list[GpuReading]] = deque(maxlen=1)
        self._closing = threading.Event()
        self._thread: threading.Thread | None = None
        self._is_started = period_seconds <= 0
        self._throttled = dict.fromkeys(("power", "hardware", "thermal", "power_brake"), 0)
        self._silent: frozenset[int] = frozenset()
        self._reported = 0

    def check(self, record: StepRecord) -> Health:
        """The findings of the last reading, once per reading."""
        if not self._is_started:
            self._start()
        if not self._readings or not record.is_logged:
            return NOTHING
        readings = self._readings.popleft()
        return Health(scalars=scalars_of(readings, record), notes=self._notes(readings))

    def close(self) -> None:
        """Stops the thread; a hung driver does not hold up the end of the run."""
        self._closing.set()
        if self._thread is not None:
            self._thread.join(timeout=1.0)

    def _start(self) -> None:
        self._is_started = True
        missing = "power and clocks are not known"
        with failsafe(missing, self._boundary):
            if (gpus := self._find()) is not None:
                self._thread = self._boundary.thread("mfu_jax gpus", missing, self._run, gpus)
                self._thread.start()

    def _run(self, gpus: Gpus) -> None:
        while True:
            self._readings.append(gpus.read())
            if self._closing.wait(self._period_seconds):
                return

    def _notes(self, readings: Sequence[GpuReading]) -> tuple[str, ...]:
        notes = self._silences(readings)
        for reason in self._throttled:
            those = [i for i, reading in enumerate(readings) if reason in reading.throttles]
            self._throttled[reason] = self._throttled[reason] + 1 if those else 0
            if (
                self._throttled[reason] == _PERSISTS
                and reason != "power"
                and self._reported < _MAX_REPORTS
            ):
                self._reported += 1
                notes.append(_throttling(reason, those, readings))
        return tuple(notes)

    def _silences(self, readings: Sequence[GpuReading]) -> list[str]:
        """Reports once that a GPU has fallen silent, and once that it answers again."""
        silent = frozenset(i for i, reading in enumerate(readings) if reading.silence)
        fallen, back = sorted(silent - self._silent), sorted(self._silent - silent)
        self._silent = silent
        notes = [f"GPU {i} does not answer: {readings[i].silence}" for i in fallen]
        notes += [f"GPU {i} answers again" for i in back]
        self._reported += len(notes)
        return notes if self._reported <= _MAX_REPORTS else []


def scalars_of(readings: Sequence[GpuReading], record: StepRecord) -> dict[str, float]:
    """Metrics of one reading: power is summed over this process's GPUs, clocks are the slowest's.

    Power and energy are left out unless all GPUs report them. MFU at the clock is relative to the
    peak that the current clock allows: MFU × highest / current clock. It distinguishes a throttled
    GPU from a program that waits.
    """
    scalars: dict[str, float] = {}
    for name, pick in _OF_ALL.items():
        values = [getattr(reading, name) for reading in readings]
        known = [value for value in values if value is not None]
        if known and (pick is not sum or len(known) == len(readings)):
            scalars[f"gpu/{name}"] = pick(known)
    scalars |= {f"gpu/throttled_{reason}": 1.0 for r in readings for reason in r.throttles}
    tokens, watts = record.scalars.get(_TOKENS), scalars.get("gpu/power_watts")
    if tokens and watts:
        scalars["gpu/tokens_per_joule"] = tokens * len(readings) / watts
    shares = [
        r.sm_clock_mhz / r.max_sm_clock_mhz
        for r in readings
        if r.sm_clock_mhz and r.max_sm_clock_mhz
    ]
    if shares and "perf/mfu" in record.scalars:
        scalars["perf/mfu_at_clock"] = record.scalars["perf/mfu"] / min(shares)
    return scalars


def _throttling(reason: str, gpus: Sequence[int], readings: Sequence[GpuReading]) -> str:
    worst = readings[gpus[0]]
    what = {
        "thermal": "heat",
        "hardware": "a slowdown of the hardware: heat, or its power supply",
        "power_brake": "the power supply of the server",
    }[reason]
    at = f" at {worst.temperature_celsius:.0f} °C" if worst.temperature_celsius is not None else ""
    clock = f", {worst.sm_clock_mhz:.0f} MHz" if worst.sm_clock_mhz is not None else ""
    most = f" of {worst.max_sm_clock_mhz:.0f}" if clock and worst.max_sm_clock_mhz else ""
    return f"GPU {', '.join(map(str, gpus))} throttles because of {what}{at}{clock}{most}"


def gpus_of_jax() -> Gpus | None:
    """The NVIDIA GPUs that JAX uses in this process; None if none, or without the package."""
    devices = jax.local_devices()
    if "NVIDIA" not in devices[0].device_kind.upper() and devices[0].platform != "cuda":
        return None
    try:
        nvml = require("pynvml", "power and clocks of GPUs", install="'mfu-jax[nvidia]'")
    except UserError as error:
        _log.info("%s", error)
        return None
    kinds = [device.device_kind for device in devices]
    return Gpus(nvml, [device.local_hardware_id for device in devices], kinds)
