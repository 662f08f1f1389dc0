"""Reads the devices that JAX uses every few seconds, and says which of them throttle or are lost.

On a separate thread: a driver may take any length of time. From the readings follow tokens per
joule, MFU at the present clock, and whether the executed FLOPs agree with the devices' counters.
"""

from __future__ import annotations

import threading
import time
from collections import Counter, deque
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import jax

from mfu_jax import names
from mfu_jax.hardware.chips import find
from mfu_jax.hardware.counters import combined, counters_of_jax
from mfu_jax.hardware.gpus import QUERIES, REPORTED, GpuReading, gpus_of_jax
from mfu_jax.logger.health.cross_check import CountCheck, TensorActivity
from mfu_jax.logger.records.step_record import StepRecord
from mfu_jax.logger.run_log.monitor import Monitor, annotated
from mfu_jax.logger.timing.timed_step import TimedStep
from mfu_jax.util.failsafe import Boundary, failsafe

# Consecutive readings with the same reason before it is reported: a brief spike is not.
_PERSISTS = 3
_MAX_REPORTS = 10
_MISSING = "the devices' counters are not known"
_TOKENS = "perf/per_device_tokens_per_sec"


class _Reading(NamedTuple):
    unix_seconds: float
    gpus: Sequence[GpuReading]
    counters: Mapping[str, float]


class HardwareWatch(Monitor):
    """Reads the devices that JAX uses every few seconds, from the first complete step on.

    Args:
        period_seconds: time between two readings.
        boundary: where failures are reported.
    """

    def __init__(self, period_seconds: float, boundary: Boundary) -> None:
        self._period_seconds = period_seconds
        self._boundary = boundary
        self._peak_clock_mhz: float | None = None
        self._readings: deque[_Reading] = deque(maxlen=100)
        self._check: CountCheck | None = None
        self._closing = threading.Event()
        missing = "power, clocks and counters are not known"
        self._thread = boundary.thread("mfu_jax hardware", missing, self._run)
        self._throttled: Counter[str] = Counter()
        self._silent: set[int] = set()
        self._reported = 0

    def on_record(self, step: TimedStep, record: StepRecord) -> StepRecord:
        """Adds the last reading before a step's end to its record, if that is logged.

        A reading after the last step would be of an idle device, at its highest clock.
        """
        if self._thread.ident is None:
            self._thread.start()
        scalars: dict[str, float] = {}
        notes: list[str] = []
        reading = None
        while record.is_logged and self._is_before(record):
            reading = self._readings.popleft()
        if reading is not None:
            scalars = scalars_of(reading.gpus, record, self._peak_clock_mhz)
            scalars.update(reading.counters)
            notes = [*self._silences(reading.gpus), *self._slowdowns(reading)]
            notes = notes[: max(0, _MAX_REPORTS - self._reported)]
            self._reported += len(notes)
        if self._check is not None:
            compared, warning = self._check.on_step(step, record)
            scalars, notes = {**scalars, **compared}, notes + warning
        return annotated(record, scalars, notes) if scalars or notes else record

    def _is_before(self, record: StepRecord) -> bool:
        """Whether the oldest reading was taken before the step's end."""
        return bool(self._readings) and self._readings[0].unix_seconds <= record.unix_seconds

    def close(self) -> None:
        """Stops the thread; a hung driver does not hold up the end of the run."""
        self._closing.set()
        if self._thread.is_alive():
            self._thread.join(timeout=1.0)

    def _run(self) -> None:
        gpus, counters = gpus_of_jax(), None
        with failsafe(_MISSING, self._boundary):
            counters = counters_of_jax(gpus, self._period_seconds)
        if gpus is not None:
            self._peak_clock_mhz = _peak_clock_mhz()
        if counters is not None:
            self._check = CountCheck(is_tpu=gpus is None)
        before: tuple[float, float | None] | None = None  # when, and the clock
        while gpus is not None or counters is not None:
            readings = [] if gpus is None else gpus.read()
            numbers: dict[str, float] = {}
            if counters is not None:
                with failsafe(_MISSING, self._boundary):
                    numbers = combined(counters.read())
            now, clock = time.time(), self._clock(readings)
            self._readings.append(_Reading(now, readings, numbers))
            active = numbers.get(names.TENSOR_ACTIVE)
            if self._check and active is not None and before is not None and before[1] and clock:
                limited = any("power" in reading.throttles for reading in readings)
                mean = (before[1] + clock) / 2
                self._check.add_interval(TensorActivity(before[0], now, active, mean, limited))
            before = now, clock
            if self._closing.wait(self._period_seconds):
                break
        if counters is not None:
            counters.close()

    def _clock(self, readings: Sequence[GpuReading]) -> float | None:
        """The GPUs' mean clock relative to the one at which they reach the peak; a TPU's is 1."""
        if not readings:
            return 1.0
        clocks = [r.numbers["sm_clock_mhz"] for r in readings if "sm_clock_mhz" in r.numbers]
        if not clocks or self._peak_clock_mhz is None:
            return None
        return sum(clocks) / len(clocks) / self._peak_clock_mhz

    def _silences(self, readings: Sequence[GpuReading]) -> list[str]:
        """Reports once that a GPU has fallen silent, and once that it answers again."""
        silent = {i for i, reading in enumerate(readings) if reading.silence}
        fallen, back = sorted(silent - self._silent), sorted(self._silent - silent)
        self._silent = silent
        notes = [f"GPU {i} does not answer: {readings[i].silence}" for i in fallen]
        return notes + [f"GPU {i} answers again" for i in back]

    def _slowdowns(self, reading: _Reading) -> Iterator[str]:
        """Reports once that devices throttle persistently."""
        for reason, cause in REPORTED.items():
            those = [i for i, gpu in enumerate(reading.gpus) if reason in gpu.throttles]
            if self._persists(reason, bool(those)):
                worst = reading.gpus[those[0]].numbers
                heat, clock, most = map(
                    worst.get, ("temperature_celsius", "sm_clock_mhz", "max_sm_clock_mhz")
                )
                at = "" if heat is None else f" at {heat:.0f} °C"
                mhz = "" if clock is None else f", {clock:.0f} MHz"
                of = f" of {most:.0f}" if mhz and most else ""
                yield f"GPU {', '.join(map(str, those))} throttles because of {cause}{at}{mhz}{of}"
        score = reading.counters.get(names.THROTTLE_SCORE, 0.0)
        if self._persists("score", score > 0):
            yield f"a TPU throttles by {score / 10:.0%}; usually heat, or the power of its host"

    def _persists(self, reason: str, is_so: bool) -> bool:
        self._throttled[reason] = self._throttled[reason] + 1 if is_so else 0
        return self._throttled[reason] == _PERSISTS


