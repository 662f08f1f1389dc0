"""Checks this machine: versions, devices, peak, extras, folders.

usage: mfu-jax doctor [FOLDER] [--json]

One line for each, with what would be missing and how to get it. The exit code is 1 if a step would
have no MFU here (there is no device, or its peak is not known), or if FOLDER cannot be written.
  FOLDER  where a run would write (run_dir=); default: the working folder
  --json  one JSON object on stdout

example: mfu-jax doctor"""

from __future__ import annotations

import os
import platform
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from mfu_jax.errors import UserError, first_line
from mfu_jax.storage.addresses import Address, path_of
from mfu_jax.util.arguments import parse
from mfu_jax.util.formatting import columns, json_text
from mfu_jax.util.optional_deps import versions_of
from mfu_jax.util.yaml_files import read_mapping

_PACKAGES = ("mfu-jax", "jax", "jaxlib", "numpy")
_OPTIONAL = read_mapping(Path(__file__).with_name("doctor.yml"))
_ALSO = {"mlflow-skinny": "mlflow"}  # the whole of it is as good


class _Check(NamedTuple):
    name: str
    found: str  # empty: missing
    hint: str = ""
    is_needed: bool = False


def main(argv: Sequence[str]) -> int:
    """Runs the command; returns its exit code."""
    arguments = parse(argv, keys=(), flags=("--json",))
    folder = arguments.one_name("folder") if arguments.names else "."
    checks = [*_versions(), *_devices(), *_folders(folder)]
    is_well = all(check.found or not check.is_needed for check in checks)
    if arguments.flags:
        print(json_text({"passed": is_well, "checks": [check._asdict() for check in checks]}))
    else:
        rows = [("ok" if c.found else "missing", c.name, c.found or c.hint) for c in checks]
        print("\n".join(columns(rows, "<<<")))
    return 0 if is_well else 1


def _versions() -> Iterator[_Check]:
    yield _Check("python", platform.python_version())
    found = versions_of((*_PACKAGES, *_OPTIONAL, *_ALSO.values()))
    for name in _PACKAGES:
        yield _Check(name, found.get(name, ""), f"pip install {name}", is_needed=True)
    for name, row in _OPTIONAL.items():
        version = found.get(name) or found.get(_ALSO.get(name, ""), "")
        yield _Check(name, version, f"{row['use']}: pip install {row['install']}")


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
        yield _Check("peak", "measured once, by a run or mfu-jax hardware --calibrate")
        return
    try:
        chip = hardware.lookup(device.device_kind, getattr(device, "compute_capability", None))
        peaks = ", ".join(f"{dtype} {peak:g}" for dtype, peak in chip.peak_tflops.items())
        yield _Check("peak", f"{chip.name}, TFLOP/s: {peaks}", is_needed=True)
    except UserError as error:
        yield _Check("peak", "", first_line(error), is_needed=True)


def _folders(run: str) -> Iterator[_Check]:
    """The folders that are written, and who may read this process's devices."""
    from mfu_jax.hardware.calibration import cache_directory
    from mfu_jax.planning.compilation.cache import default_folder

    place = path_of(run)
    if isinstance(place, Address):
        yield _Check("run folder", f"{place} (an object store: not tried)", is_needed=True)
    else:
        yield _writable("run folder", place, "pass another run_dir=", is_needed=True)
    yield _writable("cache", cache_directory(), "set MFU_JAX_CACHE_DIR=FOLDER")
    yield _writable("plans", default_folder(), "pass cache=FOLDER")
    compiled = os.environ.get("JAX_COMPILATION_CACHE_DIR", "")
    hint = "a restart compiles again: set JAX_COMPILATION_CACHE_DIR=FOLDER"
    if compiled:
        yield _writable("compile cache", Path(compiled), hint)
    else:
        yield _Check("compile cache", "", hint)


def _writable(name: str, folder: Path, hint: str, *, is_needed: bool = False) -> _Check:
    """A folder, which need not be there yet; empty if it cannot be made or written."""
    folder = folder.absolute()
    try:
        above = next(path for path in (folder, *folder.parents) if path.exists())
        with tempfile.TemporaryFile(dir=above):
            return _Check(name, str(folder), is_needed=is_needed)
    except OSError as error:
        why = f"{folder} cannot be written ({error.strerror or error}): {hint}"
        return _Check(name, "", why, is_needed)
