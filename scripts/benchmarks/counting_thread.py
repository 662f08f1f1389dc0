"""The counting thread's share of a training process's CPU time in its first minute.

    python -m scripts.benchmarks.counting_thread [--seconds=60] [--write]

Run it from the repository root, on an otherwise idle machine. Each program trains in a separate,
instrumented process from its start to the end of the time; the thread's CPU time is what the
operating system reports when it ends.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from typing import Any

from scripts import results
from scripts.records.absent_devices import ROOT

CASES = {
    "12 layers scanned, full remat": {"L": 12, "scan": True},
    "4 layers unrolled, full remat": {"L": 4, "scan": False},
    "24 layers unrolled, full remat": {"L": 24, "scan": False},
}


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--write", action="store_true", help="write to scripts/results/")
    parser.add_argument("--case", choices=CASES, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.case:
        print(json.dumps(_train(CASES[options.case], options.seconds)))
        return
    rows = []
    for name in CASES:
        module = (sys.executable, "-m", "scripts.benchmarks.counting_thread")
        command = [*module, f"--case={name}", f"--seconds={options.seconds}"]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
        rows.append(_row(name, json.loads(done.stdout.splitlines()[-1])))
    print(results.table(rows))
    if options.write:
        what = "CPU time of the counting thread in the first minute of training"
        notes = [f"First {options.seconds:.0f} s, compiling included; width 512, 512 tokens."]
        results.write("counting_thread", what, rows, notes=notes)


def _row(name: str, measured: dict[str, float]) -> results.Row:
    counting, process = measured["counting"], measured["process"]
    return {
        "step": name,
        "HLO": f"{measured['characters'] / 1e6:.2f} MB",
        "counting thread": f"{counting:.2f} s",
        "process": f"{process:.1f} s",
        "share": f"{counting / process:.2%}",
    }


def _train(layers: dict[str, Any], seconds: float) -> dict[str, float]:
    """Trains until the process is `seconds` old; returns CPU seconds."""
    import jax
    import jax.numpy as jnp

    import mfu_jax
    from mfu_jax.instrumentation import programs
    from tests.support.reference_model import Shape, reference_step

    spent = []
    count = programs._count

    def timed(*arguments: Any) -> None:
        count(*arguments)
        spent.append(time.thread_time())  # of the whole thread, which ends here

    vars(programs)["_count"] = timed
    shape = Shape(B=1, S=512, D=512, F=2048, V=4096, H=8, K=8, remat="full", **layers)
    function, shapes = reference_step(shape)
    jitted = jax.jit(function)
    step = mfu_jax.instrument(jitted, peak_tflops_per_device=1.0, sinks=[])
    arguments = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), shapes)
    while time.perf_counter() - STARTED < seconds:
        jax.block_until_ready(step(*arguments))
    process = time.process_time()
    step.close()
    text = jitted.lower(*arguments).compile().as_text() or ""
    return {"counting": sum(spent), "process": process, "characters": len(text)}


STARTED = time.perf_counter()

if __name__ == "__main__":
    main()
