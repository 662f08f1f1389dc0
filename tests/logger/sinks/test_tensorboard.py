"""Event files, read back by TensorBoard's own reader."""

import errno
import io
import math
import shutil
from pathlib import Path
from typing import Any

import pytest

from mfu_jax.errors import UserError
from mfu_jax.logger.records.step_record import RecordError
from mfu_jax.logger.sinks.tensorboard import as_markdown, values_as_markdown
from mfu_jax.sinks import StepRecord, TensorBoardSink

event_file_loader = pytest.importorskip("tensorboard.backend.event_processing.event_file_loader")
event_accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
plugin_event_accumulator = pytest.importorskip(
    "tensorboard.backend.event_processing.plugin_event_accumulator"
)


def read(folder: Path) -> "event_accumulator.EventAccumulator":
    events = event_accumulator.EventAccumulator(str(folder), size_guidance={"scalars": 0})
    events.Reload()
    return events


def shown(folder: Path, tag: str) -> list[Any]:
    """What TensorBoard shows under a tag: texts, numbers and layouts are all tensors there."""
    events = plugin_event_accumulator.EventAccumulator(
        str(folder), tensor_size_guidance={"scalars": 0}
    )
    events.Reload()
    return list(events.Tensors(tag))


def scalars(folder: Path, tag: str) -> list[tuple[int, float]]:
    """What TensorBoard shows, and what its reader for scripts finds: the same."""
    points = [(event.step, event.tensor_proto.float_val[0]) for event in shown(folder, tag)]
    found = [(event.step, event.value) for event in read(folder).Scalars(tag)]
    assert repr(points) == repr(found)  # NaN, too
    return found


def text(folder: Path, tag: str) -> str:
    (event,) = shown(folder, f"{tag}/text_summary")
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
    table = "| name | value |\n|---|---|\n| device | cpu |\n| peak | 2000000000000.0 |"
    assert text(tmp_path, "setup/values") == table
    assert text(tmp_path, "setup/ledger") == "one line"
    assert text(tmp_path, "step/kind") == "compile"
    assert text(tmp_path, "step/notes") == "a reason"
    assert scalars(tmp_path, "flags/mfu_over_1") == [(3, 1.0)]
    assert scalars(tmp_path, "perf/mfu") == [(3, 1.5)]


def test_a_path_that_is_no_utf_8_is_shown_escaped(tmp_path: Path) -> None:
    sink = TensorBoardSink(tmp_path)
    sink.write_text("summary", "mfu-jax report runs/\udcff")
    sink.close()
    assert text(tmp_path, "summary") == r"mfu-jax report runs/\udcff"


def test_a_folder_that_cannot_be_made_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"(?s)tensorboard_dir .* cannot be written"):
        TensorBoardSink(tmp_path / "file")
    with pytest.raises(UserError, match="cannot be reached"):
        TensorBoardSink("nowhere://bucket/run")


