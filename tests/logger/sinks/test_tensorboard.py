"""Event files, read back by TensorBoard's own reader."""

import math
from pathlib import Path

import pytest

from mfu_jax.errors import UserError
from mfu_jax.logger.sinks import StepRecord, TensorBoardSink

event_accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")


def read(folder: Path) -> "event_accumulator.EventAccumulator":
    events = event_accumulator.EventAccumulator(str(folder), size_guidance={"scalars": 0})
    events.Reload()
    return events


def scalars(folder: Path, tag: str) -> list[tuple[int, float]]:
    return [(event.step, event.value) for event in read(folder).Scalars(tag)]


def text(folder: Path, tag: str) -> str:
    (event,) = read(folder).Tensors(f"{tag}/text_summary")
    return event.tensor_proto.string_val[0].decode()


def test_every_metric_of_every_step_is_found(tmp_path: Path) -> None:
    sink = TensorBoardSink(tmp_path / "new" / "folder")
    for step in range(50):
        values = {"learning/loss": 0.5 * step, "perf/mfu": 0.25, "learning/total_weights": 2048}
        sink.write(StepRecord(step=step, unix_seconds=100.0 + step, scalars=values))
    folder = tmp_path / "new" / "folder"
    # Not closed and not flushed: a killed process has lost nothing either.
    assert scalars(folder, "learning/loss") == [(step, 0.5 * step) for step in range(50)]
    assert scalars(folder, "perf/mfu") == [(step, 0.25) for step in range(50)]
    assert scalars(folder, "learning/total_weights") == [(step, 2048.0) for step in range(50)]
    assert read(folder).Scalars("learning/loss")[7].wall_time == 107.0
    sink.close()


def test_nan_is_written_as_nan(tmp_path: Path) -> None:
    sink = TensorBoardSink(tmp_path)
    sink.write(StepRecord(step=0, unix_seconds=0.0, scalars={"learning/loss": math.nan}))
    sink.close()
    assert math.isnan(scalars(tmp_path, "learning/loss")[0][1])


def test_a_resumed_run_replaces_the_steps_it_runs_again(tmp_path: Path) -> None:
    for start, value in ((0, 1.0), (4, 2.0)):
        sink = TensorBoardSink(tmp_path, resume_from_step=start)
        for step in range(start, start + 6):
            sink.write(StepRecord(step=step, unix_seconds=0.0, scalars={"learning/loss": value}))
        sink.close()
    expected = [(step, 1.0 if step < 4 else 2.0) for step in range(10)]
    assert scalars(tmp_path, "learning/loss") == expected


def test_set_up_labels_and_notes_are_texts(tmp_path: Path) -> None:
    sink = TensorBoardSink(tmp_path)
    sink.write_setup({"device": "cpu", "peak": 2e12}, {"ledger": "one line"})
    sink.write(
        StepRecord(
            step=3,
            kind="compile",
            unix_seconds=0.0,
            scalars={"perf/mfu": 1.5},
            flags=("mfu_over_1",),
            notes=("a reason",),
        )
    )
    sink.close()
    assert text(tmp_path, "setup/values") == "    device: cpu\n    peak: 2000000000000.0"
    assert text(tmp_path, "setup/ledger") == "one line"
    assert text(tmp_path, "step/kind") == "compile"
    assert text(tmp_path, "step/notes") == "a reason"
    assert scalars(tmp_path, "flags/mfu_over_1") == [(3, 1.0)]
    assert scalars(tmp_path, "perf/mfu") == [(3, 1.5)]


def test_a_folder_that_cannot_be_made_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"tensorboard_dir .* cannot be written"):
        TensorBoardSink(tmp_path / "file")
    with pytest.raises(UserError, match="cannot be reached"):
        TensorBoardSink("nowhere://bucket/run")
