"""`mfu-jax replay`: the records that a run could not write get to where they belong."""

import json
import os
import shutil
from pathlib import Path

import pytest
from mfu_jax.logger.delivery.backlog import Backlog, backlogs_of
from mfu_jax.logger.delivery.backlog_files import Segment

from mfu_jax.cli import main
from mfu_jax.sinks import CsvSink, JsonlSink, Sink, StepRecord, TensorBoardSink
from tests.support.work import HANG_SECONDS

event_accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")


def record(step: int) -> StepRecord:
    loss = float("nan") if step == 4 else float(step)
    return StepRecord(step=step, unix_seconds=0.5, scalars={"learning/loss": loss})


def leave(folder: Path, *, written: range, left: range) -> None:
    """A run whose three sinks wrote some steps, and left others in their backlogs."""
    sinks: list[Sink] = [
        JsonlSink(folder / "metrics.jsonl"),
        CsvSink(folder / "metrics.csv"),
        TensorBoardSink(folder / "tensorboard"),
    ]
    for sink, backlog in zip(sinks, backlogs_of(sinks, 0), strict=True):
        for step in written:
            sink.write(record(step))
        sink.close()
        assert isinstance(backlog, Backlog)
        assert backlog.keep([record(step) for step in left], HANG_SECONDS) == len(left)


def lines(folder: Path) -> list[tuple[int, object]]:
    text = (folder / "metrics.jsonl").read_text()
    return [(line["step"], line["learning/loss"]) for line in map(json.loads, text.splitlines())]


@pytest.mark.parametrize("named", ["", "backlog"])
def test_what_a_run_left_is_written_behind_what_it_wrote(
    tmp_path: Path, named: str, capsys: pytest.CaptureFixture[str]
) -> None:
    leave(tmp_path, written=range(3), left=range(2, 6))  # step 2 got there, but nobody knew
    assert main(["replay", str(tmp_path / named)]) == 0
    assert lines(tmp_path) == [(0, 0.0), (1, 1.0), (2, 2.0), (3, 3.0), (4, "NaN"), (5, 5.0)]
    rows = (tmp_path / "metrics.csv").read_text().splitlines()
    assert [row.split(",")[0] for row in rows] == ["step", *"012345"]
    events = event_accumulator.EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert [event.step for event in events.Scalars("learning/loss")][-4:] == [2, 3, 4, 5]
    assert not (tmp_path / "backlog").exists()
    assert "metrics.jsonl: 3 records written\n" in capsys.readouterr().out


def test_a_run_folder_may_have_moved(tmp_path: Path) -> None:
    (tmp_path / "before").mkdir()
    leave(tmp_path / "before", written=range(2), left=range(2, 4))
    shutil.move(tmp_path / "before", tmp_path / "after")
    assert main(["replay", str(tmp_path / "after")]) == 0
    assert [step for step, _ in lines(tmp_path / "after")] == [0, 1, 2, 3]


def test_a_gap_before_later_steps_is_not_filled_out_of_order(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    leave(tmp_path, written=range(5, 8), left=range(2, 4))
    before = lines(tmp_path)
    assert main(["replay", str(tmp_path)]) == 1
    assert lines(tmp_path) == before
    out = capsys.readouterr().out
    assert "metrics.jsonl: 0 records written; 2 stay in" in out
    assert "goes on to step 7 without them" in out
    assert len(list((tmp_path / "backlog").iterdir())) == 2  # TensorBoard takes any order


def test_without_a_backlog_it_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for folder in (tmp_path, tmp_path / "absent"):
        assert main(["replay", str(folder)]) == 2
        assert "holds no backlog" in capsys.readouterr().err
    (tmp_path / "backlog").mkdir()
    (tmp_path / "backlog" / "x.jsonl").write_text('{"step": 1}\n')
    assert main(["replay", str(tmp_path)]) == 2
    assert "does not start with the header of a backlog" in capsys.readouterr().err


@pytest.mark.parametrize("kind", ["fifo", "sparse", "nested", "text"])
def test_another_file_is_refused_in_one_line(
    kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "backlog" / "jsonl.jsonl"
    path.parent.mkdir()
    if kind == "fifo":
        os.mkfifo(path)  # without a writer, whoever opens it waits
    else:
        path.write_bytes(b"[" * 100_000 if kind == "nested" else b"text\n")
    if kind == "sparse":
        os.truncate(path, 2**30)
    assert main(["replay", str(tmp_path)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert str(path) in line


def test_a_replay_that_was_killed_doubles_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    leave(tmp_path, written=range(3), left=range(3, 6))
    with monkeypatch.context() as patch:
        patch.setattr(Segment, "trim", lambda segment: None)  # killed just before that
        assert main(["replay", str(tmp_path)]) == 0
    assert main(["replay", str(tmp_path)]) == 0
    assert [step for step, _ in lines(tmp_path)] == [*range(6)]
    events = event_accumulator.EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert [event.step for event in events.Scalars("learning/loss")] == [*range(6)]


def test_a_folder_of_metrics_without_a_backlog_is_not_called_a_broken_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step": 0}\n')
    assert main(["replay", str(tmp_path)]) == 2
    assert "holds no backlog" in capsys.readouterr().err
