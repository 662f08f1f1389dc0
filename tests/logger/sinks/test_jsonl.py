"""The JSONL file: one valid object a step, whatever kills or resumes the run."""

import json
import math
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from mfu_jax.errors import UserError
from mfu_jax.logger.records.step_record import RecordError
from mfu_jax.logger.records.summary import Summary
from mfu_jax.sinks import JsonlSink, StepRecord
from tests.support.work import HANG_SECONDS


def record(step: int, **scalars: float) -> StepRecord:
    return StepRecord(step=step, unix_seconds=1.0, scalars=scalars or {"learning/loss": 2.5})


def write(path: Path, steps: range, **options: int) -> JsonlSink:
    sink = JsonlSink(path, **options)
    for step in steps:
        sink.write(record(step))
    sink.close()
    return sink


def steps_of(path: Path) -> list[int]:
    return [json.loads(line)["step"] for line in path.read_text().splitlines()]


def test_a_line_is_one_flat_object(tmp_path: Path) -> None:
    sink = JsonlSink(tmp_path / "new" / "folder" / "metrics.jsonl")
    sink.write(
        StepRecord(
            step=7,
            kind="compile",
            unix_seconds=12.5,
            scalars={"learning/loss": 2.5, "learning/total_weights": 2048},
            flags=("mfu_over_1",),
            notes=("why",),
        )
    )
    sink.close()
    assert json.loads(sink.path.read_text()) == {
        "step": 7,
        "kind": "compile",
        "unix_seconds": 12.5,
        "learning/loss": 2.5,
        "learning/total_weights": 2048,
        "flags": ["mfu_over_1"],
        "notes": ["why"],
    }


def test_a_line_of_numbers_is_what_json_writes(tmp_path: Path) -> None:
    """Lines of plain numbers are filled in; whatever the names and digits, JSON reads them back."""
    scalars = {
        "learning/loss": 0.1 + 0.2,
        'odd "name" of 100%r \u2028 ü \\': -0.0,
        "tiny": 5e-324,
        "large": 1.7976931348623157e308,
        "whole": 10**30,
        "exact": 1e16,
    }
    sink = JsonlSink(tmp_path / "metrics.jsonl")
    sink.write_many([record(7, **scalars), record(8, **scalars, more=1.5), record(9, **scalars)])
    sink.close()
    head = {"kind": "step", "unix_seconds": 1.0}
    expected = [
        {"step": 7, **head, **scalars},
        {"step": 8, **head, **scalars, "more": 1.5},
        {"step": 9, **head, **scalars},
    ]
    assert sink.path.read_text().splitlines() == [json.dumps(line) for line in expected]


def test_numbers_that_json_does_not_know_are_strings_that_float_reads(tmp_path: Path) -> None:
    sink = JsonlSink(tmp_path / "metrics.jsonl")
    sink.write(record(0, a=math.nan, b=math.inf, c=-math.inf))
    sink.close()

    def refuse(constant: str) -> float:
        raise AssertionError(f"{constant} is not JSON")

    line = json.loads(sink.path.read_text(), parse_constant=refuse)
    assert math.isnan(float(line["a"]))
    assert float(line["b"]) == math.inf
    assert float(line["c"]) == -math.inf


