"""What a run log says of a process, read back by the reader of runs."""

from __future__ import annotations

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
from mfu_jax.logger.metric_logger import MetricLogger
from mfu_jax.logger.run_log.run_log import RunLog
from mfu_jax.logger.run_log.writer import start_values
from mfu_jax.runs.goodput.attempts import read_attempts_of
from mfu_jax.runs.goodput.wall_clock import read_run
from mfu_jax.sinks import JsonlSink
from mfu_jax.storage.files import AppendOnlyFile
from tests.support.paths import ROOT

NAME = "metrics.jsonl.events.0.jsonl"


def lines(folder: Path, name: str = NAME) -> list[dict[str, Any]]:
    """Every line of a run log; each is whole."""
    for _ in range(10):  # its process may be writing
        text = (folder / name).read_bytes()
        if text.endswith(b"\n"):
            break
    whole = text.splitlines(keepends=True)
    assert all(line.endswith(b"\n") for line in whole)
    return [json.loads(line) for line in whole]


def events(folder: Path) -> list[str]:
    return [line["e"] for line in lines(folder)]


def logger_in(folder: Path, **options: Any) -> MetricLogger:
    return MetricLogger(sinks=[JsonlSink(folder / "metrics.jsonl")], **options)


def test_a_loops_steps_pauses_and_end_are_in_the_log(tmp_path: Path) -> None:
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
    assert (start["e"], start["version"], start["pid"]) == ("start", 2, os.getpid())
    assert start["began_m"] <= start["m"]
    steps = [line for line in others if line["e"] == "steps"]
    assert (steps[0]["first"], steps[0]["us"], steps[0]["kind"]) == (0, [250_000], "warmup")
    assert [us for s in steps[1:] for us in s["us"]] == [250_000] * 5
    assert [s["first"] for s in steps] == [
        sum(len(s["us"]) for s in steps[:n]) for n in range(len(steps))
    ]
    assert all(s["optimal_s"] == pytest.approx(0.001) for s in steps)
    begun, pause = [line for line in others if line["e"] == "span"]
    assert (begun["name"], "us" in begun, begun["m"]) == ("eval", False, pause["m"])
    assert (pause["name"], pause["us"] >= 20_000) == ("eval", True)
    numbers = [line["seq"] for line in lines(tmp_path)]
    assert numbers == sorted(set(numbers))
    (stop,) = [line for line in others if line["e"] == "stop"]
    assert stop["how"] == "clean"
    assert all(begin <= line["t"] <= end for line in lines(tmp_path))
    assert read_run(tmp_path).steps == 6


def test_the_first_step_is_written_at_once(tmp_path: Path) -> None:
    with logger_in(tmp_path, write_period_seconds=60.0) as logger:
        logger.record(0, {}, step_time_seconds=1.0)
        logger.record(1, {}, step_time_seconds=1.0)
        deadline = time.monotonic() + 30.0
        while not (tmp_path / NAME).exists() or "steps" not in events(tmp_path):
            assert time.monotonic() < deadline
            time.sleep(0.001)


def test_the_set_up_texts_and_totals_are_in_the_log(tmp_path: Path) -> None:
    with logger_in(tmp_path) as logger:
        logger.write_setup({"peak": 2e12, "path": Path("x")}, {"ledger": "rows"})
        logger.record(0, {"loss": 1.0})
        logger.write_text("tag", "text")
    of_kind = {line["e"]: line for line in lines(tmp_path)}
    setup, text, summary = (of_kind[kind] for kind in ("setup", "text", "summary"))
    assert (setup["values"], setup["texts"]) == ({"peak": 2e12, "path": "x"}, {"ledger": "rows"})
    assert (text["step"], text["tag"], text["text"]) == (0, "tag", "text")
    beside = json.loads((tmp_path / "metrics.jsonl.summary.json").read_text())
    assert {name: summary[name] for name in beside} == beside


def test_a_loop_that_raises_says_so(tmp_path: Path) -> None:
    logger = logger_in(tmp_path)
    logger.record(0, {})
    with pytest.raises(KeyError), logger:
        raise KeyError("loss")
    assert read_run(tmp_path).attempts[0].how == "exception: KeyError"


def test_an_instrumented_step_keeps_a_log_too(tmp_path: Path) -> None:
    step = mfu_jax.instrument(
        lambda x: x + 1, metrics_file=str(tmp_path / "metrics.jsonl"), peak_tflops_per_device=1.0
    )
    for x in range(4):
        step(float(x))
    step.close()
    run = read_run(tmp_path)
    assert (run.steps, run.attempts[0].how) == (4, "clean")
    assert run.time["compile"] > 0


def test_a_working_folder_that_is_gone_stops_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    with logger_in(tmp_path) as logger:
        logger.record(0, {"loss": 1.0}, step_time_seconds=0.25)
    assert lines(tmp_path)[0]["commit"] == ""


