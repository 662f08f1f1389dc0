"""What a logger's journal says of a process, read back by the reader of runs."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

import mfu_jax
from mfu_jax.logger.journal.file import JournalFile
from mfu_jax.logger.journal.lines import MOST_STEPS
from mfu_jax.logger.journal.writer import Journal
from mfu_jax.logger.metric_logger import MetricLogger
from mfu_jax.runs.goodput.attempts import read_attempts_of
from mfu_jax.runs.goodput.wall_clock import read_run
from mfu_jax.runs.metrics.run_files import lines_at_rest
from mfu_jax.sinks import JsonlSink
from tests.support.paths import ROOT
from tests.support.work import HANG_SECONDS

NAME = "metrics.jsonl.journal.0.jsonl"


def lines(folder: Path, name: str = NAME) -> list[dict[str, Any]]:
    """Every line of a journal; each is whole."""
    with open(folder / name, "rb") as file:
        whole = lines_at_rest(file)  # its process may be writing
    assert whole[-1].endswith(b"\n")
    return [json.loads(line) for line in whole]


def events(folder: Path) -> list[str]:
    return [line["e"] for line in lines(folder)]


def logger_in(folder: Path, **options: Any) -> MetricLogger:
    return MetricLogger(sinks=[JsonlSink(folder / "metrics.jsonl")], **options)


def test_a_loops_steps_pauses_and_end_are_in_the_journal(tmp_path: Path) -> None:
    begin = time.time()
    with logger_in(
        tmp_path, model_flops_per_device=10**9, peak_flops_per_sec=1e12, warmup_steps=1
    ) as logger:
        for step in range(6):
            logger.record(step, {"loss": 1.0}, step_time_seconds=0.25)
            if step == 3:
                with logger.pause("eval"):
                    time.sleep(0.02)
    end = time.time()
    start, *others = lines(tmp_path)
    assert (start["e"], start["version"], start["pid"]) == ("start", 1, os.getpid())
    assert start["began_m"] <= start["m"]
    steps = [line for line in others if line["e"] == "steps"]
    assert [(s["first"], len(s["us"]), s.get("kind")) for s in steps] == [
        (0, 1, "warmup"),
        (1, 5, None),
    ]
    assert steps[1]["us"] == [250_000] * 5
    assert steps[1]["optimal_s"] == pytest.approx(0.001)
    (pause,) = [line for line in others if line["e"] == "span"]
    assert (pause["name"], pause["us"] >= 20_000) == ("eval", True)
    (stop,) = [line for line in others if line["e"] == "stop"]
    assert stop["how"] == "clean"
    assert all(begin <= line["t"] <= end for line in lines(tmp_path))
    assert read_run(tmp_path).steps == 6


def test_the_first_step_is_written_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with logger_in(tmp_path) as logger:
        deadline = time.monotonic() + 60.0
        while not (tmp_path / NAME).exists() or "alive" not in events(tmp_path):
            assert time.monotonic() < deadline
        monkeypatch.setattr("mfu_jax.logger.journal.process._SHORTEST_SECONDS", HANG_SECONDS)
        monkeypatch.setattr("mfu_jax.logger.journal.process._LONGEST_SECONDS", HANG_SECONDS)
        time.sleep(0.1)  # the present wait ends
        logger.record(0, {}, step_time_seconds=1.0)
        logger.record(1, {}, step_time_seconds=1.0)
        while "steps" not in events(tmp_path):
            assert time.monotonic() < deadline


def test_a_loop_that_raises_says_so(tmp_path: Path) -> None:
    logger = logger_in(tmp_path)
    logger.record(0, {})
    with pytest.raises(KeyError), logger:
        raise KeyError("loss")
    assert read_run(tmp_path).attempts[0].how == "exception: KeyError"


def test_an_instrumented_step_keeps_a_journal_too(tmp_path: Path) -> None:
    step = mfu_jax.instrument(
        lambda x: x + 1, metrics_file=str(tmp_path / "metrics.jsonl"), peak_tflops_per_device=1.0
    )
    for x in range(4):
        step(float(x))
    step.close()
    run = read_run(tmp_path)
    assert (run.steps, run.attempts[0].how) == (4, "clean")
    assert run.time["compile"] > 0


def test_no_metrics_file_no_journal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with MetricLogger(sinks=[]) as logger:
        logger.record(0, {})
    assert not list(tmp_path.iterdir())


def test_long_runs_make_few_lines(tmp_path: Path) -> None:
    with logger_in(tmp_path, warmup_steps=0) as logger:
        for step in range(3 * MOST_STEPS):
            logger.record(step, {}, step_time_seconds=1.0)
    assert events(tmp_path).count("steps") == 3
    assert read_run(tmp_path).steps == 3 * MOST_STEPS


_LOOP = """
import sys, time
from mfu_jax.logger.metric_logger import MetricLogger
from mfu_jax.sinks import JsonlSink
logger = MetricLogger(sinks=[JsonlSink(sys.argv[1])], warmup_steps=0)
for step in range(10**6):
    time.sleep(0.01)
    logger.record(step, {})
    if step == 100:
        print("hundred", flush=True)
