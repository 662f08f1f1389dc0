"""What NVIDIA's management library (NVML) reports about the GPUs of this process."""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections.abc import Callable, Sequence
from typing import Any

from mfu_jax.errors import UserError

# NVML's constants for clocks and sensors (nvml.h).
_SM_CLOCK, _MEMORY_CLOCK, _GPU_SENSOR = 1, 2, 0
# Why a clock is lower than it could be: nvmlClocksEventReason… in nvml.h. Idling, and clocks set by
# a user, are not throttling.
THROTTLES = {
    "power": 0x4,
    "hardware": 0x8,
    "thermal": 0x20 | 0x40,
    "power_brake": 0x80,
}


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class GpuReading:
    """One GPU at one moment; None where the driver does not tell.

    Attributes:
        power_watts: current draw; None for a slice of a GPU (MIG): all slices share the board.
        energy_joules: used since the driver was loaded; None for a slice.
        sm_clock_mhz: clock of the multiprocessors.
        max_sm_clock_mhz: the highest clock that they can have.
        memory_clock_mhz: clock of the memory.
        temperature_celsius: temperature of the chip.
        throttles: names from `THROTTLES`.
        silence: why the GPU does not answer at all; empty if it does.
    """

    power_watts: float | None = None
    energy_joules: float | None = None
    sm_clock_mhz: float | None = None
    max_sm_clock_mhz: float | None = None
    memory_clock_mhz: float | None = None
    temperature_celsius: float | None = None
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
        self._names = [visible(number) for number in ordinals]
        self._kinds = kinds
        self._silence = ""
        try:
            self._gpus = self._open()
        except nvml.NVMLError as error:
            raise UserError(
                f"NVIDIA's management library (NVML) says {str(error)!r} of GPU "
                f"{', '.join(self._names)}; expected its power and clocks; usually a container "
                f"without the driver's utilities; start it with "
                f"NVIDIA_DRIVER_CAPABILITIES=compute,utility, or pass gpu_period_seconds=0"
            ) from error

    def read(self) -> list[GpuReading]:
        """Queries each GPU; if none answered last time, NVML is restarted first."""
        if self._silence:
            self._open_again()
        if not self._gpus:
            return [GpuReading(silence=self._silence)] * len(self._names)
        readings = [gpu.read() for gpu in self._gpus]
        is_silent = all(reading.silence for reading in readings)
        self._silence = readings[0].silence if is_silent else ""
        return readings

    def _open(self) -> list[_Gpu]:
        self._nvml.nvmlInit()
        gpus = [self._gpu(name) for name in self._names]
        for gpu, kind in zip(gpus, self._kinds, strict=False):
            gpu.check_kind(kind)
        return gpus

    def _open_again(self) -> None:
        """Restarts NVML; old handles are not reused, as they may point to anything."""
        self._gpus = []
        with contextlib.suppress(self._nvml.NVMLError):  # it went down with the driver
            self._nvml.nvmlShutdown()
        try:
            self._gpus = self._open()
        except self._nvml.NVMLError as error:
            self._silence = str(error)

    def _gpu(self, name: str) -> _Gpu:
        if name.isdigit():
            return _Gpu(self._nvml, self._nvml.nvmlDeviceGetHandleByIndex(int(name)))
        return _Gpu(self._nvml, self._by_uuid(name))

    def _by_uuid(self, name: str) -> Any:
        """The handle of a UUID or UUID prefix: CUDA accepts both, NVML only the former."""
        try:
            return self._nvml.nvmlDeviceGetHandleByUUID(name)
        except self._nvml.NVMLError:
            count = self._nvml.nvmlDeviceGetCount()
            handles = map(self._nvml.nvmlDeviceGetHandleByIndex, range(count))
            found = [h for h in handles if str(self._nvml.nvmlDeviceGetUUID(h)).startswith(name)]
            if len(found) != 1:
                raise
            return found[0]


