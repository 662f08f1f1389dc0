"""Sinks beside each other: one that misbehaves costs neither the loop nor the others anything."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from mfu_jax.logger.run_log import recorder, run_log
from mfu_jax.logger.run_log.events import events_name
from mfu_jax.logger.run_log.recorder import RecorderThread
from mfu_jax.logger.run_log.writer import EventsFile
from mfu_jax.sinks import CsvSink, JsonlSink, StepRecord
from mfu_jax.storage.files import AppendOnlyFile
from tests.support.logger_run import Run
from tests.support.sinks import HangingSink, ListSink
from tests.support.work import HANG_SECONDS


class HangingFile(JsonlSink):
    """A metrics file on a disk that hangs from a certain step on."""

    hangs_from = 0
    release = threading.Event()

    def write_many(self, records: Sequence[StepRecord]) -> None:
        if records[-1].step >= self.hangs_from:
            self.release.wait(HANG_SECONDS)
        super().write_many(records)


@pytest.fixture
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sinks that hang are given up at once."""
    monkeypatch.setattr(recorder, "DRAIN_SECONDS", 1.5)
    monkeypatch.setattr(recorder, "CLOSE_SECONDS", 0.5)
    monkeypatch.setattr(recorder, "HUNG_DRAIN_SECONDS", 0.0)


