"""Which program is the step's, and which steps of a trace are measured."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from mfu_jax.errors import UserError
from mfu_jax.profiling.join.ops import Join
from mfu_jax.profiling.timeline.devices import DeviceTimeline, Executions, Program
from mfu_jax.profiling.timeline.host import HostThread
from mfu_jax.profiling.timeline.time_attribution import FloatArray
from mfu_jax.profiling.trace.wire import IntArray

_PICOSECONDS = 1e12


def no_steps() -> UserError:
    """The error for a trace without a whole step."""
    return UserError(
        "the trace has ops but no whole steps",
        hint="usually it was cut short, or another tool wrote it; trace again with mfu_jax.profile",
    )


class Window(NamedTuple):
    """The measured steps of one device.

    Attributes:
        bounds: the start of each step, and the end of the last one, picoseconds.
    """

    bounds: IntArray

    @property
    def begin(self) -> int:
        """Start of the first step, picoseconds."""
        return int(self.bounds[0])

    @property
    def end(self) -> int:
        """End of the last step, picoseconds."""
        return int(self.bounds[-1])

    @property
    def steps(self) -> int:
        """Number of steps."""
        return len(self.bounds) - 1


def main_program(timelines: Sequence[DeviceTimeline], join: Join) -> Program:
    """The program whose executions take the most time, among those that the user asked for.

    Those have a dump beside the trace: an evaluation in the loop may take longer than the step.
    """
    seconds: Counter[Program] = Counter()
    for timeline in timelines:
        runs = timeline.executions
        for program, length in zip(runs.programs, (runs.ends - runs.starts).tolist(), strict=True):
            seconds[program] += length
    if not seconds:
        raise no_steps()
    named = [program for program in seconds if program.module]  # kernels may have no program
    dumped = [program for program in named if join.has_dump(program)]
    return max(dumped or named or seconds, key=lambda program: seconds[program])


def versions_of(
    main: Program, timeline: DeviceTimeline, thread: HostThread | None
) -> frozenset[Program]:
    """The main program, and others of its name if together they make up the marked steps."""
    alone, marked = frozenset({main}), 0 if thread is None else len(thread.step_numbers)
    named = frozenset(p for p in timeline.executions.programs if p.module == main.module)
    if not marked or len(timeline.executions.of(alone).programs) % marked == 0:
        return alone
    return named if len(timeline.executions.of(named).programs) % marked == 0 else alone


def window_of(executions: Executions, thread: HostThread | None) -> Window | None:
    """From the first execution to the last one's start, as what follows the last is not seen."""
    starts, count = executions.starts, len(executions.starts)
    if not count:
        return None
    marked = 0 if thread is None else len(thread.step_numbers)
    a_step = count // marked if marked and count % marked == 0 else 1
    if count < 2 * a_step:
        window = Window(np.append(starts[:1], executions.ends[-1:]))
    else:
        steps = (count - 1) // a_step
        window = Window(starts[: steps * a_step + 1 : a_step])
    return window if window.end > window.begin else None


def step_by_step(starts: IntArray, shares: FloatArray, window: Window) -> tuple[float, ...]:
    """Seconds of each step: the shares of the events that begin in it."""
    steps = np.clip(np.searchsorted(window.bounds, starts, "right") - 1, 0, window.steps - 1)
    return tuple((np.bincount(steps, shares, window.steps) / _PICOSECONDS).tolist())
