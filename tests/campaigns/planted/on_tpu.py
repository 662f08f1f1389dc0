"""Plants faults in the reference trainer's step for a TPU that is not attached; asks for advice.

    python -m tests.campaigns.planted.on_tpu [--only chain,remat] [--topology v6e:2x4]
        [--programs FOLDER] [--write]

Each step is compiled for one chip with and without the fault. A trace of the faulty step is built
in which every op takes the time of a plan, `mfu-jax profile` reads that trace, and its first advice
is compared with the difference between the two plans, which know nothing of the rules. The exit
code is 1 if a fault is not named first, its gain is off by more than 20%, or a healthy step gets
advice. Needs libtpu: ``pip install 'jax[tpu]'``.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from mfu_jax.dumps.files import load, write
from mfu_jax.dumps.program import ProgramDump
from mfu_jax.planning.compilation.scheduled_text import dump_flags, is_scheduled, read_scheduled
from mfu_jax.planning.targets import Target, parse_target
from mfu_jax.trainer.config import pyconfig
from mfu_jax.trainer.run.run_logger import model_of
from mfu_jax.util.child_process import run_logged
from tests.campaigns.planted.judging import Judged, add_arguments, judge, verdict
from tests.campaigns.planted.scheduled_trace import Schedule, write_scheduled
from tests.campaigns.planted.step_faults import FAULTS, Side
from tests.support.absent_devices import TPU_ENVIRONMENT

_WHAT = "faults in the step on an absent TPU v6e"
_COMPILE_SECONDS = 600.0
_HEAD = ("fault", "step", "advice", "gain", "scheduled", "off", "others")


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    add_arguments(parser)
    parser.add_argument("--topology", default="v6e:2x4", help="whose first chip it is")
    parser.add_argument("--programs", type=Path, help="keeps compiled programs, and takes them")
    parser.add_argument("--compile", help=argparse.SUPPRESS)
    arguments = parser.parse_args(argv)
    if arguments.compile:
        _compile(_side(arguments.compile), arguments.topology)
        return 0
    names = arguments.only.split(",") if arguments.only else list(FAULTS)
    with tempfile.TemporaryDirectory() as folder:
        programs = arguments.programs or Path(folder, "programs")
        programs.mkdir(parents=True, exist_ok=True)
        rows = []
        for number, name in enumerate(names):
            row = _row(name, arguments.topology, programs, Path(folder, str(number)))
            print("  ".join(row.cells), file=sys.stderr, flush=True)
            rows.append(row)
    return verdict(_WHAT, _HEAD, rows, is_written=arguments.write)


def _side(name: str) -> Side:
    fault, _, side = name.rpartition(".")
    return getattr(FAULTS[fault], side) if fault else Side()


def _compile(side: Side, topology: str) -> None:
    """Compiles in a separate process, because libtpu must be used by one process alone."""
    from mfu_jax.trainer.planned.planned_step import lower
    from tests.support.absent_devices import devices

    with side.plant():
        lower(side.words, devices("tpu", topology)[:1]).compile()


def _program(name: str, topology: str, programs: Path) -> Path:
    """One side's compiled program, such as ``chain.faulty``; most faults share the healthy one."""
    name = "healthy" if _side(name) == Side() else name
    path = programs / f"{topology} {name}.mfu"
    if not path.exists():
        model = model_of(pyconfig.load(_side(name).words))
        write(dataclasses.replace(_scheduled_program(name, topology), model=model), path)
    return path


def _scheduled_program(name: str, topology: str) -> ProgramDump:
    """A program as a plan has it: its compiler is stopped once it is scheduled."""
    command = [sys.executable, "-m", "tests.campaigns.planted.on_tpu", "--topology", topology]
    with tempfile.TemporaryDirectory() as folder:
        dumps, log = Path(folder, "xla"), Path(folder, "log")
        own = {"ALLOW_MULTIPLE_LIBTPU_LOAD": "1", "XLA_FLAGS": dump_flags(dumps)}
        environment = {**os.environ, **TPU_ENVIRONMENT, **own}
        run_logged(
            [*command, "--compile", name],
            environment,
            log,
            _COMPILE_SECONDS,
            is_over=lambda: is_scheduled(dumps),
        )
        if program := read_scheduled(dumps):
            return program
        raise RuntimeError(f"{name} was not scheduled: {log.read_text()}")


def _row(name: str, topology: str, programs: Path, folder: Path) -> Judged:
    from mfu_jax.profiling.profile import read_profile

    fault, target = FAULTS[name], parse_target(topology=topology)
    step = write_scheduled(folder, load(_program(f"{name}.faulty", topology, programs)), target)
    advice = read_profile(folder).advice
    brought = None
    if fault.cause:
        brought = step - fault.share * _scheduled(name, topology, programs, target)
    return judge(name, fault.cause, advice, step=step, brought=brought)


def _scheduled(name: str, topology: str, programs: Path, target: Target) -> float:
    return Schedule(load(_program(f"{name}.healthy", topology, programs)), target).seconds


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
