"""`mfu-jax watch`: one frame of a run, and a terminal that follows it."""

import json
import os
import pty
import select
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from mfu_jax.cli import main
from mfu_jax.runs.live import frame as frames
from mfu_jax.sinks import JsonlSink, StepRecord
from tests.support.paths import ROOT
from tests.support.work import HANG_SECONDS
from tests.support.written_logs import WrittenLog


def write(folder: Path, steps: range, *, flags: tuple[str, ...] = (), **scalars: float) -> Path:
    path = folder / "metrics.jsonl"
    sink = JsonlSink(path, resume_from_step=steps.start)
    for step in steps:
        values = {
            "perf/step_time_seconds": 2.0,
            "perf/mfu": 0.5,
            "learning/loss": 3.25,
            "goodput/data_wait_seconds": 0.5,
            **scalars,
        }
        note = ("loss 9.9 is a spike\x1b[2J",) if step == 3 else ()
        record = StepRecord(
            step=step, unix_seconds=time.time(), scalars=values, notes=note, flags=flags
        )
        sink.write(record)
    sink.close()
    return path


def shown(capsys: pytest.CaptureFixture[str], *arguments: Any) -> list[str]:
    assert main(["watch", *map(str, arguments)]) == 0
    return capsys.readouterr().out.splitlines()