"""


@pytest.mark.full
def test_a_sigkill_takes_the_last_write_period_only(tmp_path: Path) -> None:
    """The truth: the process' start and its kill, by this test's clock."""
    begin = time.time()
    process = subprocess.Popen(
        [sys.executable, "-c", _LOOP, str(tmp_path / "metrics.jsonl")],
        stdout=subprocess.PIPE,
        cwd=ROOT,
    )
    with process:
        assert process.stdout is not None
        process.stdout.readline()
        process.kill()
        end = time.time()
        process.wait()
    run = read_run(tmp_path, now=end + 3600)
    (attempt,) = run.attempts
    assert attempt.how == "killed"
    assert attempt.start == pytest.approx(begin, abs=0.2)
    assert attempt.end == pytest.approx(end, abs=0.2)
    assert attempt.last_step is not None
    assert attempt.last_step >= 10  # 0.5 s before step 100, on a slow machine, too


_HOLDER = """
import sys, pathlib
from mfu_jax.logger.journal.file import JournalFile
file = JournalFile(pathlib.Path(sys.argv[1]))
file.write(b'the first\\n', b"")
print("open", flush=True)
sys.stdin.read()
"""


@pytest.mark.full
def test_an_overlapping_process_writes_beside_a_living_one(tmp_path: Path) -> None:
    path = tmp_path / NAME
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen([sys.executable, "-c", _HOLDER, str(path)], cwd=ROOT, **pipes) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"open\n"
        file = JournalFile(path)
        file.write(b"the second\n", b"")
        assert file.path == tmp_path / "metrics.jsonl.journal.0.2.jsonl"
        file.close()
    again = JournalFile(path)
    again.write(b"the third\n", b"")
    again.close()
    assert path.read_text() == "the first\nthe third\n"


def test_open_lines_are_written_over_and_settled_ones_stay(tmp_path: Path) -> None:
    file = JournalFile(tmp_path / NAME)
    file.write(b"", b"open 1\n")
    file.write(b"settled\n", b"open 2\n")
    file.write(b"", b"open 2, longer\n")
    assert file.path.read_text() == "settled\nopen 2, longer\n"
    file.close()
    file.path.write_text("torn li")
    after = JournalFile(tmp_path / NAME)
    after.write(b"next\n", b"")
    after.close()
    assert file.path.read_text() == "torn li\nnext\n"


def test_lines_that_get_shorter_leave_nothing_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = JournalFile(tmp_path / NAME)
    file.write(b"", b"compiled 1, 2, 3\n", b"alive 1\n")
    cut, seen = os.ftruncate, []

    def truncate(descriptor: int, length: int) -> None:
        seen.append(file.path.read_text())
        cut(descriptor, length)

    monkeypatch.setattr(os, "ftruncate", truncate)
    file.write(b"", b"compiled 1\n", b"alive 2\n")
    file.write(b"", b"compiled 1\n", b"alive 3\n")
    assert seen == ["compiled 1\nalive 2\n     \n"], "whole lines until it is cut, once"
    assert file.path.read_text() == "compiled 1\nalive 3\n"
    file.close()


def test_settled_lines_that_a_full_disk_took_in_part_and_that_are_given_up_leave_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = JournalFile(tmp_path / NAME)
    write, left = os.pwrite, [8, 0]

    def fill(descriptor: int, text: bytes, place: int) -> int:
        if not (taken := left.pop(0)):
            raise OSError(errno.ENOSPC, "no space left")
        return write(descriptor, text[:taken], place)

    with monkeypatch.context() as full:
        full.setattr(os, "pwrite", fill)
        with pytest.raises(OSError, match="no space"):
            file.write(b"a settled line\n", b"open\n")
    file.write(b"", b"open\n")
    assert file.path.read_text() == "open\n"
    file.close()


def test_a_mark_is_written_over_the_last_line_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = JournalFile(tmp_path / NAME)
    assert not file.overwrite(b"alive 0")  # there is no line yet
    file.write(b"start\n", b"steps 1\n", b"alive 1, rest\n")
    assert file.overwrite(b"alive 2")
    assert file.path.read_text() == "start\nsteps 1\nalive 2, rest\n"
    file.write(b"", b"steps 1\n", b"alive 1, rest\n")  # as it was before the mark
    assert file.path.read_text() == "start\nsteps 1\nalive 1, rest\n"
    write = os.pwrite

    def fail(descriptor: int, text: bytes, place: int) -> int:
        return write(descriptor, text[:2], place)

    with monkeypatch.context() as broken:
        broken.setattr(os, "pwrite", fail)
        with pytest.raises(OSError, match="not written whole"):
            file.overwrite(b"ALIVE 3")
    file.write(b"steps 1\n", b"steps 2\n", b"alive 3, rest\n")
    assert file.overwrite(b"alive 4")
    assert file.path.read_text() == "start\nsteps 1\nsteps 2\nalive 4, rest\n"
    file.close()


def test_a_journal_written_anew_takes_no_mark_before_its_lines(tmp_path: Path) -> None:
    file = JournalFile(tmp_path / NAME)
    file.write(b"start\n", b"alive 1\n")
    file.path.unlink()
    file.find_again()
    assert not file.overwrite(b"alive 2")
    file.write(b"", b"alive 3\n")
    assert file.path.read_text() == "start\nalive 3\n"
    file.close()


def test_signs_of_life_tell_their_moment_and_keep_the_rest(tmp_path: Path) -> None:
    """Marks that only write the moment come between those that tell how far apart they are."""
    begin = time.time()
    journal = Journal(tmp_path / "metrics.jsonl")
    journal.waited_seconds = lambda: 1.5
    journal.has_waited = True
    seen = set()
    deadline = time.monotonic() + 60.0
    while len(seen) < 40 and time.monotonic() < deadline:
        time.sleep(0.005)
        with contextlib.suppress(FileNotFoundError, IndexError):
            last = lines(tmp_path)[-1]
            assert last["e"] in ("start", "alive")
            seen |= {(last["t"], last["m"])} if last["e"] == "alive" else set()
    assert begin <= min(seen)[0] <= max(seen)[0] <= time.time()
    assert (max(seen)[1] - min(seen)[1]) == pytest.approx(max(seen)[0] - min(seen)[0], abs=0.01)
    assert last["wait_us"] == 1_500_000
    assert last["silence_us"] > 0
    journal.close()


def test_a_journal_that_was_moved_begins_again_with_its_start(tmp_path: Path) -> None:
    file = JournalFile(tmp_path / NAME)
    file.write(b"start\nsteps 1\n", b"open\n")
    file.path.rename(tmp_path / "moved")
    file.find_again()
    file.write(b"steps 2\n", b"open\n")
    file.close()
    assert (tmp_path / "moved").read_text() == "start\nsteps 1\nopen\n"
    assert file.path.read_text() == "start\nsteps 2\nopen\n"


def test_a_journal_that_was_deleted_is_written_again(tmp_path: Path) -> None:
    file = JournalFile(tmp_path / "run" / NAME)
    file.write(b"one\n", b"open\n")
    file.path.unlink()
    file.path.parent.rmdir()
    file.find_again()
    file.write(b"two\n", b"")
    file.close()
    assert file.path.read_text() == "one\ntwo\n"


def test_a_file_that_cannot_be_written_is_one_warning_and_stops_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mfu_jax.logger.journal.writer._LOOK_SECONDS", 0.01)
    (tmp_path / "file").touch()
    journal = Journal(tmp_path / "file" / "metrics.jsonl")
    deadline = time.monotonic() + 30
    while not caplog.messages and time.monotonic() < deadline:
        time.sleep(0.005)
    journal.stop("clean")
    journal.close()
    (warning,) = caplog.messages
    assert "cannot be written" in warning


@pytest.mark.full
@pytest.mark.filterwarnings("ignore:os.fork")  # JAX's, which the child does not use
def test_a_fork_writes_nothing_to_its_parents_journal(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "metrics.jsonl")
    pid = os.fork()
    if not pid:
        journal.close()
        os._exit(0)
    os.waitpid(pid, 0)
    journal.close()
    assert events(tmp_path).count("stop") == 1


def test_an_object_stores_journal_goes_on_after_a_restart(tmp_path: Path) -> None:
    pytest.importorskip("fsspec")
    for _ in range(2):
        journal = Journal("memory://journals/metrics.jsonl")
        journal.stop("SIGTERM")
        journal.close()
    from mfu_jax.storage.addresses import Address

    lives, notes = read_attempts_of(Address("memory://journals/metrics.jsonl"))
    assert ([life.how for life in lives], notes) == (["SIGTERM", "SIGTERM"], [])


def test_all_waits_since_the_last_written_step_are_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a kill leaves them: steps on their way to the journal, and a wait that is open."""
    monkeypatch.setattr("mfu_jax.logger.delivery.builder_thread.FIRST_PERIOD_SECONDS", 30.0)
    path = tmp_path / "metrics.jsonl"
    with MetricLogger(sinks=[JsonlSink(path)], write_period_seconds=30.0) as logger:
        for step in range(3):
            with logger.waiting("data"):
                time.sleep(0.1)
            logger.record(step, {"loss": 1.0})
        with logger.waiting("data"):
            time.sleep(0.3)
            told = lines(tmp_path)[-1]["wait_us"]
        logger.flush()
        logger._journal.flush()
        noted = sum(sum(line.get("data_us", [])) for line in lines(tmp_path))
        left = lines(tmp_path)[-1]["wait_us"]
    # The first step may have been written before; the journal is up to 0.05 s behind, or more.
    assert 0.1 + 0.1 + 0.15 < told / 1e6 < 3 * 0.1 + 0.3 + 1.0
    assert noted >= 2 * 100_000
    assert left >= 300_000  # of the wait after the last step


def test_a_loop_that_goes_back_loses_the_steps_that_it_does_again(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    with MetricLogger(sinks=[JsonlSink(path)], warmup_steps=0) as logger:
        for step in (0, 1, 2, 3, 2, 3, 4):
            logger.record(step, {"loss": 1.0})
            time.sleep(0.02)
    records = [json.loads(line) for line in path.read_text().splitlines()]
    assert [record["step"] for record in records] == [0, 1, 2, 3, 2, 3, 4]
    lost = sum(record["perf/step_time_seconds"] for record in records[2:4])
    run = read_run(tmp_path)
    assert (run.steps, run.lost_steps, run.restarts) == (5, 2, 0)
    assert run.time["lost_steps"] == pytest.approx(lost, abs=1e-5)
