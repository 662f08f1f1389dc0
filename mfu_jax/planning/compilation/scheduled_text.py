"""A scheduled TPU program, read from XLA's dumps before machine code is generated.

Generating machine code takes nine tenths of a compile, often more, and changes no instruction.
Schedule, buffers and the verdict on memory are available before.
"""

from __future__ import annotations

import re
import time
from collections import defaultdict
from pathlib import Path

from mfu_jax.dumps.program import ProgramDump

_SCHEDULED = ".after_optimizations.txt"
_BUFFERS = ".after_optimizations-buffer-assignment.txt"
_REPORT = ".after_optimizations-memory-usage-report.txt"  # follows the buffers, refused or not
_LAST = ".after_optimizations_after_buffer_assignment.txt"  # written before machine code
# XLA refuses a program within seconds of the report. For a TPU7x it writes the last file never, or
# minutes later; the plan compares the peak with the memory anyway.
_VERDICT_SECONDS = 10.0
_ALLOCATION = re.compile(r"^allocation \d+: size (\d+)(.*)$", re.MULTILINE)
_COLOR = re.compile(r", color (\d+)")
_HBM, _HOST = "0", "5"  # XLA's memory spaces


def dump_flags(folder: Path) -> str:
    """XLA flags that write what this module reads."""
    return f"--xla_dump_to={folder} --xla_dump_hlo_as_text --xla_dump_large_constants=true"


def is_scheduled(folder: Path) -> bool:
    """Whether the compiler has reached machine code, or finished the buffers long ago.

    Not while it writes the schedule, which it does again where a program is compiled anew for want
    of memory.
    """
    name = _largest(folder)
    if name is None or not _is_whole(folder / f"{name}{_SCHEDULED}"):
        return False
    report = folder / f"{name}{_REPORT}"
    is_old = report.exists() and time.time() - report.stat().st_mtime > _VERDICT_SECONDS
    return is_old or (folder / f"{name}{_LAST}").exists()


def read_scheduled(folder: Path) -> ProgramDump | None:
    """The largest program with a complete schedule, refused or not; None if there is none.

    Call it once the compiler no longer writes to the folder.
    """
    name = _largest(folder)
    if name is None or not _is_whole(folder / f"{name}{_SCHEDULED}"):
        return None
    text = (folder / f"{name}{_SCHEDULED}").read_text(encoding="utf-8")
    buffers = (folder / f"{name}{_BUFFERS}").read_text(encoding="utf-8")
    return ProgramDump(text=text, memory=memory_of_buffers(buffers))


def memory_of_buffers(text: str) -> dict[str, int]:
    """The fields of ``memory_analysis()`` that follow from XLA's buffer assignment.

    Args:
        text: one line per allocation: its size, what it is, and its memory space unless HBM.
    """
    sizes: dict[str, int] = defaultdict(int)
    for size, words in _ALLOCATION.findall(text):
        found = _COLOR.search(words)
        color = found[1] if found else _HBM
        if color == _HOST and "preallocated-temp" in words:
            sizes["host_temp_size_in_bytes"] += int(size)
        if color != _HBM:
            continue
        is_argument, is_output = ", parameter " in words, "maybe-live-out" in words
        sizes["peak_memory_in_bytes"] += int(size)
        sizes["argument_size_in_bytes"] += int(size) * is_argument
        sizes["output_size_in_bytes"] += int(size) * is_output
        sizes["alias_size_in_bytes"] += int(size) * (is_argument and is_output)
        sizes["temp_size_in_bytes"] += int(size) * ("preallocated-temp" in words)
    return dict(sizes)


def _largest(folder: Path) -> str | None:
    """The TPU program with the largest buffers; those for the host are ``….cpu_after_…``."""
    found = max(folder.glob(f"*{_BUFFERS}"), key=lambda path: path.stat().st_size, default=None)
    return None if found is None else found.name.removesuffix(_BUFFERS)


def _is_whole(path: Path) -> bool:
    """Whether a module's text has its last brace."""
    if not path.exists():
        return False
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - 8))
        return file.read().rstrip().endswith(b"}")
