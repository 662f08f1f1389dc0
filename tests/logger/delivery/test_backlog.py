"""A backlog on disk: what it keeps, and what happens when its own disk fails."""

import json
import math
from pathlib import Path

import pytest

from mfu_jax.logger.delivery.backlog import Backlog
from mfu_jax.logger.delivery.backlog_files import Segment, from_line, last_step, to_line
from mfu_jax.sinks import CsvSink, JsonlSink, StepRecord, TensorBoardSink
from tests.support.work import HANG_SECONDS

MADE_BY = "test", {"path": Path("file")}


def records(*steps: int) -> list[StepRecord]:
    return [StepRecord(step=step, unix_seconds=0.0, scalars={}) for step in steps]


def test_a_line_is_strict_json_and_gives_the_record_back() -> None:
    record = StepRecord(
        step=3,
        kind="warmup",
        unix_seconds=0.1,
        scalars={"a": 0.1, "b": math.inf, "c": 10**20},
        flags=("mfu_over_1",),
        notes=("a\nb",),
        log_period=10,
    )
    line = to_line(record)
    assert line.count(b"\n") == 1
    json.loads(line, parse_constant=lambda name: pytest.fail(name))
    assert from_line(line) == record


def test_a_backlog_whose_disk_fails_keeps_a_bounded_number_in_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mfu_jax.logger.delivery.backlog.WAITING_RECORDS", 3)
    (tmp_path / "backlog").write_text("a file is in its way")
    backlog = Backlog(tmp_path / "backlog", MADE_BY)
    backlog.add(records(*range(10)))
    assert backlog.dropped == 7
    while (rest := backlog.finish_reading()) is None:
        backlog.sync()
    assert [record.step for record in rest] == [7, 8, 9]
    assert backlog.keep(records(1, 2), HANG_SECONDS) == 0


def test_a_torn_line_and_a_removed_file_cost_nothing_else(tmp_path: Path) -> None:
    segment = Segment(tmp_path / "x.jsonl", {"backlog": 1})
    segment.append(records(0, 1))
    with open(segment.path, "ab") as file:
        file.write(b'{"step": 2')
    assert [record.step for record in segment.read(10)] == [0, 1]
    segment.path.unlink()
    assert segment.read(10) == []
    assert segment.is_read
    segment.close()


def test_what_was_read_is_not_kept(tmp_path: Path) -> None:
    backlog = Backlog(tmp_path / "backlog", MADE_BY)
    assert backlog.keep(records(0, 1, 2), HANG_SECONDS) == 3
    (old,) = Backlog(tmp_path / "backlog", MADE_BY, start_step=9).old
    old.advance(len(old.read(2)))
    old.trim()
    (left,) = Backlog(tmp_path / "backlog", MADE_BY, start_step=9).old
    assert left.header()["sink"] == "test"
    assert [record.step for record in left.read(10)] == [2]


@pytest.mark.parametrize("kind", [JsonlSink, CsvSink])
def test_the_last_step_of_a_long_file_is_no_part_of_a_number(
    tmp_path: Path, kind: type[JsonlSink | CsvSink], monkeypatch: pytest.MonkeyPatch
) -> None:
    sink = kind(tmp_path / "metrics")
    for step in range(3):
        scalars = {"a": 0.123456789012, "b": 0.987654321098}
        sink.write(StepRecord(step=step, unix_seconds=0.123456789, scalars=scalars))
    sink.close()
    assert sink.made_by is not None
    for size in range(1, 200):  # every place where the end of the file may begin
        monkeypatch.setattr("mfu_jax.logger.delivery.backlog_files._TAIL_BYTES", size)
        assert last_step(sink.made_by) == 2


def test_the_last_step_in_tensorboard_is_that_of_a_record(tmp_path: Path) -> None:
    sink = TensorBoardSink(tmp_path, resume_from_step=3)
    sink.write_text("setup/ledger", "text of step 3, of which there is no record yet")
    sink.flush()
    assert sink.made_by is not None
    assert last_step(sink.made_by) == -1
    sink.write_many([StepRecord(step=3, unix_seconds=0.0, scalars={"a": 1.0})])
    sink.close()
    assert last_step(sink.made_by) == 3


def test_what_a_later_process_ran_again_counts(tmp_path: Path) -> None:
    first = Backlog(tmp_path / "backlog", MADE_BY)
    assert first.keep(records(*range(5, 10)), HANG_SECONDS) == 5
    second = Backlog(tmp_path / "backlog", MADE_BY, start_step=7)  # and its sink fails as well
    assert second.keep(records(*range(7, 12)), HANG_SECONDS) == 5
    assert second.left == 2 + 5
    third = Backlog(tmp_path / "backlog", MADE_BY, start_step=12)
    assert [record.step for old in third.old for record in old.read(99)] == [*range(5, 12)]


def test_a_killed_process_has_not_tidied_what_it_ran_again(tmp_path: Path) -> None:
    first = Backlog(tmp_path / "backlog", MADE_BY)
    first.keep(records(*range(5, 10)), HANG_SECONDS)
    second = Backlog(tmp_path / "backlog", MADE_BY, start_step=7)
    second.overflow.append(records(*range(7, 12)))
    second.overflow.close()
    third = Backlog(tmp_path / "backlog", MADE_BY, start_step=12)
    assert [record.step for old in third.old for record in old.read(99)] == [*range(5, 12)]
