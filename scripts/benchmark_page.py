"""Writes a section of docs/benchmarks.md, naming the machine that it was measured on."""

from __future__ import annotations

import os
import platform
import re
from pathlib import Path

import jax


def machine() -> str:
    """Processor, device and versions, in words."""
    model = platform.processor() or platform.machine()
    if Path("/proc/cpuinfo").exists():
        found = re.search(r"model name\s*: (.*)", Path("/proc/cpuinfo").read_text())
        model = found.group(1) if found else model
    device = jax.devices()[0].device_kind
    return (
        f"{os.cpu_count()} cores of {model}, JAX {jax.__version__} on {device}, "
        f"Python {platform.python_version()}"
    )


def replace_section(path: Path, text: str, heading: str) -> None:
    """Replaces the section with that heading by `text`, or appends it to the file."""
    old = path.read_text() if path.exists() else "# Benchmark records\n"
    section = re.compile(rf"^{re.escape(heading)}\n.*?(?=^## |\Z)", re.DOTALL | re.MULTILINE)
    if section.search(old):
        new = section.sub(lambda _: text + "\n", old)
    else:
        new = f"{old.rstrip()}\n\n{text}"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(new.rstrip() + "\n")
