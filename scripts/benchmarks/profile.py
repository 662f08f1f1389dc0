"""Measures the time and peak memory of `mfu-jax profile` on a trace of millions of thunks.

    python -m scripts.benchmarks.profile [EVENTS] [FOLDER] [BYTES]

The trace is laid out like a CPU's: four threads, every event with its op, program, run and device,
and BYTES more (default 0) of text that nobody reads.
"""

from __future__ import annotations

import resource
import sys
import tempfile
import time
from pathlib import Path

from mfu_jax.dumps import ProgramDump, write
from mfu_jax.profiling.profile import read_profile
from tests.support.xspace import Plane, chunk, number, space, varint

THREADS, STEPS, OPS = 4, 100, 500
LENGTH = 2000  # picoseconds of one op


def program() -> str:
    """A chain of `OPS` elementwise ops."""
    lines = ["HloModule jit_step", "ENTRY %e (p: f32[8,8]) -> f32[8,8] {"]
    lines.append("  %op.0 = f32[8,8] parameter(0)")
    lines += [f"  %op.{n} = f32[8,8] negate(%op.{n - 1})" for n in range(1, OPS + 1)]
    last = f"  ROOT %d = f32[8,8] dot(%op.{OPS}, %op.{OPS}), lhs_contracting_dims={{1}}, "
    return "\n".join([*lines, f"{last}rhs_contracting_dims={{0}}", "}"])


def write_trace(folder: Path, events: int, more: int) -> Path:
    """The trace, and the program beside it."""
    write(ProgramDump(text=program()), folder / "programs" / "step.mfu")
    plane = Plane("/host:CPU")
    per_step = events // THREADS // STEPS
    tails = []
    for op in range(1, OPS + 1):
        stats = {"hlo_op": f"op.{op}", "hlo_module": "jit_step", "program_id": 5}
        others = {
            "device_ordinal": 0,
            "_src": "thunk_executor.cc",
            "_pt": 0,
            "_p": 55834574848 + op,
        }
        tail = b"".join(chunk(4, plane.stat(k, v)) for k, v in (stats | others).items())
        tail += chunk(4, plane.stat("args", b"x" * more)) if more else b""
        tails.append((number(1, plane.event_id(f"op.{op}")), number(3, LENGTH), tail))
    for thread in range(THREADS):
        parts = []
        for event in range(per_step * STEPS):
            head, length, tail = tails[event % OPS]
            run = chunk(4, plane.stat("run_id", 1_000_000_000 + event // per_step))
            parts.append(chunk(4, head + number(2, event * LENGTH * 5 // 4) + length + tail + run))
        line = chunk(2, f"tf_XLAEigen/{thread}") + number(3, 1000) + b"".join(parts)
        plane.parts.append(varint(3 << 3 | 2) + varint(len(line)) + line)
    file = folder / "big.xplane.pb"
    file.write_bytes(space(plane))
    return file


def main(events: int, folder: Path, more: int) -> None:
    """Writes the trace if it is missing, and reads it."""
    file = folder / "big.xplane.pb"
    if not file.exists():
        write_trace(folder, events, more)
        print(f"{file}: {file.stat().st_size / 2**20:,.0f} MiB; run again to time it alone")
        return
    start, used = time.perf_counter(), time.process_time()
    profile = read_profile(folder, peak_tflops_per_device=1)
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    print(
        f"{file.stat().st_size / 2**20:,.0f} MiB, {events:,} events in {profile.measured.steps} "
        f"steps: {time.perf_counter() - start:.1f} s, {time.process_time() - used:.1f} s of CPU, "
        f"{memory:.2f} GiB; coverage {profile.coverage:.3f}"
    )


if __name__ == "__main__":
    given = sys.argv[1:]
    main(
        int(given[0]) if given else 5_000_000,
        Path(given[1]) if len(given) > 1 else Path(tempfile.gettempdir()) / "mfu_jax_big_trace",
        int(given[2]) if len(given) > 2 else 0,
    )
