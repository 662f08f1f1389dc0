"""Compiles real TPU, GPU and CPU programs, without that hardware, and records their HLO text.

    python -m tests.support.record_programs [--only=REGEX] [--out=tests/programs]

Run it from the repository root. Each platform's programs are compiled in a separate process,
because libtpu and the CUDA plugin need their own environment, and a compiler crash takes its
process with it. Programs whose compiler is not installed are left as they are. TPU programs need
``pip install 'jax[tpu]'`` (the libtpu that this jax pins), GPU programs ``pip install
jax-cuda13-plugin jax-cuda13-pjrt nvidia-cudnn-cu13``; with two virtual environments of the same
jax, run the script in each.

``index.json`` has one line per program: XLA's cost_analysis() report, and the compile time.
"""

from __future__ import annotations

import argparse
import base64
import importlib.util
import json
import lzma
import os
import re
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tests.support.absent_devices import ROOT, TPU_ENVIRONMENT, TPU_TOPOLOGIES, devices

_ENVIRONMENT = {
    "cpu": {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": "--xla_force_host_platform_device_count=8"},
    "h100": {"JAX_PLATFORMS": "cpu"},
}
_PLUGIN = {"cpu": "jax", "h100": "jax_plugins.xla_cuda13"}


def record(name: str, out: Path) -> None:
    """Compiles one program in this process and writes it."""
    from tests.support import program_list

    program = program_list.PROGRAMS[name]
    started = time.perf_counter()
    compiled = program.compile(devices(program.platform, program.topology))
    seconds = time.perf_counter() - started
    module = compiled.runtime_executable().hlo_modules()[0]
    options = sys.modules[type(module).__module__].HloPrintOptions()
    # Block masks of attention kernels are constants of a few hundred elements. Larger constants
    # are a program's tables, which as_text() leaves out, too.
    options.print_large_constants = program.platform not in ("cpu", "h100")
    text = module.to_string(options)
    text = without_paths(text)
    analysis = compiled.cost_analysis() or {}
    about = {
        "platform": program.platform,
        "topology": program.topology or TPU_TOPOLOGIES.get(program.platform, ""),
        "xla_reported_flops": analysis.get("flops"),
        "compile_seconds": round(seconds, 2),
        "characters": len(text),
        **program_list.versions(program.platform),
    }
    (out / f"{name}.hlo.xz").write_bytes(lzma.compress(text.encode(), preset=9))
    write_index(out / "index.json", {name: about})
    print(f"{name}: {len(text):,} characters, compiled in {seconds:.1f} s", flush=True)


def without_paths(text: str) -> str:
    """The program without the paths of the machine that compiled it.

    Kernel bodies are binary: there, a path is replaced by one of the same length.
    """
    text = re.sub(r'"/[^"\n]*/([\w.]+\.py)"', r'"\1"', text)
    text = re.sub(r"(?<=\\00)/[\w./-]*/(?=[\w.]+\.py\\00)", lambda m: _blank(m[0]), text)

    def body(match: re.Match[str]) -> str:
        raw = base64.b64decode(match[1])
        clean = re.sub(
            rb"(?<=\0)/[\w./-]*/(?=[\w.]+\.py\0)", lambda m: _blank(m[0].decode()).encode(), raw
        )
        return f'"body":"{base64.b64encode(clean).decode()}"'

    return re.sub(r'"body":"([^"]+)"', body, text)


def _blank(path: str) -> str:
    return "/" + "_" * (len(path) - 2) + "/"


def write_index(path: Path, entries: Mapping[str, Any]) -> None:
    """Adds entries to the index, sorted, one line each."""
    index = {**(json.loads(path.read_text()) if path.exists() else {}), **entries}
    lines = (f"{json.dumps(name)}: {json.dumps(index[name])}" for name in sorted(index))
    path.write_text("{\n" + ",\n".join(lines) + "\n}\n")


def main() -> int:
    """Records all programs whose compiler is installed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", help="names that match this regular expression")
    parser.add_argument("--out", type=Path, default=ROOT / "tests" / "programs")
    parser.add_argument("--here", nargs="*", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.here:
        for name in arguments.here:
            record(name, arguments.out)
        return 0
    from tests.support import program_list

    failed: list[str] = []
    by_platform: dict[str, list[str]] = {}
    for name, program in program_list.PROGRAMS.items():
        if re.search(arguments.only, name) and _installed(_PLUGIN.get(program.platform, "libtpu")):
            by_platform.setdefault(program.platform, []).append(name)
    for platform, names in by_platform.items():
        failed += _record_apart(platform, names, arguments.out)
    return 1 if failed else 0


def _record_apart(platform: str, names: list[str], out: Path) -> list[str]:
    """Records in another process; after a crash, a new one continues with the next program."""
    environment = {**os.environ, **_ENVIRONMENT.get(platform, TPU_ENVIRONMENT)}
    failed = []
    while names:
        module = (sys.executable, "-m", "tests.support.record_programs")
        command = [*module, f"--out={out.resolve()}", "--here", *names]
        done = subprocess.run(
            command, env=environment, cwd=ROOT, capture_output=True, text=True, check=False
        )
        print(done.stdout, end="", flush=True)
        if done.returncode == 0:
            break
        names = names[sum(": " in line for line in done.stdout.splitlines()) :]
        print(f"{names[0]}: FAILED\n{done.stderr[-800:]}", file=sys.stderr, flush=True)
        failed.append(names[0])
        names = names[1:]
    return failed


def _installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:
        return False


if __name__ == "__main__":
    raise SystemExit(main())
