"""Power, clocks, temperature and throttling of NVIDIA GPUs, and from these, tokens per joule.

By nvidia-ml-py (the module pynvml), on a separate thread: a driver may take any length of time.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax

from mfu_jax.errors import UserError
from mfu_jax.logger.records.step_record import StepRecord
from mfu_jax.logger.run_log.monitor import Monitor, annotated
from mfu_jax.logger.timing.timed_step import TimedStep
from mfu_jax.util.failsafe import Boundary
from mfu_jax.util.optional_deps import require

_log = logging.getLogger("mfu_jax")

# Consecutive readings with the same reason before it is reported: a brief spike is not.
_PERSISTS = 3
_MAX_REPORTS = 10
_TOKENS = "perf/per_device_tokens_per_sec"
# NVML's constants for clocks and sensors (nvml.h).
_SM_CLOCK, _MEMORY_CLOCK, _GPU_SENSOR = 1, 2, 0
# What is read of a GPU: its query with arguments, NVML's unit, and how the readings become one
# number for all GPUs of a process.
_QUERIES: Sequence[tuple[str, str, tuple[int, ...], float, Callable[..., float] | None]] = (
    ("power_watts", "PowerUsage", (), 1e-3, sum),
    ("energy_joules", "TotalEnergyConsumption", (), 1e-3, sum),
    ("sm_clock_mhz", "ClockInfo", (_SM_CLOCK,), 1.0, min),
    ("max_sm_clock_mhz", "MaxClockInfo", (_SM_CLOCK,), 1.0, None),
    ("memory_clock_mhz", "ClockInfo", (_MEMORY_CLOCK,), 1.0, min),
    ("temperature_celsius", "Temperature", (_GPU_SENSOR,), 1.0, max),
    ("throttles", "CurrentClocksEventReasons", (), 1, None),
    ("throttles", "CurrentClocksThrottleReasons", (), 1, None),  # drivers before 535
)
# Why a clock is lower than it could be: nvmlClocksEventReason… in nvml.h. Idling, and clocks set by
# a user, are not throttling; a power limit is, but usual.
_THROTTLES = {"power": 0x4, "hardware": 0x8, "thermal": 0x20 | 0x40, "power_brake": 0x80}
_REPORTED = {
    "hardware": "a slowdown of the hardware: heat, or its power supply",
    "thermal": "heat",
    "power_brake": "the power supply of the server",
}


class GpuReading(NamedTuple):
    """One GPU at one moment.

    Attributes:
        numbers: what the driver tells, under the names of `_QUERIES`. A slice of a GPU (MIG) has
            neither power nor energy: all slices share the board.
        throttles: names from `_THROTTLES`.
        silence: why the GPU does not answer at all; empty if it does.
    """

    numbers: Mapping[str, float]
    throttles: tuple[str, ...] = ()
    silence: str = ""


class Gpus:
    """The GPUs that JAX uses here.

    Args:
        nvml: the module ``pynvml`` of the package nvidia-ml-py.
        ordinals: the GPUs' numbers among those visible to this process.
        kinds: their names as reported by CUDA.

    Raises:
        UserError: no driver, no such GPU, or not certain to be the one that JAX uses.
    """

    def __init__(self, nvml: Any, ordinals: Sequence[int], kinds: Sequence[str] = ()) -> None:
        self._nvml = nvml
        names = [visible(number) for number in ordinals]
        try:
            nvml.nvmlInit()
            every = [nvml.nvmlDeviceGetHandleByIndex(i) for i in range(nvml.nvmlDeviceGetCount())]
            self._gpus = [self._whole(self._find(name, every)) for name in names]
            models = {str(nvml.nvmlDeviceGetName(handle)) for handle in every}
            own = [str(nvml.nvmlDeviceGetName(handle)) for handle, _ in self._gpus]
        except nvml.NVMLError as error:
            raise UserError(
                f"NVIDIA's management library (NVML) says {str(error)!r} of GPU "
                f"{', '.join(names)}; expected its power and clocks; usually a container "
                f"without the driver's utilities; start it with "
                f"NVIDIA_DRIVER_CAPABILITIES=compute,utility, or pass gpu_period_seconds=0"
            ) from error
        for kind, model in zip(kinds, own, strict=False):
            if len(models) > 1 and not kind.startswith(model):
                raise UserError(
                    f"CUDA's GPU is a {kind!r}, that of this number in NVML a {model!r}; expected "
                    f"the same; CUDA numbers the fastest first; set CUDA_DEVICE_ORDER=PCI_BUS_ID, "
                    f"or the UUIDs in CUDA_VISIBLE_DEVICES"
                )

    def read(self) -> list[GpuReading]:
        """Queries each GPU."""
        return [self._read(handle, is_slice) for handle, is_slice in self._gpus]

    def _find(self, name: str, every: Sequence[Any]) -> Any:
        """The handle of a number, a UUID, or (as CUDA accepts) the beginning of a UUID."""
        if name.isdigit():
            return self._nvml.nvmlDeviceGetHandleByIndex(int(name))
        found = [h for h in every if str(self._nvml.nvmlDeviceGetUUID(h)).startswith(name)]
        return found[0] if len(found) == 1 else self._nvml.nvmlDeviceGetHandleByUUID(name)

    def _whole(self, handle: Any) -> tuple[Any, bool]:
        """The handle of a whole GPU, and whether JAX uses a slice of it only."""
        nvml = self._nvml
        with contextlib.suppress(nvml.NVMLError):
            return nvml.nvmlDeviceGetDeviceHandleFromMigDeviceHandle(handle), True
        with contextlib.suppress(nvml.NVMLError):
            return handle, bool(nvml.nvmlDeviceGetMigMode(handle)[0])
        return handle, False

    def _read(self, handle: Any, is_slice: bool) -> GpuReading:
        numbers: dict[str, float] = {}
        silence = ""
        for name, query, arguments, unit, _ in _QUERIES:
            if name in numbers or (is_slice and name in ("power_watts", "energy_joules")):
                continue
            try:
                function = getattr(self._nvml, f"nvmlDeviceGet{query}")
                numbers[name] = unit * function(handle, *arguments)
            except (self._nvml.NVMLError, AttributeError) as error:
                silence = str(error)
        if not numbers:
            return GpuReading(numbers, silence=silence)
        bits = int(numbers.pop("throttles", 0))
        return GpuReading(numbers, tuple(name for name, bit in _THROTTLES.items() if bits & bit))


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


def visible(ordinal: int) -> str:
    """NVML's number, or the UUID, of a GPU, from its number in this process.

    ``CUDA_VISIBLE_DEVICES`` renumbers GPUs for CUDA, but not for NVML.
    """
    names = [name.strip() for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")]
    return names[ordinal] if ordinal < len(names) and names[ordinal] else str(ordinal)


class GpuWatch(Monitor):
    """Reads the GPUs that JAX uses every few seconds, from the first complete step on.

    Args:
        period_seconds: time between two readings.
        boundary: where failures are reported.
    """

    def __init__(self, period_seconds: float, boundary: Boundary) -> None:
        self._period_seconds = period_seconds
        self._readings: deque[list[GpuReading]] = deque(maxlen=1)
        self._closing = threading.Event()
        self._thread = boundary.thread("mfu_jax gpus", "power and clocks are not known", self._run)
        self._throttled: Counter[str] = Counter()
        self._silent: set[int] = set()
        self._reported = 0

    def on_record(self, step: TimedStep, record: StepRecord) -> StepRecord:
        """Adds the last reading to a record that is logged, once per reading."""
        if self._thread.ident is None:
            with contextlib.suppress(RuntimeError):  # Python 3.12 starts no thread at exit
                self._thread.start()
        if not self._readings or not record.is_logged:
            return record
        readings = self._readings.popleft()
        notes = [*self._silences(readings), *self._slowdowns(readings)]
        told = notes[: max(0, _MAX_REPORTS - self._reported)]
        self._reported += len(told)
        return annotated(record, scalars_of(readings, record), told)

    def close(self) -> None:
        """Stops the thread; a hung driver does not hold up the end of the run."""
        self._closing.set()
        if self._thread.is_alive():
            self._thread.join(timeout=1.0)

    def _run(self) -> None:
        gpus = gpus_of_jax()
        while gpus is not None:
            self._readings.append(gpus.read())
            if self._closing.wait(self._period_seconds):
                return

    def _silences(self, readings: Sequence[GpuReading]) -> list[str]:
        """Reports once that a GPU has fallen silent, and once that it answers again."""
        silent = {i for i, reading in enumerate(readings) if reading.silence}
        fallen, back = sorted(silent - self._silent), sorted(self._silent - silent)
        self._silent = silent
        notes = [f"GPU {i} does not answer: {readings[i].silence}" for i in fallen]
        return notes + [f"GPU {i} answers again" for i in back]

    def _slowdowns(self, readings: Sequence[GpuReading]) -> Iterator[str]:
        """Reports once that GPUs throttle persistently."""
        for reason, cause in _REPORTED.items():
            those = [i for i, reading in enumerate(readings) if reason in reading.throttles]
            self._throttled[reason] = self._throttled[reason] + 1 if those else 0
            if self._throttled[reason] == _PERSISTS:
                worst = readings[those[0]].numbers
                heat, clock, most = map(
                    worst.get, ("temperature_celsius", "sm_clock_mhz", "max_sm_clock_mhz")
                )
                at = "" if heat is None else f" at {heat:.0f} °C"
                mhz = "" if clock is None else f", {clock:.0f} MHz"
                of = f" of {most:.0f}" if mhz and most else ""
                yield f"GPU {', '.join(map(str, those))} throttles because of {cause}{at}{mhz}{of}"


def scalars_of(readings: Sequence[GpuReading], record: StepRecord) -> dict[str, float]:
    """Metrics of one reading: power is summed over this process's GPUs, clocks are the slowest's.

    Power and energy are left out unless all GPUs report them. MFU at the clock is relative to the
    peak that the current clock allows: MFU × highest / current clock. It distinguishes a throttled
    GPU from a program that waits.
    """
    scalars: dict[str, float] = {}
    for name, *_, pick in _QUERIES:
        known = [reading.numbers[name] for reading in readings if name in reading.numbers]
        if pick and known and (pick is not sum or len(known) == len(readings)):
            scalars[f"gpu/{name}"] = pick(known)
    scalars |= {f"gpu/throttled_{reason}": 1.0 for r in readings for reason in r.throttles}
    tokens, watts = record.scalars.get(_TOKENS), scalars.get("gpu/power_watts")
    if tokens and watts:
        scalars["gpu/tokens_per_joule"] = tokens * len(readings) / watts
    clocks = [(r.numbers.get("max_sm_clock_mhz"), r.numbers.get("sm_clock_mhz")) for r in readings]
    shares = [clock / most for most, clock in clocks if most and clock]
    if shares and "perf/mfu" in record.scalars:
        scalars["perf/mfu_at_clock"] = record.scalars["perf/mfu"] / min(shares)
    return scalars