@pytest.mark.parametrize(
    "words",
    [
        ["webhook_url=https://a.b/SECRET"],
        ["--mfu_webhook_url", "https://a.b/SECRET"],
        ["--webhook-url=https://a.b/SECRET?c&d"],
        ["--chat=https://hooks.slack.com/services/T0/SECRET"],
        ["--chat", "https://discord.com/api/webhooks/SECRET/slack"],
    ],
)
def test_the_command_in_the_log_has_no_webhook(
    words: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "orig_argv", ["/usr/bin/python", "train.py", *words, "steps=9"])
    command = start_values(1.0, is_real=False)["command"]
    assert command.startswith("python train.py ")
    assert command.endswith(" steps=9")
    assert "***" in command
    assert "SECRET" not in command


def test_no_metrics_file_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with MetricLogger(sinks=[]) as logger:
        logger.record(0, {})
    assert not list(tmp_path.iterdir())


def test_steps_that_are_alike_share_lines(tmp_path: Path) -> None:
    with logger_in(tmp_path, warmup_steps=0) as logger:
        for step in range(750):
            logger.record(step, {}, step_time_seconds=1.0)
    assert events(tmp_path).count("steps") < 100
    assert read_run(tmp_path).steps == 750


_LOOP = """
import sys, time
from mfu_jax.logger.metric_logger import MetricLogger
from mfu_jax.logger.run_log.run_log import RunLog
from mfu_jax.sinks import JsonlSink
from mfu_jax.storage.files import AppendOnlyFile
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
import sys
from mfu_jax.logger.run_log.run_log import RunLog
log = RunLog(sys.argv[1])
log.flush()
print("open", flush=True)
sys.stdin.read()
"""


