"""Run logs, as readers divide them into attempts."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from mfu_jax.runs.goodput.attempts import read_attempts_of
from mfu_jax.runs.goodput.wall_clock import read_run
from tests.support.written_logs import UNIX, WrittenLog

S = 1_000_000
LATER = UNIX + 1e6


def test_a_process_that_goes_back_loses_the_steps_that_it_does_again(tmp_path: Path) -> None:
    log = WrittenLog(tmp_path)
    log.start(0.0, 1.0)
    log.steps(12.0, 0, [S] * 10)
    log.span("restore", 12.5, 2.0)
    log.line("back", 14.6, step=4)
    log.steps(25.0, 4, [S] * 10)
    log.stop(25.0)
    run = read_run(tmp_path, now=LATER)
    assert (run.steps, run.lost_steps, run.restarts, run.wall_seconds) == (14, 6, 0, 25)
    assert {k: v for k, v in run.time.items() if v} == pytest.approx(
        {"startup": 2, "train": 14, "lost_steps": 6, "restore": 2, "idle": 1}
    )
    assert [(attempt.how, attempt.steps) for attempt in run.attempts] == [
        ("went back", 4),
        ("clean", 10),
    ]


def test_a_pause_told_before_the_way_back_belongs_to_the_steps_after_it(tmp_path: Path) -> None:
    log = WrittenLog(tmp_path)
    log.start(0.0, 1.0)
    log.steps(12.0, 0, [S] * 11)
    log.span("restore", 12.0, 2.0, step=10, step_us=S)
    log.span("eval", 22.0, 1.0, step=12, step_us=S)
    log.line("back", 23.1, step=5)
    log.steps(22.0, 5, [S] * 8)
    log.stop(23.2)
    run = read_run(tmp_path, now=LATER)
    assert (run.steps, run.lost_steps) == (13, 6), "0 to 12; 5 to 10 twice"


def test_a_pause_has_a_line_when_it_begins_and_one_when_it_has_ended(tmp_path: Path) -> None:
    log = WrittenLog(tmp_path)
    log.start(0.0, 1.0)
    log.span("eval", 2.0, None)
    log.span("eval", 2.0, 3.0)
    log.span("eval", 6.0, None)
    log.alive(10.0)
    (attempt,), notes = read_attempts_of(tmp_path / "metrics.jsonl")
    assert attempt.spans == [("eval", 2.0, 5.0), ("eval", 6.0, None)]
    assert notes == []


def test_a_long_wait_for_data_counts_once(tmp_path: Path) -> None:
    """The step after it has its time, too."""
    log = WrittenLog(tmp_path)
    log.start(0.0, 1.0)
    log.steps(12.0, 0, [S] * 10)
    log.span("data_wait", 12.0, None)
    log.span("data_wait", 12.0, 5.0)
    log.steps(18.0, 10, [S], gap_us=[5 * S], data_us=[5 * S])
    log.span("data_wait", 18.0, None)
    log.span("data_wait", 18.0, 2.0)
    log.span("eval", 20.0, 3.0)
    log.span("data_wait", 24.0, None)
    log.alive(30.0)
    run = read_run(tmp_path, now=LATER)
    (attempt,), _ = read_attempts_of(tmp_path / "metrics.jsonl")
    assert attempt.spans == [
        ("data_wait", 18.0, 20.0),
        ("eval", 20.0, 23.0),
        ("data_wait", 24.0, None),
    ]
    until = 30 + log.silence()
    assert {k: v for k, v in run.time.items() if v} == pytest.approx(
        {"startup": 2, "train": 11, "data_wait": 5 + 2 + until - 24, "eval": 3, "lost_steps": 1}
    )


def test_short_waits_before_a_kill_are_assumed_to_have_gone_on(tmp_path: Path) -> None:
    """Steps of 0.06 s, each after a wait of 0.04 s; a kill 0.5 s after the last known one."""
    log = WrittenLog(tmp_path)
    log.start(0.0, 1.0)
    wait, us = S // 25, [60_000] * 100
    log.steps(12.0, 0, us, gap_us=[wait] * 100, data_us=[wait] * 100)
    log.alive_before(12.5)
    run = read_run(tmp_path, now=LATER)
    assert run.time["lost_steps"] == pytest.approx(0.3, abs=0.005)
    log.alive_before(62.5)  # in a step that hangs
    run = read_run(tmp_path, now=LATER)
    assert run.time["lost_steps"] == pytest.approx(50.3, abs=0.4)


def test_the_time_of_the_file_is_a_sign_of_life(tmp_path: Path) -> None:
    log = WrittenLog(tmp_path)
    log.start(0.0, 1.0)
    log.steps(1000.0, 0, [S] * 10)

    def ends_at(modified: float) -> float:
        os.utime(log.path, (UNIX, UNIX + modified))
        (attempt,), _ = read_attempts_of(tmp_path / "metrics.jsonl")
        assert attempt.silence_seconds == 0.5
        return attempt.alive

    assert ends_at(1050.0) == 1050.0
    assert ends_at(950.0) == ends_at(1000.0 + 120.5) == 1000.0, "that of a copy means nothing"


def test_the_next_process_tells_when_the_one_before_it_was_alive(tmp_path: Path) -> None:
    log = WrittenLog(tmp_path)
    log.start(0.0, 1.0)
    log.steps(100.0, 0, [S] * 10)
    with log.path.open("a") as file:
        file.write(json.dumps({"e": "alive", "t": UNIX + 150.0}) + "\n")
    log.start(200.0, 201.0)
    first, second = read_attempts_of(tmp_path / "metrics.jsonl")[0]
    assert (first.alive, second.began) == (150.0, 200.0)


def test_steps_of_many_lines_are_few_blocks(tmp_path: Path) -> None:
    """A line each half second; two of them lie 0.25 s apart, and the last has another cost."""
    log = WrittenLog(tmp_path)
    log.start(0.0, 1.0)
    us, data = [90_000] * 5, [10_000] * 5
    for line in range(100):
        end = 12.0 + line / 2 + (0.25 if line >= 70 else 0.0)
        cost = {"optimal_s": 0.02} if line == 99 else {}
        log.steps(end, 5 * line, us, gap_us=data, data_us=data, **cost)
    log.stop(70.0)
    (attempt,), _ = read_attempts_of(tmp_path / "metrics.jsonl")
    assert [(block.first, block.last) for block in attempt.blocks] == [
        (0, 254),
        (255, 494),
        (495, 499),
    ]
    assert attempt.blocks[1].spent_us == 240 * 100_000 + 250_000
    run = read_run(tmp_path, now=LATER)
    assert (run.steps, run.time["idle"]) == (500, pytest.approx(0.25 + 70 - 61.75))


@pytest.mark.parametrize(
    ("first", "numbers"),
    [(20, [0, 10, 20]), (21, [0, 10]), (5, [0, 10])],
)
def test_only_steps_that_continue_a_block_are_added_to_it(
    tmp_path: Path, first: int, numbers: list[int]
) -> None:
    log = WrittenLog(tmp_path)
    log.start(0.0, 1.0)
    log.steps(2.0, 0, [S])
    log.steps(3.0, 10, [S])
    log.steps(4.0, first, [S])
    (attempt,), _ = read_attempts_of(tmp_path / "metrics.jsonl")
    block = attempt.blocks[0]
    assert list(range(block.first, block.last + 1, block.by)) == numbers


def test_a_run_that_was_begun_by_an_older_version(tmp_path: Path) -> None:
    old, new = WrittenLog(tmp_path, version=1), WrittenLog(tmp_path)
    old.start(0.0, 1.0)
    old.steps(12.0, 0, [S] * 10)
    old.stop(12.0, "SIGTERM")
    new.start(20.0, 21.0)
    new.steps(32.0, 10, [S] * 10)
    new.stop(32.0)
    run = read_run(tmp_path, now=LATER)
    assert (run.steps, run.restarts, run.lost_steps) == (20, 1, 0)
    assert {k: v for k, v in run.time.items() if v} == {"train": 20, "startup": 4, "down": 8}
    assert [attempt.how for attempt in run.attempts] == ["SIGTERM", "clean"]


def test_lines_cut_the_time_between_two_signs_of_life(tmp_path: Path) -> None:
    """After 160 s a sign comes every 0.2 s; a line every 0.3 s leaves silences of 0.2 and 0.1 s."""
    log = WrittenLog(tmp_path)
    log.start(0.0, 160.0)
    for number in range(1, 6):
        log.steps(160.0 + 0.3 * number, number, [S])

    def silence() -> float:
        (attempt,), _ = read_attempts_of(tmp_path / "metrics.jsonl")
        assert attempt.silence_seconds == pytest.approx(log.silence(), abs=1e-6)
        return attempt.silence_seconds

    assert silence() == pytest.approx((0.2**2 + 0.1**2) / (2 * 0.3), rel=0.1)
    for number in range(6, 106):  # many lines at once say nothing about the next silence
        log.steps(161.5 + 0.0001 * number, number, [S])
    assert silence() == pytest.approx((0.2**2 + 0.1**2) / (2 * 0.3), rel=0.1)
