"""Hostile metrics: each costs at most itself, and one note."""

import json
import math
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from mfu_jax.logger.records.step_record import as_json
from tests.support.logger_run import Run
from tests.support.sinks import ListSink


def notes(sink: ListSink) -> list[str]:
    return [note for record in sink.records for note in record.notes]


def test_values_that_are_no_numbers_are_left_out_with_one_note_each() -> None:
    def broken() -> float:
        raise RuntimeError("no value today")

    bad: dict[Any, Any] = {
        "text": "0.5",
        "complex": 1j,
        "huge": 10**400,
        "array": jnp.ones((3, 3)),
        "function": broken,
        "object": object(),
    }
    run = Run()
    for step in range(3):
        run.logger.record(step, {"loss": 1.0, **bad}, step_time_seconds=1.0)
    run.logger.close()
    assert run.sink.scalar("learning/loss") == [1.0, 1.0, 1.0]
    assert len(notes(run.sink)) == len(bad)
    for name in bad:
        assert run.sink.scalar(f"learning/{name}") == [None] * 3
        assert sum(f"'learning/{name}' is left out" in note for note in notes(run.sink)) == 1


def test_names_are_text_that_every_file_can_take() -> None:
    run = Run()
    names: dict[Any, float] = {"a\nb": 1.0, "\ud800": 2.0, 3: 3.0, ("x", 1): 4.0, "é": 5.0}
    run.logger.record(0, names, step_time_seconds=1.0)
    with run.logger.pause("e\nval"):
        run.clock.advance(1.0)
    run.logger.close()
    scalars = run.sink.records[0].scalars
    assert {
        "learning/a\\nb": 1.0,
        "learning/\\ud800": 2.0,
        "learning/3": 3.0,
        "learning/('x', 1)": 4.0,
        "learning/é": 5.0,
    }.items() <= scalars.items()
    assert "goodput/e\\nval_seconds" in scalars
    "".join(scalars).encode()


def test_every_scalar_is_a_python_number_and_the_line_is_strict_json() -> None:
    run = Run(tokens_per_device=np.int64(64), abort_on_nan_loss=False)
    metrics = {"loss": np.float32(math.nan), "flag": True, "big": np.float64(1e308)}
    run.logger.record(0, metrics, step_time_seconds=np.float32(0.5))  # type: ignore[arg-type]
    run.logger.record(np.int64(1), {}, step_time_seconds=0.5)  # type: ignore[arg-type]
    run.logger.close()
    for record in run.sink.records:
        assert type(record.step) is int
        assert {type(value) for value in record.scalars.values()} <= {int, float}
        json.dumps(as_json(record), allow_nan=False)


@pytest.mark.parametrize(
    "seconds", [math.nan, math.inf, -1.0, 0, 1e308, "fast", np.float32(-1.0), [0.5]]
)
def test_a_step_time_that_is_none_is_named_once_and_measured_instead(
    seconds: Any, caplog: pytest.LogCaptureFixture
) -> None:
    run = Run()
    for step in range(3):
        run.logger.record(step, run.device.run(2.0), step_time_seconds=seconds)
    summary = run.logger.close()
    assert run.sink.scalar("perf/step_time_seconds") == [2.0, 2.0, 2.0]
    assert (summary.median_seconds, summary.mean_seconds) == (2.0, 2.0)
    (told,) = caplog.messages
    assert told.startswith("step_time_seconds=")
    assert told.endswith("the logger's own measure is used")


def test_a_clock_that_fails_poisons_no_statistics() -> None:
    run = Run()
    run.steps(1.0, 1.0)
    run.clock.now = math.nan
    run.logger.record(2, {"loss": 1.0})
    run.clock.now = 2.0
    run.steps(1.0, 1.0, start=3)
    summary = run.logger.close()
    assert math.isfinite(summary.mean_seconds or math.nan)
    assert all(math.isfinite(spent) for spent in summary.seconds_by_use.values())
    json.dumps(summary.to_json(), allow_nan=False)


def test_a_cost_that_cannot_be_had_costs_the_utilisation_of_its_step() -> None:
    def broken() -> Any:
        raise RuntimeError("no count")

    run = Run()
    for step in range(2):
        run.logger.record(step, {"loss": 1.0}, step_time_seconds=1.0, cost=broken)
    run.logger.close()
    assert run.sink.scalar("learning/loss") == [1.0, 1.0]
    assert notes(run.sink) == ["the cost of the step is not known: no count"]


@pytest.mark.parametrize(("jump", "is_noted"), [(0.009, False), (0.06, True), (-0.06, True)])
def test_only_a_jump_that_matters_is_worth_a_note(jump: float, is_noted: bool) -> None:
    run = Run()
    run.steps(1.0)
    run.clock.wall_offset += jump
    run.steps(1.0, start=1)
    summary = run.logger.close()
    assert run.sink.scalar("perf/step_time_seconds") == [1.0, 1.0]
    assert bool(notes(run.sink)) is is_noted
    assert summary.clock_jumps == 1


def test_a_jump_of_less_than_a_hundredth_of_the_step_is_not_noted() -> None:
    run = Run()
    run.steps(100.0)
    run.clock.wall_offset += 0.9
    run.steps(100.0, start=1)
    run.logger.close()
    assert notes(run.sink) == []


def test_a_step_after_one_that_was_seen_late_is_not_impossible() -> None:
    run = Run(executed_flops_per_device=None)  # 0.4 s at the peak
    times = [0.9, 0.1, 0.3, 0.1, 0.1]
    for step, seconds in enumerate(times):
        run.logger.record(step, {}, step_time_seconds=seconds)
    run.logger.close()
    # 0.9 + 0.1 + 0.3 s are as long as three steps; the 0.1 s after them are not.
    flags = [record.flags for record in run.sink.records]
    assert flags == [(), (), (), ("mfu_over_1",), ("mfu_over_1",)]
    assert sum("was seen to end late" in note for note in notes(run.sink)) == 1
    assert run.logger.summary().flags == {"mfu_over_1": 2}