def test_a_step_as_long_as_a_float_goes_is_drawn(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write(tmp_path, range(1), **{"perf/step_time_seconds": 1e308})
    assert any("train 100.0%" in line for line in shown(capsys, tmp_path, "--once"))


def test_one_frame_in_80_columns(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(tmp_path / "run7", range(12))
    lines = shown(capsys, tmp_path / "run7", "--once")
    assert all(len(line) <= 80 for line in lines)
    assert lines[0].startswith("run7: step 11, ")
    assert "mean of 12 steps: MFU 50.0%, 2.000 s a step" in lines[1]
    assert lines[2].startswith("50.0% MFU; no published run is like it; largest loss: inside ")
    rows = [line.split() for line in lines if line.strip().startswith("11 ")]
    assert rows == [["11", "2.000", "50.0%", "3.250"]]
    # 12 × 2 s of steps, 12 × 0.5 s of waiting: 80% and 20%.
    assert any("train 80.0%, data_wait 20.0%" in line for line in lines)
    assert any("step 3: loss 9.9 is a spike [2J" in line for line in lines)
    assert "\x1b" not in "".join(lines)


def test_no_line_ends_within_the_name_of_the_command(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    write(Path("a" * 22), range(4))
    lines = shown(capsys, "a" * 22, "--once")
    step = next(i for i, line in enumerate(lines) if line.startswith("next: "))
    assert lines[step + 1].startswith("mfu-jax profile ")


def test_the_chip_the_total_and_a_fall_of_the_mfu_are_shown(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write(tmp_path, range(40), **{"perf/mfu": 0.137})
    write(tmp_path, range(40, 48), **{"perf/mfu": 0.021})
    log = WrittenLog(tmp_path)
    log.start(0.0, 1.0)
    log.line("setup", 1.0, values={"devices": "8 × H100"}, texts={"config": "steps=108 a=1"})
    lines = shown(capsys, tmp_path, "--once")
    assert lines[0].partition(",")[0].endswith(": step 47 of 108")
    assert lines[1].endswith("2.000 s a step, 2 min to go")
    assert lines[2] == "8 × H100"  # without a peak in the log
    assert lines[3] == "MFU has fallen from 13.7% to 2.1% in the last 8 steps"
    (tmp_path / "heartbeat.json").write_text('{"state": "ended"}')
    assert "to go" not in "".join(shown(capsys, tmp_path, "--once"))


def test_a_fall_that_lasts_stays_an_alarm(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write(tmp_path, range(40), **{"perf/mfu": 0.137})
    write(tmp_path, range(40, 150), **{"perf/mfu": 0.021})
    assert "MFU has fallen from 13.7% to 2.1%" in "\n".join(shown(capsys, tmp_path, "--once"))


def test_the_frame_as_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(tmp_path, range(40), **{"perf/mfu": 0.137})
    write(tmp_path, range(40, 48), **{"perf/mfu": 0.021})
    log = WrittenLog(tmp_path)
    log.start(0.0, 1.0)
    values = {"devices": "8 × H100", "peak of one device": "989 TFLOP/s/device in bf16 (table: x)"}
    log.line("setup", 1.0, values=values, texts={"config": "steps=108 a=1"})
    found = json.loads("\n".join(shown(capsys, tmp_path, "--once", "--json")))
    assert (found["state"], found["step"], found["steps"]) == ("running", 47, 108)
    assert found["seconds_left"] == 60 * 2.0
    assert found["median"] == {"steps": 48, "mfu": 0.137, "hfu": None, "step_time_seconds": 2.0}
    assert (found["devices"], found["peak"]) == ("8 × H100", "989 TFLOP/s/device in bf16")
    assert found["seconds_by_use"] == {"train": 96.0, "data_wait": 24.0}
    assert [alarm["text"] for alarm in found["alarms"]] == [
        "MFU has fallen from 13.7% to 2.1% in the last 8 steps",
        "loss 9.9 is a spike\x1b[2J",
    ]
    assert found["verdict"]["mfu"] == pytest.approx((40 * 0.137 + 8 * 0.021) / 48)
    (tmp_path / "new").mkdir()
    (tmp_path / "new" / "metrics.jsonl").touch()
    found = json.loads("\n".join(shown(capsys, tmp_path / "new", "--json")))
    assert (found["state"], found["step"]) == ("waiting", None)


def test_impossible_steps_are_named_by_watch_and_report_and_are_no_fall(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write(tmp_path, range(4), flags=("hfu_over_1",), **{"perf/mfu": 71.0})
    write(tmp_path, range(4, 16), **{"perf/mfu": 0.2})
    lines = shown(capsys, tmp_path, "--once")
    assert "has fallen" not in "".join(lines)
    assert "impossible numbers (hfu_over_1 in 4 steps); " in "".join(lines)
    assert main(["report", str(tmp_path)]) == 0
    assert capsys.readouterr().out.startswith("impossible numbers (hfu_over_1 in 4 steps); ")


def test_a_folder_of_runs_is_not_waited_for(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write(tmp_path / "a", range(3))
    assert main(["watch", str(tmp_path)]) == 2
    assert (
        f"it is the folder of 1 run; pass one, such as {tmp_path / 'a'}" in capsys.readouterr().err
    )


def test_a_loss_that_is_not_finite_leads_the_verdict(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write(tmp_path, range(4), **{"learning/loss": float("nan")})
    assert "the training loss is nan; 50.0% MFU" in "".join(shown(capsys, tmp_path, "--once"))
    assert main(["report", str(tmp_path)]) == 0
    assert capsys.readouterr().out.startswith("the training loss is nan; 50.0% MFU")


def test_the_state_is_the_heartbeats(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(tmp_path, range(3))
    for state, text in (("ended", "step 2, ended"), ("hung", "HANGS, last step")):
        (tmp_path / "heartbeat.json").write_text(json.dumps({"state": state}))
        assert text in shown(capsys, tmp_path, "--once")[0]


def test_a_run_whose_log_says_that_it_ended_is_not_late(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write(tmp_path, range(3))
    log = WrittenLog(tmp_path)
    log.start(0.0, 1.0)
    log.line("stop", 9.0, how="clean")
    assert "step 2, ended" in shown(capsys, tmp_path, "--once")[0]
    log.start(20.0, 21.0)  # it goes on
    assert "ended" not in shown(capsys, tmp_path, "--once")[0]


def test_a_run_that_ended_has_the_time_before_its_first_step(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write(tmp_path, range(3))  # 6 s of steps, 1.5 s of waiting
    (tmp_path / "heartbeat.json").write_text('{"state": "ended"}')
    uses = {"train": 6.0, "compile": 12.5, "data_wait": 1.5}
    path.with_name("metrics.jsonl.summary.json").write_text(json.dumps({"seconds_by_use": uses}))
    text = " ".join(shown(capsys, tmp_path, "--once"))
    assert "largest loss: compilation, 62.5% of the process, 12.5 s;" in text
    assert "compile 62.5%, train 30.0%, data_wait 7.5%" in text


def test_slow_and_missing_hosts_have_a_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write(tmp_path, range(3))
    slow = [{"process": 3, "cause": "data", "text": "process 3 (n3) is slow: data"}]
    hosts = [{"process": 3, "host": "n3", "step": 2}]
    view = {"step": 2, "processes": 8, "missing": [5, 6], "slow": slow, "hosts": hosts}
    path.with_name("metrics.jsonl.hosts.json").write_text(json.dumps(view))
    lines = shown(capsys, tmp_path, "--once")
    start = next(number for number, line in enumerate(lines) if line.startswith("hosts"))
    assert [line.strip() for line in lines[start : start + 4]] == [
        "hosts   8 processes at step 2: 1 slow, 2 missing",
        "process 3 (n3) is slow: data",
        "process 5 is missing: never heard",
        "process 6 is missing: never heard",
    ]


def test_a_run_without_a_step_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "metrics.jsonl").touch()
    assert "no step yet" in shown(capsys, tmp_path, "--once")[0]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nowhere"], "has no metrics file"),
        (["nowhere", "intervall=1"], "unknown key 'intervall'"),
        (["nowhere", "interval=0"], "interval=0: expected 0.1 to 3600 s"),
        (["nowhere", "interval=1e-9"], "interval=1e-9: expected 0.1 to 3600 s"),
        (["nowhere", "interval=nan"], "interval=nan: expected 0.1 to 3600 s"),
        (["nowhere", "interval=1e300"], "interval=1e300: expected 0.1 to 3600 s"),
        (["nowhere", "interval=-1"], "interval=-1: expected 0.1 to 3600 s"),
        ([], "usage: mfu-jax watch"),
    ],
)
def test_wrong_arguments(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["watch", *arguments]) == 2
    captured = capsys.readouterr()
    assert message in captured.out + captured.err


@pytest.mark.full
def test_a_terminal_follows_a_run_that_grows(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    ours, theirs = pty.openpty()
    command = [sys.executable, "-m", "mfu_jax.cli", "watch", str(tmp_path), "interval=0.1"]
    environment = {**os.environ, "TERM": "xterm", "COLUMNS": "80", "LINES": "40"}
    process = subprocess.Popen(command, stdout=theirs, stderr=theirs, cwd=ROOT, env=environment)
    os.close(theirs)
    try:
        assert read_until(ours, b"no step yet")
        write(path.parent, range(3))
        assert read_until(ours, b"step 2")
        write(path.parent, range(3, 9))
        assert read_until(ours, b"step 8")
    finally:
        process.kill()
        process.wait()
        os.close(ours)


def read_until(terminal: int, text: bytes) -> bool:
    deadline, seen = time.monotonic() + HANG_SECONDS, b""
    while text not in seen and time.monotonic() < deadline:
        if select.select([terminal], [], [], 1.0)[0]:
            seen += os.read(terminal, 1 << 16)
    return text in seen


def test_the_bar_of_uses_adds_up() -> None:
    assert frames.sparkline([0.0, 7.0], 2) == "▁█"
    assert frames.sparkline(list(range(8)), 8) == "▁▂▃▄▅▆▇█"
    assert frames.sparkline([float("nan")], 5) == " "
