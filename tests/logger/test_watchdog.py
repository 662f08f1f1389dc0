"""The watchdog, with a clock that only the test moves."""

import json
import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import CodeType
from typing import Any

import jax
import pytest

from mfu_jax.errors import UserError
from mfu_jax.logger import watchdog
from mfu_jax.logger.config import LoggerConfig
from mfu_jax.logger.metric_logger import MetricLogger
from mfu_jax.logger.timing.timed_step import TimedStep
from mfu_jax.logger.watchdog import HANG_EXIT_CODE, Watchdog
from mfu_jax.settings import Settings
from mfu_jax.sinks import StepRecord
from mfu_jax.util.failsafe import Boundary
from tests.support.fake_device import FakeClock
from tests.support.paths import ROOT
from tests.support.work import HANG_SECONDS


class Threadless(Watchdog):
    """The test looks at the clock, and nobody else."""

    def _start(self) -> None:
        self._thread = threading.Thread()


class Run:
    """Steps of half a second under a watchdog that looks once a second."""

    def __init__(self, folder: Path, **config: float) -> None:
        self.clock = FakeClock()
        self.heartbeat = folder / "heartbeat.json"
        given: dict[str, Any] = {"hang_factor": 10.0, "hang_seconds": 4.0, **config}
        self.watchdog = Threadless(
            LoggerConfig(heartbeat_file=str(self.heartbeat), **given),
            Boundary(),
            self.clock.monotonic,
        )
        self.watchdog.folder = folder.absolute() / "hangs"
        self.step = 0

    def steps(self, count: int, seconds: float = 0.5) -> None:
        for _ in range(count):
            self.clock.advance(seconds)
            self.watchdog.on_step((self.step, self.clock.monotonic(), threading.get_ident()))
            scalars = {"learning/loss": 4.25}
            record = StepRecord(step=self.step, unix_seconds=0.0, scalars=scalars)
            assert self.watchdog.on_record(TimedStep(), record) is record
            self.watchdog.check()
            self.step += 1

    def passes(self, seconds: int) -> None:
        for _ in range(seconds):
            self.clock.advance(1.0)
            self.watchdog.check()

    def beat(self) -> dict[str, object]:
        return json.loads(self.heartbeat.read_text())


