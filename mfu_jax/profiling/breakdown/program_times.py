"""One waterfall per program of a step, such as the rollout and the update of an RL loop."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from mfu_jax.hardware.step_peaks import StepPeaks
from mfu_jax.names import MFU
from mfu_jax.profiling.attribution.step_times import MeasuredStep
from mfu_jax.profiling.breakdown.waterfall import Bar, waterfall
from mfu_jax.profiling.timeline.devices import Program
from mfu_jax.util.formatting import seconds_text, short

if TYPE_CHECKING:
    from mfu_jax.profiling.join.programs import KnownProgram

_NOTABLE = 0.01  # of the step time


@dataclass(frozen=True, kw_only=True)
class ProgramTime:
    """One program, per step and device.

    Attributes:
        name: its module's name.
        executions: number of executions per step.
        seconds: per step: its ops, and idle time within its executions.
        convention: the convention of its model FLOPs.
        waterfall: sums to `seconds`; its points are percentages of the program's own time.
    """

    name: str
    executions: float
    seconds: float
    convention: str
    waterfall: tuple[Bar, ...]

    def __str__(self) -> str:
        runs = f"{self.executions:g} execution{'s' * (self.executions != 1)}"
        return f"{short(self.name)}: {seconds_text(self.seconds)} of a step in {runs}"

    @property
    def mfu(self) -> float:
        """Model FLOPs over what the peak allows in `seconds`."""
        return next(bar.mfu_points for bar in self.waterfall if bar.name == MFU) / 100


def program_times(
    measured: MeasuredStep, known: Mapping[Program, KnownProgram], peaks: StepPeaks
) -> tuple[ProgramTime, ...]:
    """The programs that take at least 1% of a step, longest first.

    Args:
        measured: the times of a step.
        known: the programs that ran.
        peaks: of one device.
    """
    found = []
    for program in measured.executions:
        is_version = program in measured.versions and program != measured.main
        if program not in known or is_version:
            continue
        alone = _alone(measured, program)
        if alone.step_seconds >= _NOTABLE * measured.step_seconds:
            source = known[program]
            found.append(
                ProgramTime(
                    name=program.module,
                    executions=sum(alone.executions.values()),
                    seconds=alone.step_seconds,
                    convention=source.ledger.convention,
                    waterfall=waterfall(alone, known, source, peaks),
                )
            )
    return tuple(sorted(found, key=lambda program: -program.seconds))


def _alone(measured: MeasuredStep, program: Program) -> MeasuredStep:
    """The same step, as if only one program, in all its versions, were in it."""
    versions = measured.versions if program == measured.main else frozenset({program})
    ops = tuple(
        op
        for op in measured.ops
        if op.op.name.program in versions
        or (not op.op.name.program.module and op.op.module == program.module)
    )
    idle = sum(measured.idle_within.get(version, 0.0) for version in versions)
    return dataclasses.replace(
        measured,
        main=program,
        versions=versions,
        step_seconds=sum(op.seconds for op in ops) + idle,
        ops=ops,
        idle={"within the program": idle},
        idle_causes={},
        executions={p: n for p, n in measured.executions.items() if p in versions},
    )
