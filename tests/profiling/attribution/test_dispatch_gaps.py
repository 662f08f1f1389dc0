"""Which idle time the host is the cause of, on timelines written by hand; the unit is arbitrary."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest

from mfu_jax.profiling.attribution.dispatch_gaps import DispatchGaps, Intervals
from mfu_jax.profiling.timeline.devices import Executions, Program
from mfu_jax.profiling.timeline.host import HostThread
from mfu_jax.profiling.timeline.time_attribution import NO_PARENT, attribute_time

STEP, EVALUATION = Program("jit_step", 1), Program("jit_evaluate", 2)
NONE = np.zeros(0, np.int64)


def late(
    waits: Intervals, calls_of_python: npt.NDArray[np.int64] = NONE, *, more: int = 0
) -> float:
    """Idle time because of late calls: `gaps`."""
    return gaps(waits, calls_of_python, more=more).idle


def gaps(
    waits: Intervals,
    calls_of_python: npt.NDArray[np.int64] = NONE,
    *,
    more: int = 0,
    copies: Intervals = (NONE, NONE),
    transfers: Intervals = (NONE, NONE),
) -> DispatchGaps:
    """Two steps, and an evaluation between them that begins 5 after the first one.

    The device is idle from 10 to 15 and from 25 to 33; the second step is called at 31.

    Args:
        waits: of the host for the device.
        calls_of_python: when the host calls a Python function.
        more: calls of the step after these, whose executions are not in the trace.
        copies: of the host's arrays to the device.
        transfers: of the host's arrays, by its threads.
    """
    starts, ends = np.array([0, 15, 33]), np.array([10, 25, 43])
    executions = Executions(programs=(STEP, EVALUATION, STEP), starts=starts, ends=ends)
    parents, classes = np.full(3, NO_PARENT), np.zeros(3, np.int64)
    calls = np.array([-3, 30, *range(40, 40 + more)])
    thread = HostThread(
        step_numbers=np.arange(len(calls)),
        step_starts=calls,
        step_ends=calls + 1,
        names=("$loop.py:1 f",),
        ops=np.zeros(len(calls_of_python), np.int64),
        starts=calls_of_python,
        ends=calls_of_python,
    )
    division = attribute_time(starts, ends, classes, parents, 0, 33)
    steps = executions.of({STEP})
    return DispatchGaps(thread, waits, executions, steps, division, copies, transfers)


def test_idle_time_until_the_next_call_is_late() -> None:
    assert late((NONE, NONE)) == (15 - 10) + (31 - 25)


def test_calls_whose_executions_are_not_in_the_trace_are_left_out() -> None:
    assert late((NONE, NONE), more=3) == (15 - 10) + (31 - 25)


def test_recording_pythons_calls_delays_the_next_one_in_a_trace_only() -> None:
    """Each takes 1, the time between them; what was called before a wait ended delays nothing."""
    calls = np.array([5, 25, 26, 27])
    assert late((NONE, NONE), calls) == (15 - 10) + (31 - 25) - 4
    assert late((np.array([4]), np.array([25])), calls) == (31 - 25) - 3


def test_a_program_that_the_host_waits_for_was_called_in_time() -> None:
    assert late((np.array([4]), np.array([26]))) == 31 - 25


def test_a_wait_that_ends_before_the_program_begins_was_for_the_step() -> None:
    assert late((np.array([4, 20]), np.array([11, 26]))) == (15 - 10) + (31 - 25)


def test_a_wait_seen_to_end_just_before_its_step_lasts_until_the_next_call() -> None:
    """A second step that ends at 2000; the third is called at 3000."""
    starts, ends = np.array([0, 1000, 3000]), np.array([1000, 2000, 4000])
    executions = Executions(programs=(STEP,) * 3, starts=starts, ends=ends)
    calls = np.array([0, 900, 3000])
    thread = HostThread(
        step_numbers=np.arange(3),
        step_starts=calls,
        step_ends=calls,
        names=(),
        ops=NONE,
        starts=NONE,
        ends=NONE,
    )
    division = attribute_time(starts, ends, np.zeros(3, np.int64), np.full(3, NO_PARENT), 0, 4000)
    none = NONE, NONE
    steps = executions.of({STEP})
    calls_late = DispatchGaps(thread, none, executions, steps, division, none, none)
    ends_of_waits = np.array([1500, 1995, 2000, 2001, 3500])
    assert calls_late.next_step(ends_of_waits).tolist() == [1500, 3000, 3000, 3000, 3500]


def transferring(begins: list[int], ends: list[int], copies: tuple[list[int], list[int]]) -> float:
    found = gaps((NONE, NONE), copies=(np.array(copies[0]), np.array(copies[1])))
    return float(found.transferring(np.array(begins), np.array(ends)).sum())


def test_a_step_that_is_called_is_late_until_its_arguments_are_copied() -> None:
    assert gaps((NONE, NONE)).idle == 5 + 6
    assert gaps((NONE, NONE), copies=(np.array([29]), np.array([32]))).idle == 5 + 7
    assert gaps((NONE, NONE), copies=(np.array([34]), np.array([36]))).idle == 5 + 6


def test_from_the_begin_of_a_transfer_to_the_end_of_its_copy_the_step_waits_for_it() -> None:
    assert transferring([26], [27], ([29], [32])) == 6
    assert transferring([22], [23], ([29], [32])) == 7  # while the device was at work until 25
    assert transferring([26, 28], [27, 29], ([29, 30], [30, 32])) == 1 + 4
    assert transferring([], [], ([29], [32])) == 3  # another thread's


def test_a_copy_is_not_that_of_an_array_handed_over_for_an_earlier_step() -> None:
    assert transferring([-3], [-2], ([29], [32])) == 3


@pytest.mark.parametrize(
    ("begin", "end", "idle"),
    [
        (27, 32, 5),  # the step is called at 31, and waits for its array until 32
        (20, 32, 7),  # the device was at work until 25
        (27, 30, 0),  # over before the call: an array of a later step, prefetched
        (27, 40, 0),  # the step began at 33, so it was not its array
    ],
)
def test_a_step_waits_for_a_transfer_that_ends_between_its_call_and_its_begin(
    begin: int, end: int, idle: float
) -> None:
    found = gaps((NONE, NONE), transfers=(np.array([begin]), np.array([end])))
    assert float(found.transferring(NONE, NONE).sum()) == idle
    assert found.idle == 5 + (7 if idle else 6)
