"""Power, clocks, temperature and throttling of NVIDIA GPUs, by nvidia-ml-py (the module pynvml)."""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax

from mfu_jax.errors import UserError
from mfu_jax.util.optional_deps import require

_log = logging.getLogger("mfu_jax")

# NVML's constants for clocks and sensors (nvml.h).
_SM_CLOCK, _MEMORY_CLOCK, _GPU_SENSOR = 1, 2, 0
# What is read of a GPU: its query with arguments, NVML's unit, and how the readings become one
# number for all GPUs of a process.
QUERIES: Sequence[tuple[str, str, tuple[int, ...], float, Callable[..., float] | None]] = (
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
REPORTED = {
    "hardware": "a slowdown of the hardware: heat, or its power supply",
    "thermal": "heat",
    "power_brake": "the power supply of the server",
}


class GpuReading(NamedTuple):
    """One GPU at one moment.

    Attributes:
        numbers: what the driver tells, under the names of `QUERIES`. A slice of a GPU (MIG) has
            neither power nor energy: all slices share the board.
        throttles: names from `_THROTTLES`.
        silence: why the GPU does not answer at all; empty if it does.
    """

    numbers: Mapping[str, float]
    throttles: tuple[str, ...] = ()
    silence: str = ""


class Gpu(NamedTuple):
    """A GPU that JAX uses, or a slice (MIG) of it.

    Attributes:
        handle: NVML's, of the whole GPU.
        is_slice: whether JAX uses only a slice.
        instance: NVML's number of the slice, if known.
    """

    handle: Any
    is_slice: bool = False
    instance: int | None = None


class Gpus:
    """The GPUs that JAX uses here.

    Args:
        nvml: the module ``pynvml`` of the package nvidia-ml-py.
        ordinals: the GPUs' numbers among those visible to this process.
        kinds: their names as reported by CUDA.

    Attributes:
        nvml: as given.
        gpus: in the order of `ordinals`.

    Raises:
        UserError: no driver, no such GPU, or not certain to be the one that JAX uses.
    """

    def __init__(self, nvml: Any, ordinals: Sequence[int], kinds: Sequence[str] = ()) -> None:
        self.nvml = nvml
        names = [visible(number) for number in ordinals]
        try:
            nvml.nvmlInit()
            every = [nvml.nvmlDeviceGetHandleByIndex(i) for i in range(nvml.nvmlDeviceGetCount())]
            self.gpus = [self._whole(self._find(name, every)) for name in names]
            models = {str(nvml.nvmlDeviceGetName(handle)) for handle in every}
            own = [str(nvml.nvmlDeviceGetName(gpu.handle)) for gpu in self.gpus]
        except nvml.NVMLError as error:
            raise UserError(
                f"NVIDIA's management library (NVML) says {str(error)!r} of GPU "
                f"{', '.join(names)}; expected its power and clocks",
                hint="usually a container without the driver's utilities; start it with "
                "NVIDIA_DRIVER_CAPABILITIES=compute,utility, or pass gpu_period_seconds=0",
            ) from error
        for kind, model in zip(kinds, own, strict=False):
            if len(models) > 1 and not kind.startswith(model):
                raise UserError(
                    f"CUDA's GPU is a {kind!r}, that of this number in NVML a {model!r}; "
                    "expected the same; CUDA numbers the fastest first",
                    hint="set CUDA_DEVICE_ORDER=PCI_BUS_ID, or the UUIDs in CUDA_VISIBLE_DEVICES",
                )

    def read(self) -> list[GpuReading]:
        """Queries each GPU."""
        return [self._read(gpu) for gpu in self.gpus]

    def _find(self, name: str, every: Sequence[Any]) -> Any:
        """The handle of a number, a UUID, or (as CUDA accepts) the beginning of a UUID."""
        if name.isdigit():
            return self.nvml.nvmlDeviceGetHandleByIndex(int(name))
        found = [h for h in every if str(self.nvml.nvmlDeviceGetUUID(h)).startswith(name)]
        return found[0] if len(found) == 1 else self.nvml.nvmlDeviceGetHandleByUUID(name)

    def _whole(self, handle: Any) -> Gpu:
        """The whole GPU of a handle, and which slice of it JAX uses."""
        nvml = self.nvml
        with contextlib.suppress(nvml.NVMLError):
            whole, instance = nvml.nvmlDeviceGetDeviceHandleFromMigDeviceHandle(handle), None
            with contextlib.suppress(nvml.NVMLError):
                instance = nvml.nvmlDeviceGetGpuInstanceId(handle)
            return Gpu(whole, True, instance)
        with contextlib.suppress(nvml.NVMLError):
            return Gpu(handle, bool(nvml.nvmlDeviceGetMigMode(handle)[0]))
        return Gpu(handle)

    def _read(self, gpu: Gpu) -> GpuReading:
        numbers: dict[str, float] = {}
        silence = ""
        for name, query, arguments, unit, _ in QUERIES:
            if name in numbers or (gpu.is_slice and name in ("power_watts", "energy_joules")):
                continue
            try:
                function = getattr(self.nvml, f"nvmlDeviceGet{query}")
                numbers[name] = unit * function(gpu.handle, *arguments)
            except (self.nvml.NVMLError, AttributeError) as error:
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
