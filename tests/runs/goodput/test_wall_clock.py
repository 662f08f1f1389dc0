"""A run's wall clock divided; the truth is arithmetic on run logs written by hand."""

from __future__ import annotations

import itertools
import random
from pathlib import Path
from typing import Any

import pytest

from mfu_jax.errors import UserError
from mfu_jax.runs.goodput.run_time import CATEGORIES, RunTime
from mfu_jax.runs.goodput.wall_clock import read_run
from tests.support.written_logs import UNIX, WrittenLog

S = 1_000_000
LATER = UNIX + 1e6


@pytest.fixture(params=[1, 2])
def log(request: pytest.FixtureRequest, tmp_path: Path) -> WrittenLog:
    """The log of a process, as 0.1.0 wrote it and as this version does."""
    return WrittenLog(tmp_path, version=request.param)


def spent(run: RunTime) -> dict[str, float]:
    """The categories that have any time."""
    assert tuple(run.time) == tuple(CATEGORIES)
    assert sum(run.time.values()) == run.wall_seconds
    return {name: seconds for name, seconds in run.time.items() if seconds}


def first_attempt(log: WrittenLog) -> None:
    """Starts at 100, steps 0 to 9, a checkpoint, steps 10 to 12; killed after 125."""
    log.start(100.0, 102.0)
    log.line("compile", 104.0, spans=[[103.0, 1 * S]])
    waits = [0] * 5 + [S // 2] + [0] * 4
    us = [2 * S] + [S] * 9
    log.steps(119.5, 0, us, gap_us=[6 * S, *waits[1:]], data_us=waits, optimal_s=0.5)
    log.span("checkpoint", 119.5, 2.0, step=9, step_us=S)
    log.steps(124.5, 10, [S] * 3, gap_us=[2 * S, 0, 0], optimal_s=0.5)
    log.alive(125.0)


def second_attempt(log: WrittenLog) -> None:
    """Starts at 130, restores, steps 10 to 14 with a slow one, an eval; ends at 145."""
    log.start(130.0, 131.0, pid=8)
    log.span("restore", 132.0, 1.0)
    log.line("restored", 133.0, step=10)
    log.span("eval", 142.0, 2.0, step=14, step_us=S)
    log.stop(144.5)
    log.steps(142.0, 10, [S, S, 3 * S, S, S], gap_us=[4 * S, 0, 0, 0, 0], optimal_s=0.5)
    log.alive(145.0)


def test_every_second_of_a_killed_and_resumed_run(tmp_path: Path, log: WrittenLog) -> None:
    first_attempt(log)
    second_attempt(log)
    run = read_run(tmp_path, now=LATER)
    assert spent(run) == pytest.approx(
        {
            "train": 10 + 5,
            "compile": 1,
            "data_wait": 0.5,
            "eval": 2,
            "checkpoint": 2,
            "restore": 1,
            # To the first steps, less compilation and restore; the first step beyond the median.
            "startup": (8 - 1) + (5 - 1) + 1,
            # The kill is known to the mean age of a sign of life.
            "lost_steps": 3 + 0.5 + log.silence(),
            "down": 5 - log.silence(),
            "slow_steps": 2,
            "idle": 1,
        },
        abs=1e-9,
    )
    assert run.wall_seconds == pytest.approx(45)
    assert (run.steps, run.lost_steps, run.restarts) == (15, 3, 1)
    assert run.median_seconds == 1
    assert run.mfu == pytest.approx(15 * 0.5 / (11 + 7))
    assert run.goodput == pytest.approx(17 / 45)
    assert run.effective_mfu == pytest.approx(15 * 0.5 / (11 + 7) * 17 / 45)
    first, second = run.attempts
    assert (first.how, first.first_step, first.last_step) == ("killed", 0, 12)
    assert (first.steps, first.lost_steps, first.restored_step) == (10, 3, None)
    assert (second.how, second.steps, second.lost_steps, second.restored_step) == (
        "clean",
        5,
        0,
        10,
    )
    assert first.start == pytest.approx(UNIX + 100)
    assert first.end == pytest.approx(UNIX + 125 + log.silence())
    assert sum(first.time.values()) == pytest.approx(25 + log.silence())


def test_the_moments_before_a_kill_are_divided_like_the_steps_before(tmp_path: Path) -> None:
    """Half of each 2 s is a wait; 1.2 s of waits were told since the last step, at 14.6."""
    log = WrittenLog(tmp_path, version=1)
    log.start(0.0, 0.0, mark_us=200_000)
    waits = [0, *[S] * 5]
    log.steps(12.0, 0, [S] * 6, gap_us=waits, data_us=waits)
    log.alive(14.6, waited=1.2)
    run = read_run(tmp_path, now=LATER)
    share = 5 / 11
    assert run.time["data_wait"] == pytest.approx(5 + 1.2 + 0.1 * share)
    assert run.time["lost_steps"] == pytest.approx(14.7 - 12 - 1.2 - 0.1 * share)


def test_a_jump_of_the_wall_clock_between_two_starts_changes_nothing(
    tmp_path: Path, log: WrittenLog
) -> None:
    first_attempt(log)
    log.unix += 3600
    second_attempt(log)
    assert read_run(tmp_path, now=LATER).wall_seconds == pytest.approx(45)


def test_a_machine_that_booted_again_is_placed_by_the_wall_clock(
    tmp_path: Path, log: WrittenLog
) -> None:
    first_attempt(log)
    log.unix += 120  # its monotonic clock is 120 s behind the first one's
    log.start(12.0, 13.0, boot="c")
    log.steps(20.0, 10, [S] * 2)
    log.stop(20.0)
    run = read_run(tmp_path, now=LATER)
    assert run.time["down"] == pytest.approx(132 - 125 - log.silence())
    assert run.wall_seconds == pytest.approx(140 - 100)


def test_a_killed_line_costs_itself(tmp_path: Path, log: WrittenLog) -> None:
    first_attempt(log)
    whole = read_run(tmp_path, now=LATER)
    with log.path.open("a") as file:
        file.write('{"e":"steps","first":13,"us":[100')
    torn = read_run(tmp_path, now=LATER)
    assert torn.time == whole.time
    # One that is being written is torn, too; in version 1, such a line is rewritten.
    note = "metrics.jsonl.journal.0.jsonl: left out 1 broken line"
    assert torn.notes == ((note,) if log.version == 1 else ())


@pytest.mark.parametrize(
    "values",
    [
        {"us": [S, -S]},
        {"us": []},
        {"us": [1.5]},
        {"us": [S, S], "gap_us": [0]},
        {"us": [True]},
        {"us": "long"},
        {"us": [S], "first": None},
        {"us": [2**63]},  # 292,000 years, each of whose days would be added up
        {"us": [S], "t": float("nan")},
        {"us": [S], "optimal_s": [0.1]},
        {"us": [S], "executed_s": "n/a"},
    ],
)
def test_a_damaged_line_is_left_out(
    tmp_path: Path, log: WrittenLog, values: dict[str, Any]
) -> None:
    first_attempt(log)
    whole = read_run(tmp_path, now=LATER)
    log.line("steps", 124.9, **{"first": 13, **values})
    damaged = read_run(tmp_path, now=LATER)
    assert (damaged.time, len(damaged.notes)) == (whole.time, 1)


def test_a_log_of_another_version_is_one_clear_line(tmp_path: Path, log: WrittenLog) -> None:
    first_attempt(log)
    log.start(126.0, 127.0, version=3)
    log.steps(129.0, 10, [S])
    second_attempt(log)
    run = read_run(tmp_path, now=LATER)
    assert run.time["down"] == pytest.approx(5 - log.silence())
    assert len(run.notes) == 1
    assert "wrote version 3; this mfu_jax reads versions 1 and 2" in run.notes[0]


def test_a_killed_process_lived_on_as_long_as_it_says_that_it_is_silent(tmp_path: Path) -> None:
    log = WrittenLog(tmp_path, version=1)
    log.start(0.0, 1.0)
    log.steps(12.0, 0, [S] * 10)
    log.alive(14.0, silence_us=300_000)
    log.start(20.0, 20.0)
    log.alive(20.0)
    run = read_run(tmp_path, now=UNIX + 20.0)
    assert run.time["down"] == pytest.approx(20 - 14.3)


def test_a_process_killed_after_a_step_of_no_microsecond(tmp_path: Path, log: WrittenLog) -> None:
    log.start(0.0, 1.0)
    log.steps(2.0, 0, [0], gap_us=[0], data_us=[0])
    log.alive(3.0)
    run = read_run(tmp_path, now=UNIX + 20.0)
    assert (run.steps, run.attempts[0].how) == (1, "killed")
    assert spent(run)


def test_a_process_killed_in_a_pause_or_a_wait(tmp_path: Path, log: WrittenLog) -> None:
    log.start(0.0, 1.0)
    log.steps(12.0, 0, [S] * 10, gap_us=[S] + [0] * 9)
    log.span("eval", 12.0, None, step=9, step_us=S)
    log.alive_before(20.0)
    log.start(20.0, 20.0)
    log.steps(24.0, 10, [S] * 4)
    if log.version == 2:
        log.span("data_wait", 24.0, 7.0)
    log.alive_before(32.0, waited=7.0)
    log.start(32.0, 32.0)
    run = read_run(tmp_path, now=UNIX + 32.0)
    assert run.time["eval"] == pytest.approx(8)
    assert run.time["data_wait"] == pytest.approx(7)
    assert run.time["lost_steps"] == pytest.approx(1)  # of the step after that wait
    assert run.attempts[-1].how == "running"


def test_a_wait_after_a_pause_is_not_in_that_pause(tmp_path: Path, log: WrittenLog) -> None:
    log.start(0.0, 1.0)
    log.steps(12.0, 0, [S] * 10)
    log.span("eval", 12.0, 3.0)
    if log.version == 2:
        log.span("data_wait", 15.0, 2.0)
    log.alive_before(20.0, waited=2.0)
    log.start(20.0, 20.0)
    run = read_run(tmp_path, now=UNIX + 20.0)
    assert run.time["eval"] == pytest.approx(3)
    assert run.time["data_wait"] == pytest.approx(2)
    assert run.time["lost_steps"] == pytest.approx(3)


def test_the_last_step_before_a_pause_is_known_though_its_own_line_is_lost(
    tmp_path: Path, log: WrittenLog
) -> None:
    log.start(0.0, 1.0)
    log.steps(12.0, 0, [S] * 10)
    log.span("eval", 13.0, None, step=10, step_us=S)
    log.alive(14.975)
    run = read_run(tmp_path, now=LATER)
    assert (run.steps, run.attempts[0].last_step) == (11, 10)
    paused = 14.975 + log.silence() - 13
    assert spent(run) == pytest.approx({"startup": 2, "train": 11, "eval": paused})


def test_steps_that_a_checkpoint_proves_count_though_the_kill_took_their_line(
    tmp_path: Path, log: WrittenLog
) -> None:
    log.start(0.0, 1.0)
    log.steps(12.0, 0, [S] * 10)
    log.alive_before(14.5)
    log.start(15.0, 16.0)
    log.steps(20.0, 12, [S] * 2)
    log.stop(20.0)
    run = read_run(tmp_path, now=LATER)
    assert (run.steps, run.lost_steps) == (14, 0)
    assert run.time["train"] == pytest.approx(14)
    assert run.time["lost_steps"] == pytest.approx(0.5, abs=0.002)  # the step under way


def test_three_attempts_at_the_same_steps_count_them_once(tmp_path: Path, log: WrittenLog) -> None:
    for begin in (0.0, 100.0, 200.0):
        log.start(begin, begin + 1)
        log.steps(begin + 12, 5 if begin else 0, [S] * 10)
        log.alive(begin + 12)
    run = read_run(tmp_path, now=LATER)
    assert (run.steps, run.lost_steps, run.restarts) == (15, 5 + 10, 2)
    assert [attempt.steps for attempt in run.attempts] == [5, 0, 10]
    assert run.time["train"] == pytest.approx(15)


def test_a_start_from_the_first_step_after_a_clean_end_is_a_new_run(
    tmp_path: Path, log: WrittenLog
) -> None:
    for begin in (0.0, 1000.0):
        log.start(begin, begin + 1)
        log.steps(begin + 12, 0, [S] * 10)
        log.stop(begin + 12)
    run = read_run(tmp_path, now=LATER)
    assert (run.steps, run.restarts, run.wall_seconds) == (10, 0, 12)
    log.start(2000.0, 2001.0)  # one that goes on is no new run
    log.steps(2012.0, 10, [S] * 10)
    assert read_run(tmp_path, now=LATER).restarts == 1


def test_a_process_that_was_refused_or_had_nothing_to_do_is_no_attempt(
    tmp_path: Path, log: WrittenLog
) -> None:
    first_attempt(log)
    second_attempt(log)
    whole = read_run(tmp_path, now=LATER)
    beside = WrittenLog(tmp_path)
    beside.path = tmp_path / f"{log.path.stem}.2.jsonl"
    beside.start(110.0, 111.0, pid=9)
    beside.stop(111.0, "exception: UserError")
    beside.start(500.0, 501.0, pid=10)
    beside.stop(501.0)
    run = read_run(tmp_path, now=LATER)
    assert (run.time, run.restarts, run.notes) == (whole.time, whole.restarts, ())


@pytest.mark.parametrize(
    ("how", "category"),
    [
        ("exception: ValueError", "idle"),  # as where the upload after the last step fails
        ("exception: JaxRuntimeError", "lost_steps"),  # the step in flight
    ],
)
def test_what_precedes_an_exception_is_lost_only_if_a_step_failed(
    tmp_path: Path, log: WrittenLog, how: str, category: str
) -> None:
    log.start(0.0, 1.0)
    log.steps(11.0, 0, [S] * 10)
    log.stop(17.0, how)
    log.alive(17.0)
    run = read_run(tmp_path, now=LATER)
    assert spent(run) == pytest.approx({"startup": 1, "train": 10, category: 6})
    assert run.lost_steps == 0


def test_attempts_that_overlap_are_counted_once_and_told(tmp_path: Path, log: WrittenLog) -> None:
    log.start(0.0, 1.0)
    log.steps(21.0, 0, [S] * 20)
    log.stop(21.0, "SIGTERM")
    other = WrittenLog(tmp_path)
    other.path = tmp_path / f"{log.path.stem}.2.jsonl"
    other.start(11.0, 11.0, pid=8)
    other.steps(31.0, 10, [S] * 20)
    other.stop(31.0)
    run = read_run(tmp_path, now=LATER)
    assert run.wall_seconds == pytest.approx(31)
    assert (run.steps, run.lost_steps) == (30, 10)
    assert spent(run) == pytest.approx({"startup": 1, "train": 30})
    assert "started 10.0 s before the end" in run.notes[0]


def test_what_the_loop_does_around_a_pause_is_a_part_of_the_next_step(
    tmp_path: Path, log: WrittenLog
) -> None:
    """The logger's clock of a step goes on around a pause: 0.3 s before it, 0.2 s after it."""
    log.start(0.0, 1.0)
    log.span("eval", 12.3, 5.0)
    waits = [0] * 10 + [S // 2] + [0] * 9
    gaps = [0] * 10 + [5 * S + S // 2] + [0] * 9
    log.steps(28.0, 0, [S] * 10 + [3 * S // 2] + [S] * 9, gap_us=gaps, data_us=waits)
    log.stop(28.0)
    assert spent(read_run(tmp_path, now=LATER)) == pytest.approx(
        {"startup": 2, "train": 20, "slow_steps": 0.5, "eval": 5, "data_wait": 0.5}
    )


def test_days_and_processes_divide_the_same_time(tmp_path: Path) -> None:
    midnight = 1_700_006_400 - UNIX  # 2023-11-15, seconds since boot
    for process in (0, 1):
        log = WrittenLog(tmp_path, process)
        log.start(midnight - 11, midnight - 10)
        log.steps(midnight + 10 - process, 0, [S] * (20 - process))
        log.stop(midnight + 10)
    run = read_run(tmp_path, now=LATER)
    assert [day.name for day in run.days] == ["2023-11-14", "2023-11-15"]
    assert [day.wall_seconds for day in run.days] == pytest.approx([11, 10])
    assert [day.time["train"] for day in run.days] == pytest.approx([10, 10])
    assert run.days[0].goodput == pytest.approx(10 / 11)
    assert [part.time["train"] for part in run.processes] == pytest.approx([20, 19])
    assert [part.time["idle"] for part in run.processes] == pytest.approx([0, 1])


def test_a_folder_with_several_runs_or_none(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="holds no metrics file"):
        read_run(tmp_path)
    for name in ("a.jsonl", "b.jsonl"):
        (tmp_path / name).touch()
    with pytest.raises(UserError, match=r"several metrics files: a\.jsonl, b\.jsonl"):
        read_run(tmp_path)


@pytest.mark.parametrize("seed", range(40))
def test_every_microsecond_is_in_the_category_that_painting_it_gives(
    tmp_path: Path, log: WrittenLog, seed: int
) -> None:
    """The truth: an array with a category for each µs, painted over in order of precedence."""
    chance = random.Random(seed)
    canvas: list[str] = []
    durations: list[int] = []

    def paint(category: str, us: int) -> None:
        canvas.extend([category] * us)

    log.unix = 0.0
    origin = 1_000_000
    log.start(origin / 1e6, origin / 1e6)
    paint("startup", 50)
    number = 0
    over: list[tuple[int, int, str]] = []
    for _ in range(chance.randint(1, 5)):
        us, gaps, waits = [], [], []
        for _ in range(chance.randint(1, 30)):
            wait, idle = chance.choice([0, 0, 3, 11]), chance.choice([0, 0, 0, 7])
            spent_us = chance.choice([10, 10, 10, 12, 40])
            idle = idle if number or us else 0  # what comes before the first one is start-up
            paint("idle", idle)
            paint("data_wait", wait)
            if chance.random() < 0.1:
                begin = len(canvas)
                over.append((begin - chance.randint(0, 5), begin + 20, "compile"))
            durations.append(spent_us)
            paint(f"step {number + len(us)}", spent_us)
            us.append(spent_us)
            gaps.append(idle + wait)
            waits.append(wait)
        log.steps((origin + len(canvas)) / 1e6, number, us, gap_us=gaps, data_us=waits)
        number += len(us)
        if chance.random() < 0.5:
            begin = len(canvas)
            paint("idle", 25)
            over.append((begin, begin + 25, chance.choice(["eval", "checkpoint", "profile"])))
    paint("idle", 30)
    log.stop((origin + len(canvas)) / 1e6)
    for begin, end, name in over:
        if name == "compile":
            m = (origin + begin) / 1e6
            log.line("compile", m, spans=[[m, end - begin]])
        else:
            log.span(name, (origin + begin) / 1e6, (end - begin) / 1e6)
    end_of_all = len(canvas)
    for begin, end, name in sorted(over, key=lambda o: o[2] != "compile"):
        canvas[begin : min(end, end_of_all)] = [name] * (min(end, end_of_all) - begin)

    measured = sorted(durations[1:])
    median = measured[(len(measured) + 1) // 2 - 1] if measured else 0
    wanted = dict.fromkeys(CATEGORIES, 0)
    for category, group in itertools.groupby(sorted(canvas)):
        count = len(list(group))
        if not category.startswith("step"):
            wanted[category] += count
            continue
        wanted["train"] += min(count, median)
        rest = "startup" if category == "step 0" else "slow_steps"
        wanted[rest] += max(0, count - median)
    run = read_run(tmp_path, now=LATER)
    assert {name: round(1e6 * seconds) for name, seconds in run.time.items()} == wanted