def test_a_run_killed_before_its_first_checkpoint_leaves_no_point_twice(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    killed = TensorBoardSink(tmp_path)
    write(killed, range(14), 1.0)
    with open(killed.path, "ab") as file:
        file.write(b"torn")
    again = TensorBoardSink(tmp_path)
    write(again, range(20), 2.0)
    again.close()
    assert scalars(tmp_path, "learning/loss") == [(step, 2.0) for step in range(20)]
    assert scalars(tmp_path / "previous1", "learning/loss") == [(step, 1.0) for step in range(14)]
    assert any(f"is now {tmp_path / 'previous1'}" in warning for warning in caplog.messages)
    killed._file.close()


def test_a_resume_leaves_the_files_of_other_writers(tmp_path: Path) -> None:
    theirs = tmp_path / "events.out.tfevents.1.theirs"
    first = TensorBoardSink(tmp_path)
    write(first, range(10), 1.0)
    first.close()
    theirs.write_bytes(first.path.read_bytes())
    second = TensorBoardSink(tmp_path, resume_from_step=4)
    write(second, range(4, 6), 2.0)
    second.close()
    expected = [(s, 1.0) for s in range(10)]
    assert scalars_of_file(theirs) == expected
    third = TensorBoardSink(tmp_path)
    third.close()
    assert scalars_of_file(theirs) == expected


def test_a_run_resumed_twice_has_each_step_as_last_written(tmp_path: Path) -> None:
    for start, stop in ((0, 10), (4, 8), (6, 12)):
        sink = TensorBoardSink(tmp_path, resume_from_step=start)
        sink.write_setup({"start": start}, {})
        write(sink, range(start, stop), float(start))
        sink.close()
    expected = [(s, 0.0) for s in range(4)] + [(s, 4.0) for s in (4, 5)]
    expected += [(s, 6.0) for s in range(6, 12)]
    assert scalars(tmp_path, "learning/loss") == expected
    assert [event.step for event in shown(tmp_path, "setup/values/text_summary")] == [0, 4, 6]


def test_a_resume_that_ended_before_its_first_step_has_dropped_what_it_would_repeat(
    tmp_path: Path,
) -> None:
    first = TensorBoardSink(tmp_path)
    write(first, range(10), 1.0)
    first.close()
    TensorBoardSink(tmp_path, resume_from_step=4).close()
    assert scalars(tmp_path, "learning/loss") == [(step, 1.0) for step in range(4)]


def test_a_run_may_resume_where_the_clock_is_slow(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """TensorBoard reads the files of a folder in the order of their names, which have a time."""
    for start, now in ((0, 2e9), (4, 1e9), (7, 1.5e9)):
        monkeypatch.setattr("time.time_ns", lambda now=now: int(now * 1e9))
        sink = TensorBoardSink(tmp_path, resume_from_step=start)
        write(sink, range(start, start + 6), float(start))
        sink.close()
    expected = [(s, 0.0) for s in range(4)] + [(s, 4.0) for s in range(4, 7)]
    assert scalars(tmp_path, "learning/loss") == expected + [(s, 7.0) for s in range(7, 13)]


@pytest.mark.parametrize("is_batch", [False, True])
def test_where_the_loop_goes_back_each_step_is_shown_as_last_written_beside_the_set_up(
    tmp_path: Path, is_batch: bool
) -> None:
    sink = TensorBoardSink(tmp_path)
    sink.write_setup(SETUP, {"config": CONFIG})
    write(sink, range(3), 0.0)
    sink.write_text("ledger/step", "known after the first steps")
    sink.write_text("failure", "of step 2, which comes again")
    for value, steps in ((1.0, range(5)), (2.0, range(3, 6))):
        if is_batch:
            sink.write_many([record(step, value) for step in steps])
        else:
            write(sink, steps, value)
    sink.close()
    expected = [(s, 1.0) for s in range(3)] + [(s, 2.0) for s in range(3, 6)]
    assert scalars(tmp_path, "learning/loss") == expected
    assert text(tmp_path, "ledger/step") == "known after the first steps"
    assert "8 × TPU v5e" in text(tmp_path, "setup/values")
    assert "0.003" in text(tmp_path, "setup/config")
    assert shown(tmp_path, "failure/text_summary") == []


@pytest.mark.full
def test_tensorboards_fast_reader_shows_the_same(tmp_path: Path) -> None:
    """The data server, a process that `tensorboard` starts, decides by steps alone."""
    server_ingester = pytest.importorskip("tensorboard.data.server_ingester")
    pytest.importorskip("tensorboard_data_server")
    context = pytest.importorskip("tensorboard.context").RequestContext()
    for start in (0, 4):
        sink = TensorBoardSink(tmp_path / "run", resume_from_step=start)
        write(sink, range(start, start + 6), float(start))
        write(sink, range(start + 3, start + 6), start + 1.0)  # the loop went back
        sink.close()
    ingester = server_ingester.SubprocessServerDataIngester(
        server_binary=server_ingester.get_server_binary(),
        logdir=str(tmp_path),
        reload_interval=0,
        channel_creds_type=pytest.importorskip("tensorboard.data.grpc_util").ChannelCredsType.LOCAL,
    )
    ingester.start()
    found = ingester.data_provider.read_scalars(
        context, experiment_id="", plugin_name="scalars", downsample=100
    )
    values = [0.0] * 3 + [1.0] + [4.0] * 3 + [5.0] * 3
    points = [(point.step, point.value) for point in found["run"]["learning/loss"]]
    assert points == list(enumerate(values)) == scalars(tmp_path / "run", "learning/loss")


def test_a_disk_that_was_full_for_a_while_leaves_no_torn_and_no_double_event(
    tmp_path: Path,
) -> None:
    sink = TensorBoardSink(tmp_path)
    full = FullDisk(sink._file._file)
    sink._file._file = full  # type: ignore[assignment]
    for step in range(0, 40, 2):
        full.free_bytes = 3 * step  # a torn head, a torn event, all of the first event
        batch = [record(step, 0.5), record(step + 1, 0.5)]
        with pytest.raises(OSError, match="full"):
            sink.write_many(batch)
        full.free_bytes = 10**6
        sink.write_many(batch)
    sink.close()
    assert scalars(tmp_path, "learning/loss") == [(step, 0.5) for step in range(40)]


def test_several_steps_are_one_write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sink = TensorBoardSink(tmp_path)
    calls: list[bytes] = []
    append = sink._file.append
    monkeypatch.setattr(sink._file, "append", lambda piece: (calls.append(piece), append(piece)))
    sink.write_many([record(step, 0.5) for step in range(3)])
    assert len(calls) == 1
    with pytest.raises(RecordError, match="step 4 cannot be an event"):
        sink.write_many([record(3, 0.5), record(4, "text")])  # type: ignore[arg-type]
    assert len(calls) == 1
    sink.close()
    assert scalars(tmp_path, "learning/loss") == [(step, 0.5) for step in range(3)]


def test_values_beyond_float32_and_odd_names_are_written(tmp_path: Path) -> None:
    sink = TensorBoardSink(tmp_path)
    values = {"a": 1e308, "b": -1e308, "c": 2**1000, "d": 1e-320, "": 1.0, "é\n@1": 2.0}
    sink.write(StepRecord(step=0, unix_seconds=0.0, scalars=values))
    sink.close()
    found = {name: scalars(tmp_path, name)[0][1] for name in ("a", "b", "c", "d", "_", "é\n@1")}
    assert found == {"a": math.inf, "b": -math.inf, "c": math.inf, "d": 0.0, "_": 1.0, "é\n@1": 2.0}


def test_a_deleted_folder_comes_back_with_every_point(tmp_path: Path) -> None:
    folder = tmp_path / "run" / "tb"
    sink = TensorBoardSink(folder)
    write(sink, range(3), 1.0)
    shutil.rmtree(tmp_path / "run")
    write(sink, range(3, 5), 1.0)
    sink.close()
    assert scalars(folder, "learning/loss") == [(step, 1.0) for step in range(5)]


def test_a_folder_in_an_object_store_has_every_point_once(tmp_path: Path) -> None:
    store = pytest.importorskip("fsspec").filesystem("memory")
    for start in (0, 3):
        sink = TensorBoardSink("memory://tb/run", resume_from_step=start)
        write(sink, range(start, start + 5), float(start))
        sink.close()
    store.get("/tb/run/", str(tmp_path / "copy"), recursive=True)
    expected = [(step, 0.0 if step < 3 else 3.0) for step in range(8)]
    assert scalars(tmp_path / "copy", "learning/loss") == expected


class FullDisk:
    """A file on a disk with little room."""

    def __init__(self, file: io.FileIO) -> None:
        self._file = file
        self.free_bytes = 10**6

    def write(self, piece: bytes) -> int:
        written = self._file.write(piece[: self.free_bytes])
        self.free_bytes -= written
        if piece and not written:
            raise OSError(errno.ENOSPC, "the disk is full")
        return written

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)


def record(step: int, loss: float) -> StepRecord:
    return StepRecord(step=step, unix_seconds=0.0, scalars={"learning/loss": loss})


def write(sink: TensorBoardSink, steps: range, loss: float) -> None:
    for step in steps:
        sink.write(record(step, loss))


def scalars_of_file(path: Path) -> list[tuple[int, float]]:
    loader = event_file_loader.EventFileLoader(str(path))
    return [
        (event.step, value.tensor.float_val[0])
        for event in loader.Load()
        for value in event.summary.value
        if value.tensor.float_val and not value.tag.startswith("Overview/")
    ]


SETUP = {"devices": "8 × TPU v5e", "tokens per device per step": 8192, "run": "/a/b"}
CONFIG = "steps=80 learning_rate=0.003 scan_layers=true run_name=demo dataset_path="


def test_the_first_tab_opens_on_the_answer(tmp_path: Path) -> None:
    """Its groups are sorted by name; a compile step would spoil the scale of a chart."""
    sink = TensorBoardSink(tmp_path)
    values = {"eval/avg_loss": 4.0, "perf/mfu": 0.5, "learning/loss": 2.0, "Overview/1 MFU": 7.0}
    for step, kind in enumerate(("compile", "step")):
        sink.write(StepRecord(step=step, kind=kind, unix_seconds=0.0, scalars=values))
    sink.close()
    tags = sorted(read(tmp_path).Tags()["scalars"])
    assert tags[:3] == ["Overview/1 MFU", "Overview/1 MFU_2", "Overview/5 loss"]
    assert scalars(tmp_path, "Overview/1 MFU") == [(1, 0.5)]
    assert scalars(tmp_path, "Overview/1 MFU_2") == [(0, 7.0), (1, 7.0)]


def html(text: str) -> str:
    """What TensorBoard's own converter makes of it."""
    return str(pytest.importorskip("tensorboard.plugin_util").markdown_to_safe_html(text))


def test_values_become_a_table_and_mean_only_themselves() -> None:
    shown = html(values_as_markdown({"peak": "2 | *3*", "<script>": "_a_ `b`\nc"}))
    assert shown.count("<tr>") == 3
    assert "<td>2 | *3*</td>" in shown
    assert "<td>&lt;script&gt;</td>" in shown
    assert "<td>_a_ `b` c</td>" in shown


def test_a_configuration_becomes_a_block_with_a_line_for_each_key() -> None:
    shown = html(as_markdown("steps=80 run_name=demo\ndataset_suffixes=[.py,.md] model_name="))
    lines = "steps=80\nrun_name=demo\ndataset_suffixes=[.py,.md]\nmodel_name=\n"
    assert shown == f"<pre><code>{lines}</code></pre>"


def test_other_texts_stay_a_block() -> None:
    assert as_markdown("one line") == "one line"
    assert as_markdown("first\n  second: 3") == "    first\n      second: 3"
