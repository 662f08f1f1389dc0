"""MFU against the run's best, and losses against the last ones."""

import math
import random
from collections.abc import Iterable

import pytest

from mfu_jax.logger.health.outliers import DriftWatch, LossSpikeWatch
from mfu_jax.logger.run_log.monitor import Monitor
from mfu_jax.logger.timing.timed_step import TimedStep
from mfu_jax.sinks import StepRecord


def notes(monitor: Monitor, name: str, values: Iterable[float]) -> list[tuple[int, str]]:
    """What is said of a metric's values, step by step."""
    records = (
        StepRecord(step=step, unix_seconds=0.0, scalars={name: value})
        for step, value in enumerate(values)
    )
    seen = [monitor.on_record(TimedStep(), record) for record in records]
    return [(record.step, note) for record in seen for note in record.notes]


def mfus(levels: Iterable[float], deviation: float = 0.02, seed: int = 0) -> list[float]:
    """A hundred noisy steps at each level."""
    chooser = random.Random(seed)
    return [level * chooser.lognormvariate(0.0, deviation) for level in levels for _ in range(100)]


def test_two_slow_windows_are_told_once_and_the_recovery_too() -> None:
    levels = [0.45, 0.50, 0.50, 0.42, 0.42, 0.42, 0.50]
    first, second = notes(DriftWatch(), "perf/mfu", mfus(levels))
    assert first[0] == 499
    assert first[1].startswith("the last 100 steps had MFU 4")
    assert "below the MFU 5" in first[1] or "below the MFU 49." in first[1]
    assert second == (699, "the run is as fast as at its best again")


def test_without_flops_the_step_time_tells() -> None:
    times = mfus([1.0, 1.0, 1.25, 1.25])
    ((step, note),) = notes(DriftWatch(), "perf/step_time_seconds", times)
    assert step == 399
    assert "20% below" in note or "19% below" in note or "21% below" in note


@pytest.mark.parametrize("levels", [[0.5, 0.48, 0.47, 0.48], [0.5, 0.4, 0.5, 0.4], [0.3, 0.4, 0.5]])
def test_small_short_or_upward_drifts_are_none(levels: list[float]) -> None:
    assert notes(DriftWatch(), "perf/mfu", mfus(levels)) == []


def test_a_healthy_noisy_run_does_not_drift() -> None:
    for seed in range(40):  # 200 by hand
        deviation = random.Random(seed).choice([0.01, 0.05, 0.2])
        values = mfus([0.5] * 20, deviation, seed)
        assert notes(DriftWatch(), "perf/mfu", values) == [], seed


def training(steps: int, seed: int = 0) -> list[float]:
    """A loss that falls from 11 to about 3, with noise."""
    chooser = random.Random(seed)
    return [3 + 8 * math.exp(-step / 50) + chooser.gauss(0.0, 0.1) for step in range(steps)]


def test_a_spike_is_told_with_its_loss() -> None:
    losses = training(400)
    losses[300] = 9.0
    ((step, note),) = notes(LossSpikeWatch(), "learning/loss", losses)
    assert step == 300
    assert note.startswith("the loss jumped to 9.000; the median of the last 101 steps is 3.0")


def test_the_first_loss_that_is_no_number_is_told_once() -> None:
    losses = [*training(100), math.nan, math.nan, math.inf]
    assert notes(LossSpikeWatch(), "learning/loss", losses) == [
        (100, "the loss is nan, for the first time")
    ]


def test_losses_that_fall_and_fluctuate_do_not_spike() -> None:
    for seed in range(200):  # 1,000 by hand
        assert notes(LossSpikeWatch(), "learning/loss", training(300, seed)) == [], seed
