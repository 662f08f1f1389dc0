"""Checks this machine: versions, devices, peak, extras, cache.

usage: mfu-jax doctor [--json]

One line for each, with what would be missing and how to get it. The exit code is 1 if a step would
have no MFU here: there is no device, or its peak is not known.
  --json  one JSON object on stdout

example: mfu-jax doctor"""

from __future__ import annotations

import os
import platform
from collections.abc import Iterator, Sequence
from importlib import metadata
from typing import NamedTuple

from mfu_jax.errors import UserError, first_line
from mfu_jax.util.arguments import parse
from mfu_jax.util.formatting import columns, json_text

_PACKAGES = ("mfu-jax", "jax", "jaxlib", "numpy")
# Package → what it is for, and what installs it.
_OPTIONAL = {
    "optax": ("the reference trainer", "'mfu-jax[train]'"),
    "rich": ("mfu-jax watch and the progress bar", "'mfu-jax[train]'"),
    "wandb": ("the sink wandb", "'mfu-jax[wandb]'"),
    "mlflow-skinny": ("the sink mlflow", "'mfu-jax[mlflow]'"),
    "nvidia-ml-py": ("power and clocks of NVIDIA GPUs", "'mfu-jax[nvidia]'"),
    "transformers": ("mfu-jax flops --trace", "'mfu-jax[trace-hf]'"),
    "fsspec": ("files in object stores", "fsspec gcsfs"),
}


class _Check(NamedTuple):
    name: str
    found: str  # empty: missing
    hint: str = ""
    is_needed: bool = False


def main(argv: Sequence[str]) -> int:
    """Runs the command; returns its exit code."""
    flags = parse(argv, keys=(), flags=("--json",)).flags
    checks = [*_versions(), *_devices(), _cache()]
    is_well = all(check.found or not check.is_needed for check in checks)
    if flags:
        print(json_text({"passed": is_well, "checks": [check._asdict() for check in checks]}))
    else:
        rows = [("ok" if c.found else "missing", c.name, c.found or c.hint) for c in checks]
        print("\n".join(columns(rows, "<<<")))
    return 0 if is_well else 1


def _versions() -> Iterator[_Check]:
    yield _Check("python", platform.python_version())
    for name in _PACKAGES:
        yield _Check(name, _version(name), f"pip install {name}", is_needed=True)
    for name, (use, install) in _OPTIONAL.items():
        yield _Check(name, _version(name), f"{use}: pip install {install}")


def _version(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return ""


def _devices() -> Iterator[_Check]:
    from mfu_jax import hardware

    try:
        import jax

        device = jax.local_devices()[0]
    except Exception as error:  # JAX's, for a driver or plugin that does not work
        yield _Check("devices", "", first_line(error), is_needed=True)
        return
    yield _Check("devices", f"{jax.device_count()} × {device.device_kind}", is_needed=True)
    if device.platform == "cpu":
        yield _Check("peak", "measured when first needed: mfu-jax hardware --calibrate")
        return
    try:
        chip = hardware.lookup(device.device_kind, getattr(device, "compute_capability", None))
        peaks = ", ".join(f"{dtype} {peak:g}" for dtype, peak in chip.peak_tflops.items())
        yield _Check("peak", f"{chip.name}, TFLOP/s: {peaks}", is_needed=True)
    except UserError as error:
        yield _Check("peak", "", str(error), is_needed=True)


def _cache() -> _Check:
    from mfu_jax.hardware.calibration import cache_directory

    folder = cache_directory()
    above = next(path for path in (folder, *folder.parents) if path.exists())
    is_writable = os.access(above, os.W_OK)
    return _Check("cache", str(folder) if is_writable else "", "pass MFU_JAX_CACHE_DIR=FOLDER")
