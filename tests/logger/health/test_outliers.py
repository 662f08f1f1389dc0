"""Steps that take too long, and what they are blamed on; healthy noise is blamed on nothing."""

import random

import pytest

from mfu_jax.logger.health.outliers import OutlierWatch
from mfu_jax.logger.timing.compile_events import CompileEvent
from mfu_jax.logger.timing.timed_step import LoopTimes, TimedStep
from mfu_jax.sinks import StepRecord


def judge(watch: OutlierWatch, number: int, seconds: float, **fields: object) -> tuple:
    step = TimedStep()
    step.step, step.metrics = number, {}
    step.seconds = seconds
    for name, value in fields.items():
        setattr(step, name, value)
    record = StepRecord(step=number, unix_seconds=0.0, scalars={})
    seen = watch.on_record(step, record)
    return seen.scalars, seen.notes


def after_a_quiet_start(steps: int = 50, **last: object) -> OutlierWatch:
    """A watch that has seen steps of 1 s ± 1%."""
    watch, chooser = OutlierWatch(), random.Random(0)
    for number in range(steps):
        fields = last if number == steps - 1 else {}
        assert judge(watch, number, chooser.gauss(1.0, 0.01), **fields) == ({}, ())
    return watch


LOWERED = CompileEvent(function="eval", stage="lower", seconds=2.0, own_seconds=2.0, thread_id=1)
LOOP = LoopTimes(0.01, 0.0, 0.0, 0.9, 0.0)
CASES = {
    "gc": ({"loop": LOOP._replace(seconds=2.1, gc_seconds=2.0)}, "garbage collector took 2.000 s"),
    "python": ({"loop": LOOP._replace(seconds=2.5)}, "Python between the steps took 2.500 s"),
    "dispatch": (
        {"loop": LOOP._replace(seconds=2.5, call_seconds=2.4)},
        "the call of the step took 2.400 s",
    ),
    "device": ({"loop": LOOP._replace(slack_seconds=2.9)}, "the device took it"),
    "clock": ({"clock_jump_seconds": 3600.0}, "the machine slept, or a clock jumped"),
    "compile": ({"compile_events": [LOWERED]}, "compiling took 2.000 s"),
    "unknown": ({}, "no cause was seen"),
}


@pytest.mark.parametrize("cause", CASES)
def test_the_cause_is_what_took_the_time(cause: str) -> None:
    fields, words = CASES[cause]
    scalars, notes = judge(after_a_quiet_start(), 50, 3.0, **fields)
    assert set(scalars) == {"health/outlier_seconds", f"health/outlier_{cause}_seconds"}
    assert scalars["health/outlier_seconds"] == pytest.approx(2.0, abs=0.02)
    assert notes[0].startswith("the step took 3.000 s, the median is ")
    assert words in notes[0]


def test_a_wait_for_data_counts_though_it_is_no_part_of_the_steps_time() -> None:
    scalars, (note,) = judge(after_a_quiet_start(), 50, 1.0, spans={"data_wait": 5.0})
    assert "health/outlier_data_seconds" in scalars
    assert "the wait for data took 5.000 s" in note


def test_the_steps_after_a_checkpoint_may_be_slow_because_of_it() -> None:
    watch = after_a_quiet_start(spans={"checkpoint": 4.0})
    _, (note,) = judge(watch, 50, 3.0)
    assert "a checkpoint was saved up to 1 step before" in note
    for number in range(51, 60):
        judge(watch, number, 1.0)
    assert "no cause was seen" in judge(watch, 60, 3.0)[1][0]


def test_what_happens_often_is_told_a_few_times() -> None:
    watch, told = after_a_quiet_start(), []
    for number in range(50, 1050):
        told += [number] * len(judge(watch, number, 3.0 if number % 4 == 0 else 1.0)[1])
    assert len(told) == 3 + 2  # the first three, the 10th and the 100th of 250


def test_a_healthy_noisy_run_has_no_outlier() -> None:
    """Steps log-normal around a drifting mean, deviations from 1% to 20%; 1,000 runs by hand."""
    for seed in range(200):
        chooser, watch = random.Random(seed), OutlierWatch()
        deviation = chooser.choice([0.01, 0.05, 0.1, 0.2])
        for number in range(300):
            seconds = (1 + number / 1000) * chooser.lognormvariate(0.0, deviation)
            assert judge(watch, number, seconds) == ({}, ()), (seed, number)


def test_compiled_and_first_steps_are_not_judged() -> None:
    watch = OutlierWatch()
    for number in range(10):
        assert judge(watch, number, 100.0 if number == 5 else 1.0) == ({}, ())
    record = StepRecord(step=60, kind="compile", unix_seconds=0.0, scalars={})
    step = TimedStep()
    step.step, step.metrics = 60, {}
    assert not after_a_quiet_start().on_record(step, record).notes
