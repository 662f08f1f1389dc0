"""Compiles real TPU, GPU and CPU programs, without that hardware, and records their HLO text.

    python scripts/record_programs.py [--only=REGEX] [--out=tests/programs]

Each platform's programs are compiled in a process apart, because libtpu and the CUDA plugin want
their own environment, and a compiler crash takes its process with it. Programs whose compiler is
not installed are left as they are. TPU programs want ``pip install 'jax[tpu]'`` (the libtpu that
this jax pins), GPU programs ``pip install jax-cuda13-plugin jax-cuda13-pjrt nvidia-cudnn-cu13``;
two virtual environments with the same jax will do: run the script in each.

Beside every program stands what XLA's own cost_analysis() says of it, and how long it compiled.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import lzma
import os
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

TPU_ENVIRONMENT = {
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_ACCELERATOR_TYPE": "v5litepod-4",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "JAX_PLATFORMS": "cpu",
}
_ENVIRONMENT = {
    "cpu": {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": "--xla_force_host_platform_device_count=8"},
    "h100": {"JAX_PLATFORMS": "cpu"},
}
_PLUGIN = {"cpu": "jax", "h100": "jax_plugins.xla_cuda13"}
# device kinds and the topology of their name for one, 4, 8, 64 and 512 devices
_TOPOLOGIES = {
    "v4": "v4:2x2x1",
    "v5e": "v5e:2x4",
    "v5p": "v5p:2x2x2",
    "v6e": "v6e:2x4",
    "tpu7x": "tpu7x:2x2x1",
}


def devices(platform: str, topology: str = "") -> Any:
    """Devices of a platform to compile for, attached or not."""
    import jax
    from jax.experimental import topologies

    if platform == "cpu":
        return jax.devices()
    if platform == "h100":
        target = (ROOT / "tests" / "data" / "h100_target_config.txtpb").read_text()
        return topologies.get_topology_desc(
            "h100", "cuda", target_config=target, topology=topology or "1x1x8"
        ).devices
    return topologies.get_topology_desc(topology or _TOPOLOGIES[platform], "tpu").devices


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
    # are a program's tables; leaving them out is what as_text() does, too.
    options.print_large_constants = program.platform not in ("cpu", "h100")
    text = module.to_string(options)
    text = re.sub(r'"/[^"\n]*/([\w.]+\.py)"', r'"\1"', text)  # paths of the machine it ran on
    analysis = compiled.cost_analysis() or {}
    about = {
        "platform": program.platform,
        "topology": program.topology or _TOPOLOGIES.get(program.platform, ""),
        "xla_reported_flops": analysis.get("flops"),
        "compile_seconds": round(seconds, 2),
        "characters": len(text),
        **program_list.versions(program.platform),
    }
    (out / f"{name}.hlo.xz").write_bytes(lzma.compress(text.encode(), preset=9))
    (out / f"{name}.json").write_text(json.dumps(about, indent=1) + "\n")
    print(f"{name}: {len(text):,} characters, compiled in {seconds:.1f} s", flush=True)


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
    """Records in another process; after a crash, goes on with the next program in a new one."""
    environment = {**os.environ, **_ENVIRONMENT.get(platform, TPU_ENVIRONMENT)}
    failed = []
    while names:
        command = [sys.executable, __file__, f"--out={out}", "--here", *names]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
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
