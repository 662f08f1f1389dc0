"""What NVIDIA's management library says of the GPUs of this process."""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections.abc import Callable, Sequence
from typing import Any

# NVML's numbers of what it asks for (nvml.h).
_SM_CLOCK, _MEMORY_CLOCK, _GPU_SENSOR = 1, 2, 0
# Why a clock is lower than it could be: nvmlClocksEventReason… of nvml.h. Idle, and clocks that
# somebody has set, are no throttling.
THROTTLES = {
    "power": 0x4,
    "hardware": 0x8,
    "thermal": 0x20 | 0x40,
    "power_brake": 0x80,
}


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class GpuReading:
    """One GPU at one moment; None: the driver does not tell.

    Attributes:
        power_watts: drawn now.
        energy_joules: since the driver was loaded.
        sm_clock_mhz: of the multiprocessors.
        max_sm_clock_mhz: the highest that it can have.
        memory_clock_mhz: of the memory.
        temperature_celsius: of the chip.
        throttles: names from `THROTTLES`.
    """

    power_watts: float | None = None
    energy_joules: float | None = None
    sm_clock_mhz: float | None = None
    max_sm_clock_mhz: float | None = None
    memory_clock_mhz: float | None = None
    temperature_celsius: float | None = None
    throttles: tuple[str, ...] = ()


class Gpus:
    """The GPUs that JAX uses here.

    Args:
        nvml: the module ``pynvml`` of the package nvidia-ml-py.
        ordinals: their numbers among the GPUs that this process can see.

    Raises:
        Exception: whatever NVML raises: no driver, no such GPU.
    """

    def __init__(self, nvml: Any, ordinals: Sequence[int]) -> None:
        self._nvml = nvml
        nvml.nvmlInit()
        self._handles = [self._handle(visible(number)) for number in ordinals]

    def read(self) -> list[GpuReading]:
        """Asks each GPU."""
        return [self._read(handle) for handle in self._handles]

    def _handle(self, name: str) -> Any:
        if name.isdigit():
            return self._nvml.nvmlDeviceGetHandleByIndex(int(name))
        return self._nvml.nvmlDeviceGetHandleByUUID(name)

    def _read(self, handle: Any) -> GpuReading:
        nvml = self._nvml
        reasons = getattr(nvml, "nvmlDeviceGetCurrentClocksEventReasons", None) or getattr(
            nvml, "nvmlDeviceGetCurrentClocksThrottleReasons", None
        )
        given = self._ask(reasons, handle) or 0
        clock, most = nvml.nvmlDeviceGetClockInfo, nvml.nvmlDeviceGetMaxClockInfo
        return GpuReading(
            power_watts=self._ask(nvml.nvmlDeviceGetPowerUsage, handle, scale=1e-3),
            energy_joules=self._ask(nvml.nvmlDeviceGetTotalEnergyConsumption, handle, scale=1e-3),
            sm_clock_mhz=self._ask(clock, handle, _SM_CLOCK),
            max_sm_clock_mhz=self._ask(most, handle, _SM_CLOCK),
            memory_clock_mhz=self._ask(clock, handle, _MEMORY_CLOCK),
            temperature_celsius=self._ask(nvml.nvmlDeviceGetTemperature, handle, _GPU_SENSOR),
            throttles=tuple(name for name, bits in THROTTLES.items() if int(given) & bits),
        )

    def _ask(
        self, function: Callable[..., Any] | None, *arguments: Any, scale: float = 1.0
    ) -> float | None:
        """One number; None if this GPU or driver lacks it."""
        with contextlib.suppress(self._nvml.NVMLError):
            return None if function is None else float(function(*arguments)) * scale
        return None


def visible(ordinal: int) -> str:
    """NVML's number, or the UUID, of a GPU by its number in this process.

    ``CUDA_VISIBLE_DEVICES`` renumbers GPUs for CUDA, but not for NVML.
    """
    names = [name.strip() for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")]
    return names[ordinal] if ordinal < len(names) and names[ordinal] else str(ordinal)