@pytest.mark.parametrize("torn", [b"", b'{"step": 6, "kind": "st', b"\x00\x00\x00", b"{}"])
def test_a_resumed_file_has_every_step_once(
    tmp_path: Path, torn: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "metrics.jsonl"
    write(path, range(6))
    with open(path, "ab") as file:
        file.write(torn)
    write(path, range(4, 9), resume_from_step=4)
    assert steps_of(path) == list(range(9))
    assert not caplog.messages
    assert [child.name for child in tmp_path.iterdir()] == ["metrics.jsonl"]


def test_a_resume_with_nothing_to_drop_appends(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    write(path, range(4))
    write(path, range(4, 6), resume_from_step=4)
    assert steps_of(path) == list(range(6))


def test_steps_that_stand_twice_are_kept_once(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    write(path, range(3))
    path.write_bytes(2 * path.read_bytes())
    write(path, range(3, 5), resume_from_step=3)
    assert steps_of(path) == list(range(5))


def test_a_gap_is_reported(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "metrics.jsonl"
    write(path, range(3))
    sink = write(path, range(5, 6), resume_from_step=5)
    assert not caplog.messages
    assert sink.missing == range(3, 5)


def test_a_new_run_keeps_the_file_of_an_earlier_one(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "metrics.jsonl"
    for count in (3, 2, 1):
        write(path, range(count))
    assert steps_of(path) == [0]
    assert steps_of(tmp_path / "metrics.jsonl.previous1") == [0, 1, 2]
    assert steps_of(tmp_path / "metrics.jsonl.previous2") == [0, 1]
    assert "previous2" in caplog.messages[-1]


@pytest.mark.parametrize("start", [0, 4])
def test_another_kind_of_file_is_refused_and_left_alone(tmp_path: Path, start: int) -> None:
    path = tmp_path / "README.md"
    path.write_text("# Not metrics\n")
    with pytest.raises(UserError, match="does not start with a step's JSON object"):
        JsonlSink(path, resume_from_step=start)
    assert path.read_text() == "# Not metrics\n"
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("name", ["", "file/metrics.jsonl", "nowhere://bucket/metrics.jsonl"])
def test_a_path_that_cannot_be_written_is_refused(tmp_path: Path, name: str) -> None:
    (tmp_path / "file").write_text("")
    path = name if "://" in name else str(tmp_path / name)
    with pytest.raises(UserError, match=r"(?s)metrics_file .* cannot be (written|reached)"):
        JsonlSink(path)


def test_a_failed_write_leaves_no_half_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A disk that fills up takes the first bytes of a line and refuses the rest."""
    sink = JsonlSink(tmp_path / "metrics.jsonl")
    sink.write(record(0))

    class FullDisk:
        def __init__(self, file: object) -> None:
            self.file = file
            self.calls = 0

        def write(self, data: bytes) -> int:
            self.calls += 1
            if self.calls == 2:
                raise OSError(28, "No space left on device")
            return self.file.write(data[:10])  # type: ignore[attr-defined, no-any-return]

        def fileno(self) -> int:
            return self.file.fileno()  # type: ignore[attr-defined, no-any-return]

    real = sink._file._file
    monkeypatch.setattr(sink._file, "_file", FullDisk(real))
    with pytest.raises(OSError, match="No space left"):
        sink.write(record(1))
    monkeypatch.setattr(sink._file, "_file", real)
    sink.write(record(1))
    sink.close()
    assert steps_of(sink.path) == [0, 1]


def test_the_summary_stands_beside_the_steps(tmp_path: Path) -> None:
    sink = JsonlSink(tmp_path / "metrics.jsonl")
    sink.write_summary(Summary(steps=3, median_seconds=0.5, last_loss=math.nan))
    sink.close()
    summary = json.loads((tmp_path / "metrics.jsonl.summary.json").read_text())
    assert (summary["steps"], summary["median_seconds"]) == (3, 0.5)


KILLED_RUN = """
import itertools, sys
from mfu_jax.logger.metric_logger import MetricLogger
from mfu_jax.sinks import JsonlSink

start = int(sys.argv[2])
sinks = [JsonlSink(sys.argv[1], resume_from_step=start)]
logger = MetricLogger(model_flops_per_device=1, sinks=sinks, start_step=start)
for step in itertools.count(start):
    logger.record(step, {"loss": 1.0})
    if step == start + 200:
        with logger.pause("checkpoint"):
            print("saved", flush=True)
"""


@pytest.mark.full
def test_a_run_killed_and_resumed_has_every_step_once(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    for start in (0, 201):  # the second run resumes from the checkpoint of the first
        with subprocess.Popen(
            [sys.executable, "-c", KILLED_RUN, str(path), str(start)],
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | {"JAX_PLATFORMS": "cpu"},
        ) as process:
            assert process.stdout is not None
            assert process.stdout.readline() == "saved\n"
            process.send_signal(signal.SIGKILL)
            process.wait(HANG_SECONDS)
    write(path, range(402, 410), resume_from_step=402)
    assert steps_of(path) == list(range(410))


def test_several_steps_are_one_write_or_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sink = JsonlSink(tmp_path / "metrics.jsonl")
    pieces: list[bytes] = []
    sink.close()
    monkeypatch.setattr(sink._file, "append", pieces.append)
    sink.write_many([record(0), record(1), record(2)])
    assert [json.loads(line)["step"] for line in pieces[0].splitlines()] == [0, 1, 2]
    with pytest.raises(RecordError, match="step 4 cannot be JSON"):
        sink.write_many([record(3), record(4, a=10**400)])
    assert len(pieces) == 1


def test_metrics_named_like_the_fields_of_a_line_do_not_replace_them(tmp_path: Path) -> None:
    sink = JsonlSink(tmp_path / "metrics.jsonl")
    scalars = {"step": 1.0, "kind": 2.0, "flags": 3.0}
    sink.write(StepRecord(step=7, unix_seconds=1.0, scalars=scalars))
    sink.close()
    line = json.loads(sink.path.read_text())
    assert (line["step"], line["kind"]) == (7, "step")
    assert (line["step_2"], line["kind_2"], line["flags_2"]) == (1.0, 2.0, 3.0)


def test_a_run_folder_that_is_deleted_comes_back_with_every_step(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "run" / "metrics.jsonl"
    sink = JsonlSink(path)
    sink.write(record(0))
    shutil.rmtree(path.parent)
    sink.write(record(1))
    sink.flush()
    sink.close()
    assert steps_of(path) == [0, 1]
    assert "was deleted" in caplog.text
    assert sorted(os.listdir(path.parent)) == ["metrics.jsonl"]


@pytest.mark.full
def test_a_file_of_another_process_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    code = (
        "import sys\nfrom mfu_jax.sinks import JsonlSink\n"
        "sink = JsonlSink(sys.argv[1])\nprint('open', flush=True)\nsys.stdin.read()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code, str(path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "open\n"
        with pytest.raises(
            UserError, match=f"(?s)metrics_file .* is in use by process {process.pid}"
        ):
            JsonlSink(path)
        process.communicate()
    write(path, range(2))
    assert steps_of(path) == [0, 1]


def test_a_logger_that_was_not_closed_keeps_its_own_file(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A notebook's cell that runs again."""
    path = tmp_path / "metrics.jsonl"
    first = JsonlSink(path)
    first.write(record(0))
    second = JsonlSink(path)
    assert "still open in this process" in caplog.messages[0]
    second.write(record(10))
    first.write(record(1))
    first.close()
    second.write(record(11))
    second.close()
    assert steps_of(path) == [10, 11]
    assert steps_of(tmp_path / "metrics.jsonl.previous1") == [0, 1]


def test_two_open_loggers_do_not_mix_records_or_totals(tmp_path: Path) -> None:
    """Two instrumented steps of one loop with one run_dir: neither has written anything yet."""
    path = tmp_path / "metrics.jsonl"
    first, second = JsonlSink(path), JsonlSink(path)
    for step in range(2):
        first.write(record(step))
        second.write(record(10 + step))
    second.write_summary(Summary(steps=7))
    first.write_summary(Summary(steps=2))
    first.close()
    second.close()
    assert steps_of(path) == [10, 11]
    assert steps_of(tmp_path / "metrics.jsonl.previous1") == [0, 1]
    assert json.loads((tmp_path / "metrics.jsonl.summary.json").read_text())["steps"] == 7


def test_what_a_killed_rewrite_left_is_removed(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    write(path, range(3))
    (tmp_path / "metrics.jsonl.4242.tmp").write_text("half")
    write(path, range(3, 4), resume_from_step=3)
    assert os.listdir(tmp_path) == ["metrics.jsonl"]


def test_a_metrics_file_in_an_object_store_is_resumed(tmp_path: Path) -> None:
    store = pytest.importorskip("fsspec").filesystem("memory")
    for start, stop in ((0, 5), (3, 7)):
        sink = JsonlSink("memory://jsonl/run/metrics.jsonl", resume_from_step=start)
        for step in range(start, stop):
            sink.write(record(step))
        sink.write_summary(Summary(steps=stop))
        sink.close()
    lines = store.cat("/jsonl/run/metrics.jsonl").splitlines()
    assert [json.loads(line)["step"] for line in lines] == list(range(7))
    assert json.loads(store.cat("/jsonl/run/metrics.jsonl.summary.json"))["steps"] == 7
