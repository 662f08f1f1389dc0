"""Plants one fault after another in the reference trainer, and asks `mfu-jax profile` for advice.

    python -m tests.campaigns.planted.on_host [--only sync,data] [--pairs 3]
        [--most-pairs 9] [--steps 8] [--platform gpu] [--write]

For each fault, it prints the first advice with its expected gain, the median over all turns, and
the actual gain from removing the fault: the median difference in step time between a run with the
fault and one without. The two alternate in turns of a few steps in one process, untraced, and take
turns at going first; each turn ends with a trace of the faulty run, as the machine's speed changes
from turn to turn. Turns continue until the median is known to 5% (its standard error, from the
spread of the pairs; the advice plays no part), or `--most-pairs` is reached. The exit code is 1 if
a fault is not named first, its gain is off by more than 20%, or a healthy run gets advice. It needs
an otherwise idle machine with two cores; each line says how many pairs it took, and how long.

The C library is set to keep freed array memory, as an accelerator's pool does. By default it
returns large arrays to the system, which clears their pages again: up to a third of a step's CPU
time, and more where steps are called ahead, so that removing a fault seemed to gain less, or lose.

With `--platform gpu`, it runs the faults of the host on this machine's GPU, with a larger model.
Faults that CPUs do not feel (float32, odd vocabulary, an elementwise chain) are in
planted_on_tpu.py and planted_on_gpu.py. Matmuls use one thread each, so that virtual devices share
no core.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean, median
from typing import Any

from mfu_jax.util.formatting import columns
from scripts import results

_WITHIN = 0.2
_KNOWN_TO = 0.05  # relative standard error of the gain from removing a fault
_KEEPS_MEMORY = {  # of glibc's malloc
    "MALLOC_MMAP_MAX_": "0",
    "MALLOC_TRIM_THRESHOLD_": str(10**12),
    "MALLOC_TOP_PAD_": str(2**28),
    "MALLOC_ARENA_MAX": "1",
}
_ON_CPU = "faults planted in the reference trainer on a CPU"
_HEAD = ("fault", "step", "advice", "gain", "measured", "off", "pairs", "took", "others")


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", help="names of faults, joined by commas")
    parser.add_argument("--pairs", type=int, default=3, help="turns of each run, at least")
    parser.add_argument("--most-pairs", type=int, default=9, help="turns of each run, at most")
    parser.add_argument("--steps", type=int, default=8, help="of each turn")
    parser.add_argument("--platform", choices=("cpu", "gpu"), default="cpu")
    parser.add_argument("--write", action="store_true", help="write to scripts/results/")
    parser.add_argument("--child", default="", help=argparse.SUPPRESS)
    arguments = parser.parse_args(argv)
    if arguments.child:
        print(json.dumps(_measured(arguments.child, arguments)))
        return 0
    from tests.campaigns.planted.trainer_faults import FAULTS, HOST_FAULTS

    usual = HOST_FAULTS if arguments.platform == "gpu" else FAULTS
    chosen = arguments.only.split(",") if arguments.only else list(usual)
    rows: list[tuple[str, ...]] = [_HEAD]
    is_right = True
    for name in chosen:
        began = time.monotonic()
        measured = _in_child(name, FAULTS[name].devices, arguments)
        row, right = _row(name, FAULTS[name], measured, time.monotonic() - began)
        rows.append(row)
        is_right &= right
        print("  ".join(row), file=sys.stderr, flush=True)
    print("\n".join(columns(rows, "<><>>>>><")))
    if arguments.write:
        host = "faults of the host on a GPU"
        what = host if arguments.platform == "gpu" else _ON_CPU
        results.write("planted_faults", what, results.named(_HEAD, rows[1:]))
    return 0 if is_right else 1


def _in_child(name: str, devices: int, arguments: argparse.Namespace) -> Any:
    """Runs `_measured` in a separate process with this many devices."""
    flags = f"--xla_force_host_platform_device_count={devices} --xla_cpu_multi_thread_eigen=false"
    on_cpu = {**_KEEPS_MEMORY, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags}
    platform = arguments.platform
    names = ("pairs", "most-pairs", "steps")
    counts = {name: getattr(arguments, name.replace("-", "_")) for name in names}
    options = [word for name, count in counts.items() for word in (f"--{name}", str(count))]
    process = subprocess.run(
        [
            *(sys.executable, "-m", "tests.campaigns.planted.on_host", "--child", name),
            *(*options, "--platform", platform),
        ],
        env={**os.environ, **(on_cpu if platform == "cpu" else {"JAX_PLATFORMS": "cuda,cpu"})},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    return json.loads(process.stdout.splitlines()[-1])


def _measured(name: str, arguments: argparse.Namespace) -> dict[str, Any]:
    """Step times with and without the fault, and advice from a trace, turn by turn."""
    from mfu_jax.profiling.profile import read_profile
    from tests.campaigns.planted.trainer_faults import FAULTS, ON_GPU

    times, found = [], []
    with (
        tempfile.TemporaryDirectory() as folder,
        open(os.devnull, "w") as nowhere,
        contextlib.redirect_stdout(nowhere),
    ):
        keys = ON_GPU if arguments.platform == "gpu" else ()
        faulty, healthy = FAULTS[name].pair(Path(folder), keys)
        steps, share = arguments.steps, FAULTS[name].share
        for turn in range(arguments.most_pairs):
            if turn % 2:  # temporary slowdowns of the machine hit both equally often
                fast = healthy.step_seconds(steps)
                times.append((faulty.step_seconds(steps), fast))
            else:
                times.append((faulty.step_seconds(steps), healthy.step_seconds(steps)))
            advice = read_profile(faulty.trace(steps)).advice
            found.append({one.cause: one.gain_seconds for one in advice})
            is_settled = not FAULTS[name].cause or _is_known(_differences(times, share))
            if turn + 1 >= arguments.pairs and is_settled:
                break
        faulty.close()
        healthy.close()
    return {"times": times, "advice": found}


def _differences(times: Sequence[tuple[float, float]], share: float) -> list[float]:
    """The gain from removing the fault, pair by pair, in seconds per step."""
    return [slow - fast * share for slow, fast in times]


def _is_known(differences: Sequence[float]) -> bool:
    """Whether the standard error of their median is below `_KNOWN_TO` of it."""
    return _standard_error(differences) <= _KNOWN_TO * abs(median(differences))


def _standard_error(differences: Sequence[float]) -> float:
    """The standard error of their median.

    For normal values: 1.253 σ / √n, where σ is 1.253 × the mean deviation from the median.
    """
    middle = median(differences)
    deviation = fmean(abs(difference - middle) for difference in differences)
    return 1.253 * 1.253 * deviation / math.sqrt(len(differences))


def _row(name: str, fault: Any, measured: Any, seconds: float) -> tuple[tuple[str, ...], bool]:
    step = median(slow for slow, _ in measured["times"])
    differences = _differences(measured["times"], fault.share)
    brought, error = median(differences), _standard_error(differences)
    advice = _usual(measured["advice"])
    (first, gain), *others = [*advice, ("none", 0.0)][: max(1, len(advice))]
    pairs, took = str(len(measured["times"])), f"{seconds:.0f} s"
    rest = ", ".join(f"{cause} {_ms(seconds)}" for cause, seconds in others)
    if not fault.cause:
        return (name, _ms(step), first, "", "", "", pairs, took, rest), not advice
    off = gain / brought - 1 if brought else 0.0
    known = f"{_ms(brought)} ± {_ms(error)}"
    row = (name, _ms(step), first, _ms(gain), known, f"{off:+.0%}", pairs, took, rest)
    return row, first == fault.cause and abs(off) <= _WITHIN


def _usual(found: list[dict[str, float]]) -> list[tuple[str, float]]:
    """Advice that most traces give, with its median gain, largest first."""
    gains: dict[str, list[float]] = {}
    for advice in found:
        for cause, seconds in advice.items():
            gains.setdefault(cause, []).append(seconds)
    usual = {cause: median(s) for cause, s in gains.items() if 2 * len(s) > len(found)}
    return sorted(usual.items(), key=lambda cause: -cause[1])


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.1f} ms"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
