"""Plants faults in the reference trainer's step for a TPU that is not attached; asks for advice.

    python -m tests.campaigns.planted.on_tpu [--only chain,remat] [--topology v6e:2x4]
        [--programs FOLDER] [--write]

Each step is compiled for one chip with and without the fault. A trace of the faulty step is built
in which every op takes the time of XLA's schedule, `mfu-jax profile` reads that trace, and
its first advice is compared with the difference between the two schedules. The times are XLA's, not
from our rules. The exit code is 1 if a fault is not named first, its gain is off by more than 20%,
or a healthy step gets advice. Needs libtpu: ``pip install 'jax[tpu]'``.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from mfu_jax.dumps.files import load, write
from mfu_jax.planning.targets import Target, parse_target
from mfu_jax.util.formatting import columns
from scripts import results
from scripts.records.absent_devices import TPU_ENVIRONMENT
from tests.campaigns.planted.scheduled_trace import Schedule, write_scheduled
from tests.campaigns.planted.step_faults import FAULTS, Side

_WITHIN = 0.2
_LEAST = 0.05  # of a step: smaller gains deserve no advice
_WHAT = "faults in the step on an absent TPU v6e"
_HEAD = ("fault", "step", "advice", "gain", "scheduled", "off", "others")


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", help="names of faults, joined by commas")
    parser.add_argument("--topology", default="v6e:2x4", help="whose first chip it is")
    parser.add_argument("--programs", type=Path, help="keeps compiled programs, and takes them")
    parser.add_argument("--compile", nargs=2, help=argparse.SUPPRESS)
    parser.add_argument("--write", action="store_true", help="write to scripts/results/")
    arguments = parser.parse_args(argv)
    if arguments.compile:
        name, path = arguments.compile
        _compile(_side(name), arguments.topology, Path(path))
        return 0
    names = arguments.only.split(",") if arguments.only else list(FAULTS)
    with tempfile.TemporaryDirectory() as folder:
        programs = arguments.programs or Path(folder, "programs")
        programs.mkdir(parents=True, exist_ok=True)
        rows = []
        for number, name in enumerate(names):
            row = _row(name, arguments.topology, programs, Path(folder, str(number)))
            print("  ".join(row[0]), file=sys.stderr, flush=True)
            rows.append(row)
    print("\n".join(columns([_HEAD, *(row for row, _ in rows)], "<><>>><")))
    if arguments.write:
        results.write("planted_faults", _WHAT, results.named(_HEAD, [row for row, _ in rows]))
    return 0 if all(right for _, right in rows) else 1


def _side(name: str) -> Side:
    fault, _, side = name.rpartition(".")
    return getattr(FAULTS[fault], side) if fault else Side()


def _compile(side: Side, topology: str, path: Path) -> None:
    """Compiles in a separate process, because libtpu must be used by one process alone."""
    from mfu_jax.dumps.recording import record
    from mfu_jax.instrumentation.program_analysis import model_flops
    from mfu_jax.trainer.config import pyconfig
    from mfu_jax.trainer.planned.planned_step import lower
    from mfu_jax.trainer.run.run_logger import model_of
    from scripts.records.absent_devices import devices

    with side.plant():
        lowered = lower(side.words, devices("tpu", topology)[:1])
    model = model_flops(model_of(pyconfig.load(side.words)))
    write(record(lowered.compile(), model=model), path)


def _program(name: str, topology: str, programs: Path) -> Path:
    """One side's compiled program, such as ``chain.faulty``; most faults share the healthy one."""
    name = "healthy" if _side(name) == Side() else name
    path = programs / f"{topology} {name}.mfu"
    if not path.exists():
        command = [sys.executable, "-m", "tests.campaigns.planted.on_tpu", "--topology", topology]
        environment = {**os.environ, **TPU_ENVIRONMENT, "ALLOW_MULTIPLE_LIBTPU_LOAD": "1"}
        subprocess.run([*command, "--compile", name, str(path)], env=environment, check=True)
    return path


def _row(name: str, topology: str, programs: Path, folder: Path) -> tuple[tuple[str, ...], bool]:
    from mfu_jax.profiling.profile import read_profile

    fault, target = FAULTS[name], parse_target(topology=topology)
    step = write_scheduled(folder, load(_program(f"{name}.faulty", topology, programs)), target)
    advice = read_profile(folder).advice
    first, gain = (advice[0].cause, advice[0].gain_seconds) if advice else ("none", 0.0)
    others = ", ".join(f"{one.cause} {_ms(one.gain_seconds)}" for one in advice[1:])
    if not fault.cause:
        return (name, _ms(step), first, _ms(gain), "", "", others), not advice
    brought = step - fault.share * _scheduled(name, topology, programs, target)
    off = gain / brought - 1 if brought else 0.0
    is_right = first == fault.cause and abs(off) <= _WITHIN
    if brought < _LEAST * step:
        is_right = fault.cause not in {one.cause for one in advice}
    return (name, _ms(step), first, _ms(gain), _ms(brought), f"{off:+.0%}", others), is_right


def _scheduled(name: str, topology: str, programs: Path, target: Target) -> float:
    return Schedule(load(_program(f"{name}.healthy", topology, programs)), target).seconds


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.1f} ms"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
