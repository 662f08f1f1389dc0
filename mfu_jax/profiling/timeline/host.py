"""The host's side of a trace: the steps marked by a loop, and what its thread did meanwhile."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from mfu_jax.profiling.trace.wire import Integers
from mfu_jax.profiling.trace.xspace import ABSENT, Line, Plane

PLANE = "/host:CPU"
_STEP = "step_num"


@dataclass(frozen=True, kw_only=True)
class HostThread:
    """The thread that calls the steps.

    Attributes:
        step_numbers: numbers of the steps it marked (`jax.profiler.StepTraceAnnotation`).
        step_starts: picoseconds; a mark spans the call, which returns before the device is done.
        step_ends: the same.
        names: table of what else it did.
        ops: each event's index in `names`.
        starts: starts of the events, picoseconds.
        ends: the same.
    """

    step_numbers: Integers
    step_starts: Integers
    step_ends: Integers
    names: tuple[str, ...]
    ops: Integers
    starts: Integers
    ends: Integers


def thread_of(plane: Plane) -> HostThread | None:
    """The thread that marked the most steps; None if none did."""
    if _STEP not in plane.stat_names.values():
        return None
    marked = [(int((_numbers(line) != ABSENT).sum()), line) for line in plane.lines if len(line)]
    most, line = max(marked, key=lambda pair: pair[0], default=(0, None))
    return _thread(line) if most and line is not None else None


def _numbers(line: Line) -> Integers:
    return line.events((_STEP,)).numbers[_STEP]


def _thread(line: Line) -> HostThread:
    events = line.events((_STEP,))
    marked = np.flatnonzero(events.numbers[_STEP] != ABSENT)
    marked = marked[np.argsort(events.starts[marked], kind="stable")]
    kinds, ops = np.unique(events.metadata, return_inverse=True)
    return HostThread(
        step_numbers=events.numbers[_STEP][marked],
        step_starts=events.starts[marked],
        step_ends=events.ends[marked],
        names=tuple(line.plane.about(kind).name for kind in kinds.tolist()),
        ops=ops,
        starts=events.starts,
        ends=events.ends,
    )
