"""Plants one fault after the other in a healthy training loop, and asks `mfu-jax profile`.

    python -m scripts.planted_faults [--only sync,data] [--pairs 3] [--steps 8]

For each fault it prints the first advice with its expected gain, and what removing the fault really
brings: the median difference of step times, of runs without a trace that alternate between the two
loops. The exit code is 1 if a fault is not named first, or its gain is off by more than 20%.
The faults that CPUs do not feel (float32, odd vocabulary, an elementwise chain) are in
tests/profiling/advice. Matmuls run on one thread each, so that virtual devices share no core.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile

DEVICES = 2
os.environ.setdefault(
    "XLA_FLAGS",
    f"--xla_force_host_platform_device_count={DEVICES} --xla_cpu_multi_thread_eigen=false",
)
os.environ.setdefault("JAX_PLATFORMS", "cpu")

from collections.abc import Sequence  # noqa: E402
from pathlib import Path  # noqa: E402
from statistics import median  # noqa: E402

from mfu_jax.formatting import columns  # noqa: E402
from mfu_jax.profiling.advice import Advice  # noqa: E402
from mfu_jax.profiling.profile import read_profile  # noqa: E402
from scripts.faults.planted import FAULTS, Fault, Loop  # noqa: E402

_WITHIN = 0.2
_PEAK = 0.1  # TFLOP/s: no rule that CPUs feel depends on it closely


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", help="names of faults, joined by commas")
    parser.add_argument("--pairs", type=int, default=7, help="alternating runs without a trace")
    parser.add_argument("--steps", type=int, default=8, help="of each run")
    arguments = parser.parse_args(argv)
    chosen = arguments.only.split(",") if arguments.only else list(FAULTS)
    rows = [("fault", "step", "advice", "gain", "measured", "off", "others")]
    is_right = True
    for name in chosen:
        row, right = _row(name, FAULTS[name], arguments.pairs, arguments.steps)
        rows.append(row)
        is_right &= right
        print("  ".join(row), file=sys.stderr, flush=True)
    print("\n".join(columns(rows, "<><>>><")))
    return 0 if is_right else 1


def _row(name: str, fault: Fault, pairs: int, steps: int) -> tuple[tuple[str, ...], bool]:
    loop, healthy = fault.loop(), fault.healthy()
    times, found = _measured(loop, healthy, pairs, steps)
    step = median(slow for slow, _ in times)
    brought = median(slow - fast * fault.share for slow, fast in times)
    advice = _median(found)
    first = advice[0] if advice else Advice(cause="none", evidence="", gain_seconds=0.0)
    others = ", ".join(f"{a.cause} {_ms(a.gain_seconds)}" for a in advice[1:])
    if not fault.cause:
        return (name, _ms(step), first.cause, "", "", "", others), not advice
    off = first.gain_seconds / brought - 1 if brought else 0.0
    row = (
        name,
        _ms(step),
        first.cause,
        _ms(first.gain_seconds),
        _ms(brought),
        f"{off:+.0%}",
        others,
    )
    return row, first.cause == fault.cause and abs(off) <= _WITHIN


def _measured(
    loop: Loop, healthy: Loop, pairs: int, steps: int
) -> tuple[list[tuple[float, float]], list[tuple[Advice, ...]]]:
    """Step times with the fault and without, pair by pair, and what a trace beside each says."""
    times, advice = [], []
    for one in (loop, healthy):
        one.run(steps)  # compiled, caches warm
    for _ in range(pairs):
        times.append((loop.run(steps) / steps, healthy.run(steps) / steps))
        advice.append(_advice(loop, steps))
    return times, advice


def _median(found: list[tuple[Advice, ...]]) -> tuple[Advice, ...]:
    """Advice that most traces give, with its median gain, the largest first."""
    gains: dict[str, list[float]] = {}
    for advice in found:
        for one in advice:
            gains.setdefault(one.cause, []).append(one.gain_seconds)
    usual = [
        Advice(cause=cause, evidence="", gain_seconds=median(seconds))
        for cause, seconds in gains.items()
        if 2 * len(seconds) > len(found)
    ]
    return tuple(sorted(usual, key=lambda advice: -advice.gain_seconds))


def _advice(loop: Loop, steps: int) -> tuple[Advice, ...]:
    with tempfile.TemporaryDirectory() as folder:
        loop.trace(Path(folder), steps)
        return read_profile(folder, peak_tflops_per_device=_PEAK).advice


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.1f} ms"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