def _peak_clock_mhz() -> float | None:
    """The clock at which these devices reach the peak in the table; None if not known."""
    chips = find(jax.local_devices()[0].device_kind)
    clock = chips[0].clock_ghz if len(chips) == 1 else None
    return None if clock is None else 1000 * clock


def scalars_of(
    readings: Sequence[GpuReading], record: StepRecord, peak_clock_mhz: float | None
) -> dict[str, float]:
    """Metrics of one reading: power is summed over this process's GPUs, clocks are the slowest's.

    Power and energy are left out unless all GPUs report them. MFU at the clock is relative to the
    peak that the current clock allows: MFU × the peak's clock / current clock. It distinguishes a
    throttled GPU from a program that waits.

    Args:
        readings: of each GPU.
        record: to which they are added.
        peak_clock_mhz: at which a GPU reaches the peak; None: its highest clock stands in for it.
    """
    scalars: dict[str, float] = {}
    for name, *_, pick in QUERIES:
        known = [reading.numbers[name] for reading in readings if name in reading.numbers]
        if pick and known and (pick is not sum or len(known) == len(readings)):
            scalars[f"gpu/{name}"] = pick(known)
    scalars |= {f"gpu/throttled_{reason}": 1.0 for r in readings for reason in r.throttles}
    tokens, watts = record.scalars.get(_TOKENS), scalars.get("gpu/power_watts")
    if tokens and watts:
        scalars["gpu/tokens_per_joule"] = tokens * len(readings) / watts
    clocks = [
        (peak_clock_mhz or r.numbers.get("max_sm_clock_mhz"), r.numbers.get("sm_clock_mhz"))
        for r in readings
    ]
    shares = [clock / most for most, clock in clocks if most and clock]
    if shares and "perf/mfu" in record.scalars:
        scalars["perf/mfu_at_clock"] = record.scalars["perf/mfu"] / min(shares)
    return scalars