def test_steps_that_come_together_are_appended_together_and_let_the_loop_in_between(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A long hold of the GIL would delay the loop, and each append wakes threads."""
    sleep, breaths, appended = time.sleep, list[float](), list[int]()
    run = Run()
    log, pipeline = run.logger._log, run.logger._pipeline
    steps = log.steps

    def count(made: Sequence[Any]) -> None:
        appended.append(len(made))
        steps(made)

    monkeypatch.setattr(log, "steps", count)
    monkeypatch.setattr(recorder, "_LONG_SECONDS", HANG_SECONDS)
    monkeypatch.setattr(recorder, "BREATH_SECONDS", 2e-4)
    monkeypatch.setattr(time, "sleep", lambda s: breaths.append(s) if s == 2e-4 else sleep(s))
    pipeline.put(lambda: run.steps(*[1.0] * 63))
    assert pipeline._thread.settle(HANG_SECONDS)
    assert pipeline._thread.settle(HANG_SECONDS)
    assert (len(breaths), appended) == (2, [62])
    run.logger.close()


@pytest.mark.usefixtures("soon")
def test_healthy_sinks_get_everything_beside_any_other() -> None:
    hanging, healthy = HangingSink(), [ListSink(), ListSink()]
    exits = ListSink([SystemExit(3)] * 1000)
    run = Run(sinks=[healthy[0], hanging, exits, healthy[1]])
    run.logger._pipeline._thread.size = 1000
    for step in range(200):
        run.logger.record(step, {"loss": 1.0}, step_time_seconds=1.0)
    summary = run.logger.close()
    hanging.release.set()
    for sink in healthy:
        assert sink.steps == list(range(200))
        assert sink.summary is not None
        assert sink.closed
    assert exits.closed
    assert summary.dropped_by_sink == {
        "HangingSink: not written in time": 200,
        "ListSink: not written in time": 200,
    }
    assert summary.dropped_records == 400
    assert "200 records, HangingSink: not written in time" in summary.render()


@pytest.mark.usefixtures("soon")
def test_what_the_files_say_was_lost_is_what_close_returns() -> None:
    healthy = ListSink()
    run = Run(sinks=[healthy, ListSink([OSError("full")] * 1000)])
    run.steps(1.0, 1.0)
    summary = run.logger.close()
    assert healthy.summary is not None
    assert healthy.summary.dropped_by_sink == summary.dropped_by_sink
    assert summary.dropped_records == 2


@pytest.mark.usefixtures("soon")
def test_a_flush_waits_once_for_a_sink_that_hangs(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recorder, "DRAIN_SECONDS", 0.5)
    hanging, healthy = HangingSink(), ListSink()
    run = Run(sinks=[hanging, healthy])
    for step in range(3):
        run.steps(1.0, start=step)
        with run.logger.pause("checkpoint"):
            assert healthy.steps == list(range(step + 1))
    assert caplog.text.count("metrics were not all written") == 1
    hanging.release.set()
    run.logger.close()


@pytest.mark.usefixtures("soon")
def test_a_log_whose_disk_hangs_is_named_and_waited_for_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_log, "_CLOSE_SECONDS", 60.0)
    release, path = threading.Event(), tmp_path / "metrics.jsonl"
    monkeypatch.setattr(EventsFile, "write_many", lambda *_: release.wait(HANG_SECONDS))
    run = Run(sinks=[JsonlSink(path)])
    run.steps(1.0, 1.0)
    begun = time.monotonic()
    run.logger.close()
    assert time.monotonic() - begun < 60.0
    release.set()
    assert len(path.read_text().splitlines()) == 2
    (warning,) = [text for text in caplog.messages if "were not all written" in text]
    assert "run log; training goes on" in warning


def test_a_property_of_a_sink_that_raises_costs_no_other_sink() -> None:
    class Fails(ListSink):
        pass

    run = Run(sinks=[Fails(), healthy := ListSink()])
    Fails.keeps_every_step = property(lambda _: 1 / 0)  # type: ignore[assignment]
    for step in range(3):
        run.logger.record(step, {"loss": 1.0}, step_time_seconds=1.0)
        run.logger.flush()
    assert run.logger.close().dropped_records == 0
    assert healthy.steps == [0, 1, 2]


def test_texts_are_in_order_and_can_be_encoded() -> None:
    run = Run()
    run.logger.write_setup({"a": float("nan"), 3: "\ud800"}, {"t": "x\ny"})
    run.logger.write_text("tag", "\ud800\nline")
    run.logger.close()
    assert run.sink.texts == [
        ("setup/values", "a: NaN\n3: \\ud800"),
        ("setup/t", "x\ny"),
        ("tag", "\\ud800\nline"),
    ]


@pytest.mark.usefixtures("soon")
def test_what_a_hanging_file_did_not_take_is_counted_and_costs_no_other_sink(
    tmp_path: Path,
) -> None:
    path = tmp_path / "metrics.jsonl"
    file, healthy = HangingFile(path), ListSink()
    file.hangs_from, file.release = 3, threading.Event()
    run = Run(sinks=[file, healthy])
    for step in range(10):
        run.logger.record(step, {"loss": float(step)}, step_time_seconds=1.0)
        run.logger._pipeline._thread.settle(HANG_SECONDS)
    summary = run.logger.close()
    events = AppendOnlyFile(path.with_name(events_name(path.name, 0)), "run log")
    assert events.is_alone()  # the next logger goes on with it
    events.close()
    file.release.set()
    assert healthy.steps == list(range(10))
    (lost,) = summary.dropped_by_sink.items()
    assert lost[0] == "HangingFile: not written in time"
    assert 7 <= lost[1] <= 10
    assert healthy.closed


@pytest.mark.usefixtures("soon")
def test_the_next_run_writes_what_a_sink_lacks_that_was_down(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path, down = tmp_path / "metrics.jsonl", ListSink([OSError("down")] * 1000)
    run = Run(sinks=[down, JsonlSink(path)])
    run.steps(*[1.0] * 10)
    assert run.logger.close().dropped_records == 0
    assert "ListSink lacks 10 records, which the run log has" in caplog.text
    caplog.clear()
    again = ListSink()
    resumed = Run(sinks=[again, JsonlSink(path, resume_from_step=8)], start_step=8)
    resumed.steps(1.0, 1.0, start=8, loss=-1.0)
    resumed.logger.close()
    assert again.steps == list(range(10))
    assert again.scalar("learning/loss") == [1.0] * 8 + [-1.0] * 2
    assert not caplog.messages
    third = ListSink()
    Run(sinks=[third, JsonlSink(path, resume_from_step=10)], start_step=10).logger.close()
    assert third.steps == []  # the one before it had caught up


@pytest.mark.usefixtures("soon")
def test_a_table_that_lacks_steps_gets_them_from_the_log(tmp_path: Path) -> None:
    """As after a kill between two writes of the table."""
    path, table = tmp_path / "metrics.jsonl", tmp_path / "metrics.csv"
    run = Run(sinks=[JsonlSink(path), CsvSink(table)])
    run.steps(*[1.0] * 6)
    run.logger.close()
    whole = table.read_bytes()
    table.write_bytes(b"".join(whole.splitlines(keepends=True)[:3]))
    sinks = [CsvSink(table, resume_from_step=6), JsonlSink(path, resume_from_step=6)]
    Run(sinks=sinks, start_step=6).logger.close()
    assert table.read_bytes().decode().splitlines() == whole.decode().splitlines()


@pytest.mark.usefixtures("soon")
def test_an_end_at_which_python_starts_no_thread_is_an_end_as_any_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class FullDisk(JsonlSink):
        def write(self, record: StepRecord) -> None:
            raise OSError("full")

        write_many = None  # type: ignore[assignment]

    def refuse(_: threading.Thread) -> None:
        raise RuntimeError("can't create new thread at interpreter shutdown")

    hanging, full, healthy = HangingSink(), FullDisk(tmp_path / "metrics.jsonl"), ListSink()
    run = Run(sinks=[hanging, full, healthy])
    for step in range(5):
        run.logger.record(step, {"loss": float(step)}, step_time_seconds=1.0)
    with monkeypatch.context() as patch:  # as in an exit handler from Python 3.12 on
        patch.setattr(threading.Thread, "start", refuse)
        summary = run.logger.close()
    hanging.release.set()
    assert summary.dropped_by_sink == {
        "HangingSink: not written in time": 5,
        "FullDisk: not written in time": 5,
    }
    assert (healthy.summary is not None, healthy.closed) == (True, True)
    assert healthy.steps == [0, 1, 2, 3, 4]


def test_steps_that_no_log_has_are_said_to_be_missing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "metrics.jsonl"
    run = Run(sinks=[JsonlSink(path)])
    run.steps(1.0, 1.0, 1.0)
    run.logger.close()
    Run(sinks=[JsonlSink(path, resume_from_step=8)], start_step=8).logger.close()
    (text,) = caplog.messages
    assert text == (
        f"{path} ends at step 2, but the run resumes at 8: the steps between are missing"
    )


@pytest.mark.usefixtures("soon")
def test_a_run_from_the_start_does_not_write_what_an_earlier_one_left(tmp_path: Path) -> None:
    for failures in (1000, 0):
        sink = ListSink([OSError("full")] * failures)
        run = Run(sinks=[sink, JsonlSink(tmp_path / "metrics.jsonl")])
        run.steps(1.0, 1.0)
        run.logger.close()
    assert sink.steps == [0, 1]


KILLED_RUN = """
import sys, time
from mfu_jax.logger.metric_logger import MetricLogger
from mfu_jax.sinks import JsonlSink

logger = MetricLogger(model_flops_per_device=1, sinks=[JsonlSink(sys.argv[1])])
for step in range(100_000):
    logger.record(step, {"loss": 1.0}, step_time_seconds=0.005)
    print(step, flush=True)
    time.sleep(0.005)
"""


@pytest.mark.full
def test_a_killed_process_has_written_all_but_the_last_tick(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    with subprocess.Popen(
        [sys.executable, "-c", KILLED_RUN, str(path)],
        env=os.environ | {"JAX_PLATFORMS": "cpu"},
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        while not path.exists() or path.stat().st_size < 20_000:
            recorded = int(process.stdout.readline())
        process.send_signal(signal.SIGKILL)
        recorded = max([recorded, *map(int, process.stdout.read().splitlines())])
    *lines, tail = path.read_bytes().split(b"\n")
    assert tail == b""  # no torn line
    written = [json.loads(line)["step"] for line in lines]
    assert written == list(range(len(written)))
    # A tick has some 20 steps; a thread may have to wait for a core on a busy machine.
    assert written[-1] >= recorded - 256


def test_a_checkpoint_after_close_waits_for_no_sink(caplog: pytest.LogCaptureFixture) -> None:
    run = Run(sinks=[ListSink()])
    run.steps(1.0, 1.0)
    run.logger.close()
    with run.logger.pause("checkpoint"):  # flushes
        pass
    assert "not all written" not in caplog.text


def test_who_closes_a_logger_at_the_same_time_gets_the_summary_as_well() -> None:
    hanging = HangingSink()
    run = Run(sinks=[hanging])
    for step in range(5):
        run.logger.record(step, {"loss": 1.0}, step_time_seconds=1.0)
    summaries: list[int] = []
    threads = [
        threading.Thread(target=lambda: summaries.append(run.logger.close().steps))
        for _ in range(3)
    ]
    assert hanging.begun.wait(HANG_SECONDS)
    for thread in threads:
        thread.start()
    hanging.release.set()
    for thread in threads:
        thread.join(HANG_SECONDS)
    assert summaries == [5, 5, 5]


def test_an_interrupted_close_still_counts_what_a_hanging_file_did_not_take(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    file, healthy = HangingFile(tmp_path / "metrics.jsonl"), ListSink()
    file.release = threading.Event()
    run = Run(sinks=[file, healthy])
    for step in range(10):
        run.logger.record(step, {"loss": 1.0}, step_time_seconds=1.0)

    def interrupted(thread: RecorderThread, timeout: float) -> bool:
        settle(thread, timeout)
        raise KeyboardInterrupt

    settle = RecorderThread.settle
    monkeypatch.setattr(RecorderThread, "settle", interrupted)
    with pytest.raises(KeyboardInterrupt):
        run.logger.close()
    assert "HangingFile: 10 records could not be written" in caplog.text
    assert healthy.closed
    assert run.logger.summary().steps == run.logger.close().steps == 10
    file.release.set()


FORKING_RUN = """
import json, os, sys, time
from mfu_jax.logger.metric_logger import MetricLogger
from mfu_jax.sinks import JsonlSink

path = sys.argv[1]
logger = MetricLogger(sinks=[JsonlSink(path)], heartbeat_file=path + ".beat")
for step in range(20):
    logger.record(step, {"loss": 1.0}, step_time_seconds=0.005)
begin = time.monotonic()
child = os.fork()
if not child:
    logger.close()
    os._exit(3)  # JAX's own exit handlers hang in a child
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 3
print(time.monotonic() - begin)
assert not os.path.exists(path + ".beat") or json.load(open(path + ".beat"))["state"] != "ended"
"""


@pytest.mark.full
@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork")
def test_a_forked_child_leaves_its_parents_logger_alone(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", FORKING_RUN, str(path)],
        env=os.environ | {"JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert float(done.stdout) < 5.0
    assert done.stderr == ""
    assert path.read_bytes().count(b"\n") == 20


class SignallingSink(ListSink):
    """Signals each step that it gets."""

    def __init__(self) -> None:
        super().__init__()
        self.got = threading.Semaphore(0)

    def write(self, record: StepRecord) -> None:
        super().write(record)
        self.got.release()


@pytest.mark.parametrize("period", [0.0, 60.0])
def test_steps_are_written_together_once_in_a_write_period(
    period: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mfu_jax.logger.run_log.recorder.FIRST_PERIOD_SECONDS", 60.0)
    sink = SignallingSink()
    run = Run(sinks=[sink], write_period_seconds=period)
    run.steps(1.0, 1.0)
    assert sink.got.acquire(timeout=HANG_SECONDS)  # step 0 comes alone
    run.steps(1.0, start=2)
    assert sink.got.acquire(timeout=0.3) == (period == 0)
    run.logger.flush()
    assert sink.steps == [0, 1]
    run.logger.close()
