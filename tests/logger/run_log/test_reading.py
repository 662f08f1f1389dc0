"""Records read back from a metrics file: where reading begins, and what a torn file costs."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from mfu_jax.logger.run_log.events import BEHIND, CAUGHT_UP
from mfu_jax.logger.run_log.reading import LoggedRecords, steps_behind
from mfu_jax.logger.run_log.run_log import RunLog
from mfu_jax.sinks import JsonlSink, StepRecord


def records(*steps: int) -> list[StepRecord]:
    scalars = {"learning/loss": math.nan, "a": 0.1}
    return [
        StepRecord(step=step, unix_seconds=float(place), scalars=scalars, notes=("a note",))
        for place, step in enumerate(steps)
    ]


def written(folder: Path, *steps: int) -> Path:
    sink = JsonlSink(folder / "metrics.jsonl")
    for record in records(*steps):
        sink.write(record)
    sink.close()
    return sink.path


@pytest.mark.parametrize(("after", "first"), [(None, 0), (-1, 0), (0, 1), (3, 4), (9, 6)])
def test_reading_begins_after_a_step(tmp_path: Path, after: int | None, first: int) -> None:
    reader = LoggedRecords(written(tmp_path, *range(6)), 1, after=after)
    found = []
    while some := reader.read(2):
        found += [record.step for record in some]
    assert found == [*range(first, 6)]


def test_a_loop_that_went_back_is_read_as_it_was_written(tmp_path: Path) -> None:
    steps = (0, 1, 2, 3, 2, 3, 4)
    path = written(tmp_path, *steps)
    assert [record.step for record in LoggedRecords(path, 1).read(99)] == [*steps]
    for place, record in enumerate(records(*steps)):
        reader = LoggedRecords(path, 1, after=record)  # that one, not its repetition
        assert [found.step for found in reader.read(99)] == [*steps[place + 1 :]]


def test_a_record_that_the_file_skipped_is_no_hole(tmp_path: Path) -> None:
    """The file has 0, 2, 3; the sink got to 1, which the file could not take."""
    path = written(tmp_path, 0, 2, 3)
    after = StepRecord(step=1, unix_seconds=0.5, scalars={})
    assert [record.step for record in LoggedRecords(path, 1, after=after).read(99)] == [2, 3]


def test_records_before_an_error_are_read_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reader = LoggedRecords(written(tmp_path, 0, 1, 2), 1)
    lines = reader._lines

    def torn(offset: int) -> Iterator[tuple[int, dict[str, Any]]]:
        yield next(lines(offset))
        raise OSError("stale file handle")

    with monkeypatch.context() as patch:
        patch.setattr(reader, "_lines", torn)
        with pytest.raises(OSError, match="stale"):
            reader.read(9)
    assert [record.step for record in reader.read(9)] == [0, 1, 2]


def test_what_was_read_is_not_read_again_and_what_comes_later_is(tmp_path: Path) -> None:
    path = written(tmp_path, 0, 1, 2)
    reader = LoggedRecords(path, 1)
    assert [record.step for record in reader.read(2)] == [0, 1]
    assert [record.step for record in reader.read(9)] == [2]
    with open(path, "ab") as file:
        file.write(b'not JSON\n{"step": 3, "unix_seconds": 9.0}\n{"step": 4, "unix_sec')
    assert [record.step for record in reader.read(9)] == [3]
    path.unlink()
    assert reader.read(9) == []


def test_who_was_behind_is_known_until_it_has_caught_up(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    log = RunLog(path)
    log.event(BEHIND, sink="A", step=3)
    log.event(BEHIND, sink="B", step=4)
    log.event(CAUGHT_UP, sink="A")
    log.close()
    assert steps_behind(path, 0) == {"B": 4}
    assert steps_behind(path, 1) == {}
    assert json.loads((tmp_path / "metrics.jsonl.events.0.jsonl").read_text().splitlines()[0])