def test_a_hang_is_said_once_with_stacks_and_last_records(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run = Run(tmp_path)
    run.steps(30)
    run.passes(5)  # 10 × 0.5 s, not longer
    assert not caplog.messages
    run.passes(20)
    assert len(caplog.messages) == 1
    assert "no step completed for 6" in caplog.messages[0]
    assert "median 0.500 s" in caplog.messages[0]
    (report,) = (tmp_path / "hangs").iterdir()
    assert str(report) in caplog.messages[0]
    text = report.read_text()
    assert "test_a_hang_is_said_once" in text  # this function's frame is on a stack
    assert "step 29 [step] {'learning/loss': 4.25}" in text
    assert "step 10 " in text
    assert "step 9 " not in text


def test_tracing_is_no_hang_though_jax_tells_of_it_at_its_end_only(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run = Run(tmp_path)
    run.steps(30)

    @jax.jit
    def traced_for_long(x: jax.Array) -> jax.Array:
        run.passes(60)
        return x

    traced_for_long.lower(1.0)
    assert not caplog.messages
    run.passes(10)
    assert len(caplog.messages) == 1


def test_a_loop_that_waits_is_told_what_for(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run = Run(tmp_path)
    run.steps(30)
    run.watchdog.waits_for = lambda: "data"
    run.passes(60)
    (text,) = caplog.messages
    assert "the loop waits for data; stacks" in text
    assert "seems to hang" not in text


def test_a_pause_inside_a_wait_is_no_hang() -> None:
    with MetricLogger(sinks=[]) as logger:
        with logger.waiting("data"):
            assert logger._watchdog.waits_for() == "data"
            with logger.pause("compile"):
                assert logger._watchdog.is_paused
                with logger.pause("inner"):
                    assert logger._watchdog.is_paused
                assert logger._watchdog.is_paused
            assert not logger._watchdog.is_paused
        assert not logger._watchdog.waits_for()


def test_a_run_that_goes_on_says_so_and_can_hang_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run = Run(tmp_path)
    run.steps(10)
    run.passes(10)
    run.steps(1)
    assert [text.split(":")[0][:18] for text in caplog.messages] == [
        "no step completed ",
        "steps complete aga",
    ]
    run.passes(10)
    assert len(caplog.messages) == 3
    assert len(list((tmp_path / "hangs").iterdir())) == 2


@pytest.mark.parametrize(
    "config", [{"hang_factor": 0.0}, {"hang_factor": 100.0}, {"hang_seconds": 60.0}]
)
def test_the_limit_is_the_larger_of_both_settings(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, config: dict[str, float]
) -> None:
    run = Run(tmp_path, **config)
    run.steps(10)
    run.passes(45)
    assert not caplog.messages


def test_pauses_compilations_and_first_steps_are_not_hangs(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiling: set[CodeType] = set()  # what a thread is in that compiles
    monkeypatch.setattr(watchdog, "is_compiling", lambda frame: frame.f_code in compiling)
    run = Run(tmp_path)
    run.steps(4)
    run.passes(300)  # four intervals have no median yet
    run.steps(6)
    run.watchdog.pause()
    run.passes(300)
    run.watchdog.resume()
    run.passes(3)
    run.steps(3)
    compiling.add(watchdog._frames.__code__)  # which the loop's thread, this one, is in
    run.passes(300)
    compiling.clear()
    run.passes(3)
    run.steps(10)
    assert not caplog.messages
    compiling.add(watchdog._frames.__code__)  # which the loop's thread, this one, is in
    run.passes(1800)
    assert not caplog.messages
    run.passes(1)  # a compilation, too, can hang
    assert len(caplog.messages) == 1


COLLECTED = """
import gc, threading
from mfu_jax.logger import watchdog

for _ in range(100):
    threading.Thread(target=threading.Event().wait, daemon=True).start()
gc.callbacks.append(lambda phase, info: threading.Thread(target=int).start())
gc.set_threshold(1)
frames = watchdog._frames()
gc.callbacks.clear()
print(threading.main_thread().ident in frames, gc.isenabled())
gc.disable()
watchdog._frames()
print(gc.isenabled())
"""


@pytest.mark.full
def test_a_collection_of_garbage_whose_callback_starts_a_thread_does_not_stop_the_process() -> None:
    """CPython's own list of frames deadlocks so before 3.11.9 (python/cpython#106883)."""
    command = [sys.executable, "-c", COLLECTED]
    done = subprocess.run(command, cwd=ROOT, text=True, capture_output=True, timeout=HANG_SECONDS)
    assert (done.stdout, done.returncode) == ("True True\nFalse\n", 0), done.stderr


def test_a_machine_that_slept_is_told_apart(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run = Run(tmp_path)
    run.steps(10)
    run.clock.advance(3600.0)  # nobody looked meanwhile
    run.watchdog.check()
    run.passes(3)
    assert [text[:34] for text in caplog.messages] == ["the process did not run for 3599 s"]
    assert run.watchdog.stopped_seconds == pytest.approx(3599.0)
    run.steps(1)
    assert run.watchdog.stopped_seconds == 0
    run.passes(10)  # a hang after that is still a hang
    assert len(caplog.messages) == 2


def test_the_heartbeat_follows_the_run(tmp_path: Path) -> None:
    run = Run(tmp_path)
    run.passes(1)
    assert run.beat()["last_step"] is None
    run.steps(40)
    assert run.beat()["state"] == "running"
    assert run.beat()["last_step"] == 39  # written every 10 s
    run.passes(20)
    assert run.beat()["state"] == "hung"
    run.steps(1)
    assert run.beat()["state"] == "running"
    assert run.beat()["last_step"] == 40


def test_a_heartbeat_that_cannot_be_written_costs_one_line(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").touch()
    run = Run(tmp_path / "file")  # a file where the folder should be
    run.steps(20)
    assert [text[:13] for text in caplog.messages] == ["the heartbeat"]
    run.passes(30)  # neither can the stacks, and the run goes on
    assert len(caplog.messages) == 2
    assert "could not be written" in caplog.messages[1]


def test_a_heartbeat_goes_on_once_its_disk_works_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "folder").touch()
    run = Run(tmp_path / "folder")
    run.steps(60)  # three beats that fail
    (tmp_path / "folder").unlink()
    run.steps(20)
    assert run.beat()["last_step"] == 60
    assert ["cannot" in text for text in caplog.messages] == [True, False]
    assert "is written again" in caplog.messages[1]


def test_a_slow_disk_is_no_sleep_of_the_machine(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Run(tmp_path)
    monkeypatch.setattr("mfu_jax.logger.watchdog.replace_file", lambda *_: run.clock.advance(12.0))
    run.passes(30)
    assert not caplog.messages
    assert run.watchdog.stopped_seconds == 0.0


def test_a_heartbeat_whose_disk_hangs_is_not_written_by_the_training_thread(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    writers: list[str] = []
    begun, release = threading.Event(), threading.Event()

    def hang(*_: object) -> None:
        writers.append(threading.current_thread().name)
        begun.set()
        release.wait(HANG_SECONDS)

    monkeypatch.setattr("mfu_jax.logger.watchdog.replace_file", hang)
    config = LoggerConfig(heartbeat_file=str(tmp_path / "beat.json"), hang_seconds=0.2)
    watchdog = Watchdog(config, Boundary())
    assert begun.wait(HANG_SECONDS)
    watchdog.close()
    assert writers == ["mfu_jax watchdog"]
    release.set()


def test_only_the_newest_reports_of_hangs_are_kept(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run = Run(tmp_path)
    run.steps(10)
    (tmp_path / "hangs").mkdir()
    (tmp_path / "hangs" / "hang-after-step3-pid1.txt").touch()  # another run's
    for _ in range(8):
        run.passes(10)
        run.steps(1)
    left = {int(path.name.split("-")[2][4:]) for path in (tmp_path / "hangs").iterdir()}
    assert left == {3, 12, 13, 14, 15, 16}
    assert "(report 8 of this run; the last 5 are kept)" in caplog.text


def test_files_stay_where_they_were_when_the_loop_changes_its_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path)
    run = Run(Path("out"))
    monkeypatch.chdir(tmp_path / "elsewhere")
    run.steps(10)
    run.passes(20)
    assert not list((tmp_path / "elsewhere").iterdir())
    assert (tmp_path / "out" / "heartbeat.json").exists()
    assert len(list((tmp_path / "out" / "hangs").iterdir())) == 1


def test_a_logger_is_watched(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    clock, beat = FakeClock(), tmp_path / "new" / "beat.json"
    settings = Settings(heartbeat_file=str(beat), hang_factor=3, hang_seconds=0)
    logger = MetricLogger(config=settings, sinks=[], clock=clock.wall, monotonic=clock.monotonic)
    for step in range(20):
        clock.advance(0.1)
        logger.record(step, {"loss": 2.5})
    logger.flush()
    deadline = time.monotonic() + HANG_SECONDS
    with logger.pause("eval"):
        clock.advance(1.0)  # nothing hangs in a pause
        time.sleep(0.2)
    assert not caplog.messages
    clock.advance(1.0)
    while json.loads(beat.read_text())["state"] != "hung" and time.monotonic() < deadline:
        time.sleep(0.01)
    assert len(caplog.messages) == 1
    (report,) = (tmp_path / "new").glob("hang-after-step19-*.txt")
    assert "step 19 [step]" in report.read_text() or "step 18 [step]" in report.read_text()
    assert json.loads(beat.read_text())["state"] == "hung"
    logger.close()
    assert json.loads(beat.read_text())["state"] == "ended"


def test_a_first_step_that_compiled_for_long_is_no_stop_of_the_machine(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run = Run(tmp_path)
    run.watchdog._thread = None  # it starts its own at the first record
    run.clock.advance(600.0)
    run.steps(1)
    assert not caplog.messages
    assert run.watchdog.stopped_seconds == 0.0


def test_a_heartbeat_replaces_nothing_but_a_file(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "pipe").mkdir()
    os.mkfifo(tmp_path / "pipe" / "heartbeat.json")
    run = Run(tmp_path / "pipe")
    run.passes(1)
    assert (tmp_path / "pipe" / "heartbeat.json").is_fifo()
    assert "it is a FIFO, not a file" in caplog.text
    (tmp_path / "link").mkdir()
    (tmp_path / "link" / "heartbeat.json").symlink_to(tmp_path / "target")
    run = Run(tmp_path / "link")
    run.passes(1)
    assert (tmp_path / "link" / "heartbeat.json").is_symlink()
    assert json.loads((tmp_path / "target").read_text())["state"] == "running"


@pytest.mark.parametrize("file", ["gs://bucket/beat.json", "gs:/bucket/beat.json", "a\0b"])
def test_a_heartbeat_needs_a_path_of_this_machine(file: str) -> None:
    with pytest.raises(UserError, match="heartbeat_file="):
        LoggerConfig(heartbeat_file=file)


def test_a_hang_ends_the_process_if_that_is_wanted(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Run(tmp_path, abort_on_hang=True)
    events: list[object] = []
    monkeypatch.setattr(os, "_exit", events.append)
    run.watchdog.who_is_silent = lambda: "process 3 is silent for 40 s"
    run.watchdog.flush = lambda: events.append("flushed")
    run.steps(30)
    run.passes(20)
    assert events == ["flushed", HANG_EXIT_CODE]
    assert "(process 3 is silent for 40 s)" in caplog.messages[0]
    assert len(list((tmp_path / "hangs").iterdir())) == 1
    assert run.beat()["state"] == "hung"


def test_a_hang_ends_nothing_by_default(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run(tmp_path)
    monkeypatch.setattr(os, "_exit", lambda code: pytest.fail("ended"))
    run.steps(30)
    run.passes(20)