class _Gpu:
    """One GPU, or a slice of one.

    Args:
        nvml: see `Gpus`.
        handle: of the GPU or the slice. For a slice, its parent GPU is queried.
    """

    def __init__(self, nvml: Any, handle: Any) -> None:
        self._nvml = nvml
        self._handle = handle
        self._is_shared = False
        self._silence = ""
        self._answers = 0
        if self._ask(self._whole) is not None:
            self._handle, self._is_shared = self._whole(handle), True
        elif (mode := self._ask(nvml.nvmlDeviceGetMigMode)) is not None:
            self._is_shared = bool(mode[0])

    def check_kind(self, kind: str) -> None:
        """Checks that this is JAX's GPU, if the machine has several kinds of GPUs.

        Raises:
            UserError: it is a different one.
        """
        count = self._nvml.nvmlDeviceGetCount()
        handles = map(self._nvml.nvmlDeviceGetHandleByIndex, range(count))
        kinds = {str(self._nvml.nvmlDeviceGetName(handle)) for handle in handles}
        own = str(self._nvml.nvmlDeviceGetName(self._handle))
        if len(kinds) > 1 and not kind.startswith(own):
            raise UserError(
                f"CUDA's GPU is a {kind!r}, that of this number in NVML a {own!r}; expected the "
                f"same; CUDA numbers the fastest first; set CUDA_DEVICE_ORDER=PCI_BUS_ID, or the "
                f"UUIDs in CUDA_VISIBLE_DEVICES"
            )

    def read(self) -> GpuReading:
        """Queries the driver; if it answers nothing, the reading says why."""
        nvml, self._silence, self._answers = self._nvml, "", 0
        power, energy = (
            None if self._is_shared else self._number(function, scale=1e-3)
            for function in (
                nvml.nvmlDeviceGetPowerUsage,
                nvml.nvmlDeviceGetTotalEnergyConsumption,
            )
        )
        clock, most = nvml.nvmlDeviceGetClockInfo, nvml.nvmlDeviceGetMaxClockInfo
        reading = GpuReading(
            power_watts=power,
            energy_joules=energy,
            sm_clock_mhz=self._number(clock, _SM_CLOCK),
            max_sm_clock_mhz=self._number(most, _SM_CLOCK),
            memory_clock_mhz=self._number(clock, _MEMORY_CLOCK),
            temperature_celsius=self._number(nvml.nvmlDeviceGetTemperature, _GPU_SENSOR),
            throttles=self._throttles(),
        )
        if self._answers:
            return reading
        return dataclasses.replace(reading, silence=self._silence)

    def _throttles(self) -> tuple[str, ...]:
        """Names of active throttles; drivers before 535 know the query only by its old name."""
        new = getattr(self._nvml, "nvmlDeviceGetCurrentClocksEventReasons", None)
        old = self._nvml.nvmlDeviceGetCurrentClocksThrottleReasons
        given = None if new is None else self._number(new)
        given = self._number(old) if given is None else given
        bits = int(given or 0)
        return tuple(name for name, mask in THROTTLES.items() if bits & mask)

    def _whole(self, handle: Any) -> Any:
        return self._nvml.nvmlDeviceGetDeviceHandleFromMigDeviceHandle(handle)

    def _number(
        self, function: Callable[..., Any], *arguments: Any, scale: float = 1.0
    ) -> float | None:
        found = self._ask(function, *arguments)
        return None if found is None else float(found) * scale

    def _ask(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """The answer to a query; None if this GPU or driver has none."""
        try:
            found = function(self._handle, *arguments)
        except self._nvml.NVMLError as error:
            self._silence = str(error)
            return None
        self._answers += 1
        return found


def visible(ordinal: int) -> str:
    """NVML's number, or the UUID, of a GPU, from its number in this process.

    ``CUDA_VISIBLE_DEVICES`` renumbers GPUs for CUDA, but not for NVML.
    """
    names = [name.strip() for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")]
    return names[ordinal] if ordinal < len(names) and names[ordinal] else str(ordinal)
