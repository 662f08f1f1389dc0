"""Files of a loop that went back, resumed: of each step its last record, and none that was lost."""

import csv
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mfu_jax.sinks import CsvSink, JsonlSink, StepRecord, TensorBoardSink

Points = list[tuple[int, float]]

# Steps of the three passes of a loop that goes back twice.
PASSES = (range(12), range(3, 15), range(11, 13))


def in_json(path: Path) -> Points:
    lines = map(json.loads, path.read_text().splitlines())
    return [(line["step"], line["loss"]) for line in lines]


def in_table(path: Path) -> Points:
    with open(path, newline="") as file:
        return [(int(row["step"]), float(row["loss"])) for row in csv.DictReader(file)]


def in_events(folder: Path) -> Points:
    name = "tensorboard.backend.event_processing.event_accumulator"
    events = pytest.importorskip(name).EventAccumulator(str(folder), size_guidance={"scalars": 0})
    events.Reload()
    return [(event.step, event.value) for event in events.Scalars("loss")]


@pytest.mark.parametrize(
    ("sink_class", "read"),
    [(JsonlSink, in_json), (CsvSink, in_table), (TensorBoardSink, in_events)],
)
@pytest.mark.parametrize(
    ("start", "passes"),  # the pass that each step before `start` is from
    [
        (13, [0] * 3 + [1] * 8 + [2] * 2),
        (12, [0] * 3 + [1] * 8 + [2]),
        (8, [0] * 3 + [1] * 5),
        (2, [0] * 2),
    ],
)
def test_a_resume_keeps_the_last_pass_of_each_step(
    tmp_path: Path,
    sink_class: Callable[..., Any],
    read: Callable[[Path], Points],
    start: int,
    passes: list[int],
) -> None:
    path = tmp_path / "metrics"
    sink = sink_class(path)
    sink.write_setup({"a": 1}, {})  # of step 0, to which no pass goes back
    for number, steps in enumerate(PASSES):
        for step in steps:
            sink.write(StepRecord(step=step, unix_seconds=1.0, scalars={"loss": float(number)}))
    sink.close()
    sink = sink_class(path, resume_from_step=start)
    sink.close()
    assert read(path) == list(enumerate(passes))
    assert list(sink.missing) == []


@pytest.mark.parametrize("start", [5, 20])
def test_a_loop_that_began_anew_keeps_the_texts_before_it(tmp_path: Path, start: int) -> None:
    name = "tensorboard.backend.event_processing.plugin_event_accumulator"
    reader = pytest.importorskip(name).EventAccumulator(str(tmp_path))
    sink = TensorBoardSink(tmp_path)
    sink.write_text("setup/ledger", "of step 0")
    for number in (1, 2):
        for step in range(10):
            sink.write(StepRecord(step=step, unix_seconds=1.0, scalars={"loss": float(number)}))
    sink.close()
    TensorBoardSink(tmp_path, resume_from_step=start).close()
    assert in_events(tmp_path) == [(step, 2.0) for step in range(min(start, 10))]
    reader.Reload()
    (event,) = reader.Tensors("setup/ledger/text_summary")
    assert event.tensor_proto.string_val == [b"of step 0"]