@pytest.mark.full
def test_an_overlapping_process_writes_beside_a_living_one(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen([sys.executable, "-c", _HOLDER, str(path)], cwd=ROOT, **pipes) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"open\n"
        RunLog(path).close()
        assert events_in(tmp_path, "metrics.jsonl.events.0.2.jsonl") == ["start", "stop"]
    RunLog(path).close()
    assert events(tmp_path) == ["start", "stop", "alive", "start", "stop"]


def events_in(folder: Path, name: str) -> list[str]:
    return [line["e"] for line in lines(folder, name)]


def test_lines_are_never_rewritten_and_a_torn_one_is_cut(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    first = RunLog(path)
    first.event("hosts", name="a")
    first.flush()
    before = (tmp_path / NAME).read_bytes()
    first.event("hosts", name="b")
    first.close()
    after = (tmp_path / NAME).read_bytes()
    assert after.startswith(before)
    with open(tmp_path / NAME, "ab") as file:
        file.write(b'{"e":"steps","seq":7,"t":1')
    RunLog(path).close()
    assert (tmp_path / NAME).read_bytes().startswith(after)
    assert events(tmp_path) == ["start", "hosts", "hosts", "stop", "alive", "start", "stop"]


def test_the_files_time_says_that_the_process_lives_and_the_next_one_keeps_it(
    tmp_path: Path,
) -> None:
    path = tmp_path / "metrics.jsonl"
    log = RunLog(path)
    log.flush()
    size, deadline = (tmp_path / NAME).stat().st_size, time.monotonic() + 30
    begin = time.time()
    while (tmp_path / NAME).stat().st_mtime <= begin + 0.2:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert (tmp_path / NAME).stat().st_mtime <= time.time()
    assert (tmp_path / NAME).stat().st_size == size  # a sign of life is no line
    log.close()
    os.utime(tmp_path / NAME, (begin, begin + 5.0))
    RunLog(path).close()
    (alive,) = [line for line in lines(tmp_path) if line["e"] == "alive"]
    assert alive["t"] == pytest.approx(begin + 5.0, abs=1e-5)


def test_a_log_that_was_moved_begins_again_with_its_start(tmp_path: Path) -> None:
    log = RunLog(tmp_path / "metrics.jsonl")
    log.event("hosts", name="a")
    log.flush()
    (tmp_path / NAME).rename(tmp_path / "moved")
    log.event("hosts", name="b")
    log.close()
    assert events_in(tmp_path, "moved") == ["start", "hosts"]
    assert events(tmp_path) == ["start", "hosts", "stop"]


def test_a_log_that_was_deleted_is_written_again(tmp_path: Path) -> None:
    log = RunLog(tmp_path / "run" / "metrics.jsonl")
    log.flush()
    (tmp_path / "run" / NAME).unlink()
    (tmp_path / "run").rmdir()
    log.event("hosts", name="b")
    log.close()
    assert events(tmp_path / "run") == ["start", "hosts", "stop"]


def test_a_full_disk_tears_no_line_and_loses_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mfu_jax.logger.run_log.follower.FIRST_RETRY_SECONDS", 0.01)
    log = RunLog(tmp_path / "metrics.jsonl")
    log.flush()
    written = AppendOnlyFile._write
    room = [40, 0, 13]

    def fill(file: AppendOnlyFile, piece: bytes) -> None:
        if room:
            file._file.write(piece[: room.pop()])
            os.ftruncate(file._file.fileno(), file._size)
            raise OSError(errno.ENOSPC, "no space left")
        written(file, piece)

    monkeypatch.setattr(AppendOnlyFile, "_write", fill)
    for number in range(5):
        log.event("hosts", name=number)
    deadline = time.monotonic() + 30
    while room:
        assert time.monotonic() < deadline
        log.flush()
    log.close()
    told = [line["name"] for line in lines(tmp_path) if line["e"] == "hosts"]
    assert told == [0, 1, 2, 3, 4]


def test_a_file_that_cannot_be_written_is_one_warning_and_stops_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mfu_jax.logger.run_log.writer._PATIENCE_SECONDS", 0.0)
    monkeypatch.setattr("mfu_jax.logger.run_log.follower.FIRST_RETRY_SECONDS", 0.01)
    (tmp_path / "file").touch()
    log = RunLog(tmp_path / "file" / "metrics.jsonl")
    deadline = time.monotonic() + 30
    while not caplog.messages and time.monotonic() < deadline:
        time.sleep(0.005)
    log.stop("clean")
    log.close()
    (warning,) = caplog.messages
    assert "run log failed" in warning


@pytest.mark.full
@pytest.mark.filterwarnings("ignore:os.fork")  # JAX's, which the child does not use
def test_a_fork_writes_nothing_to_its_parents_log(tmp_path: Path) -> None:
    log = RunLog(tmp_path / "metrics.jsonl")
    pid = os.fork()
    if not pid:
        log.close()
        os._exit(0)
    os.waitpid(pid, 0)
    log.close()
    assert events(tmp_path).count("stop") == 1


def test_an_object_stores_log_goes_on_after_a_restart(tmp_path: Path) -> None:
    pytest.importorskip("fsspec")
    closed = []
    for _ in range(2):
        log = RunLog("memory://logs/metrics.jsonl")
        log.stop("SIGTERM")
        log.close()
        closed.append(time.time())
    from mfu_jax.storage.addresses import Address

    lives, notes = read_attempts_of(Address("memory://logs/metrics.jsonl"))
    assert ([life.how for life in lives], notes) == (["SIGTERM", "SIGTERM"], [])
    assert lives[0].alive + lives[0].offset <= closed[0], "not the time of a download"


def test_a_process_tells_when_the_one_before_it_was_last_alive(tmp_path: Path) -> None:
    alive = []
    for _ in range(2):
        log = RunLog(tmp_path / "metrics.jsonl")
        log.stop("SIGTERM")
        log.close()
        alive.append(time.time() + 10.0)
        os.utime(tmp_path / NAME, (alive[-1], alive[-1]))
    lives, notes = read_attempts_of(tmp_path / "metrics.jsonl")
    assert ([life.how for life in lives], notes) == (["SIGTERM", "SIGTERM"], [])
    assert [life.alive + life.offset for life in lives] == pytest.approx(alive, abs=0.01)


def test_a_wait_that_lasts_is_told_while_it_does(tmp_path: Path) -> None:
    """As a kill in it leaves it."""
    path = tmp_path / "metrics.jsonl"
    with MetricLogger(sinks=[JsonlSink(path)]) as logger:
        for step in range(3):
            logger.record(step, {"loss": 1.0})
        logger.flush()  # the log is there
        begin = time.time()
        deadline = time.monotonic() + 30
        with logger.waiting("data"):
            while "span" not in events(tmp_path):
                assert time.monotonic() < deadline
                time.sleep(0.01)
            (wait,) = [line for line in lines(tmp_path) if line["e"] == "span"]
        waited = time.time() - begin
    assert wait["name"] == "data_wait"
    assert wait["t"] == pytest.approx(begin, abs=0.05)
    assert "us" not in wait
    (_, ended) = [line for line in lines(tmp_path) if line["e"] == "span"]
    assert (ended["name"], ended["m"]) == (wait["name"], wait["m"])
    assert ended["us"] / 1e6 == pytest.approx(waited, abs=0.05)


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


def test_the_setting_for_power_cuts_holds_for_events_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flushed: set[str] = set()
    flush = os.fsync

    def note(descriptor: int) -> None:
        flushed.add(os.readlink(f"/proc/self/fd/{descriptor}"))
        flush(descriptor)

    path = tmp_path / "metrics.jsonl"
    logger = MetricLogger(sinks=[JsonlSink(path, fsync_seconds=0.0)], write_period_seconds=0.0)
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", note)
        logger.record(0, {"loss": 1.0}, step_time_seconds=1.0)
        logger.record(1, {"loss": 1.0}, step_time_seconds=1.0)
        deadline = time.monotonic() + 30
        while not {str(path), str(tmp_path / NAME)} <= flushed:
            assert time.monotonic() < deadline
            time.sleep(0.001)
    logger.close()
