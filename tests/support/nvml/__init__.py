"""A driver's NVML for the real nvidia-ml-py: a C library that the test builds and sets.

Its soname is that of NVIDIA's library: once loaded, ``CDLL("libnvidia-ml.so.1")`` finds it.
"""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

SOURCE = Path(__file__).with_name("libnvidia_ml.c")
NAME = "NVIDIA H100 80GB HBM3"
UNSUPPORTED = -1
# nvmlReturn_t of nvml.h.
NOT_SUPPORTED, GPU_IS_LOST = 3, 15
_FIELDS = (
    "power_mw",
    "energy_mj",
    "sm_mhz",
    "max_sm_mhz",
    "memory_mhz",
    "celsius",
    "reasons",
    "error",
    "mig",
    "gpm",
)
# An H100 under load: 700 W, 1,485 of 1,980 MHz.
BUSY = {
    **{"power_mw": 700_000, "energy_mj": 5_000_000, "sm_mhz": 1485, "max_sm_mhz": 1980},
    **{"memory_mhz": 2619, "celsius": 64, "reasons": 0, "error": 0, "mig": 0, "gpm": 1},
}


def build(folder: Path, *options: str) -> Path:
    """Compiles the library; `options` of the compiler, as ``-DOLD_DRIVER``."""
    compiler = shutil.which("cc")
    assert compiler is not None
    library = folder / "libnvidia-ml.so.1"
    soname = "-Wl,-soname,libnvidia-ml.so.1"
    command = [compiler, "-shared", "-fPIC", "-Wall", "-Werror", soname, *options]
    subprocess.run([*command, "-o", str(library), str(SOURCE)], check=True, timeout=60)
    return library


class Driver:
    """The driver of a machine with GPUs.

    Args:
        library: as `build` made it; stays loaded until the process ends.
    """

    def __init__(self, library: Path) -> None:
        self._library = ctypes.CDLL(str(library))

    def load(self, names: Sequence[str] = (NAME,)) -> None:
        """Loads the driver, with a GPU for each name: handles of before are invalid."""
        self._names = [name.encode() for name in names]  # C keeps the pointers
        for gpu, name in enumerate(self._names):
            self._library.driver_name(gpu, name)
            self.set(gpu, **BUSY)
        self._library.driver_load(len(names))

    def unload(self) -> None:
        """Unloads it: whatever is asked is not initialised."""
        self._library.driver_unload()

    def set(self, gpu: int, **values: int) -> None:
        """Sets what a GPU answers from now on, in NVML's units; energy grows by itself."""
        for name, value in values.items():
            self._library.driver_set(gpu, _FIELDS.index(name), ctypes.c_longlong(value))

    def count(self, gpu: int, metric: int, rate: float, *, is_slice: bool = False) -> None:
        """Sets how fast a GPM counter grows: percent, or MiB/s; below 0: not supported."""
        self._library.driver_rate(gpu, int(is_slice), metric, ctypes.c_double(rate))

    def reset_counters(self, gpu: int) -> None:
        """Lets a GPU's counters begin at 0 again."""
        self._library.driver_reset_counters(gpu)

    @property
    def samples(self) -> int:
        """How many samples of counters are allocated."""
        return int(self._library.driver_samples())

    def answers(self) -> list[tuple[int, str, int]]:
        """All numbers that were given: GPU, what, and how much."""
        gpu, field, value = ctypes.c_int(), ctypes.c_int(), ctypes.c_ulonglong()
        places = map(ctypes.byref, (gpu, field, value))
        pointers: list[Any] = list(places)
        found = []
        for i in range(self._library.driver_answers()):
            self._library.driver_answer(i, *pointers)
            found.append((gpu.value, _FIELDS[field.value], value.value))
        return found

    def asked(self) -> Counter[int]:
        """How many numbers each GPU gave."""
        return Counter(gpu for gpu, _, _ in self.answers())
