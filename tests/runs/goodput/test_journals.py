"""Journals of processes that went back to an earlier step, as readers divide them."""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path

import pytest
from mfu_jax.logger.journal.file import JournalFile

from mfu_jax.runs.goodput.journals import lines_at_rest
from mfu_jax.runs.goodput.wall_clock import read_run
from tests.support.written_journals import UNIX, WrittenJournal

S = 1_000_000
LATER = UNIX + 1e6


def test_a_process_that_goes_back_loses_the_steps_that_it_does_again(tmp_path: Path) -> None:
    journal = WrittenJournal(tmp_path)
    journal.start(0.0, 1.0)
    journal.steps(12.0, 0, [S] * 10)
    journal.span("restore", 12.5, 2.0)
    journal.line("back", 14.6, step=4)
    journal.steps(25.0, 4, [S] * 10)
    journal.stop(25.0)
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
    journal = WrittenJournal(tmp_path)
    journal.start(0.0, 1.0)
    journal.steps(12.0, 0, [S] * 11)
    journal.span("restore", 12.0, 2.0, step=10, step_us=S)
    journal.span("eval", 22.0, 1.0, step=12, step_us=S)
    journal.line("back", 23.1, step=5)
    journal.steps(22.0, 5, [S] * 8)
    journal.stop(23.2)
    run = read_run(tmp_path, now=LATER)
    assert (run.steps, run.lost_steps) == (13, 6), "0 to 12; 5 to 10 twice"


class OvertakenFile(io.FileIO):
    """While it is read for the first time, its process writes."""

    def __init__(self, path: Path, writes: list[Callable[[], None]]) -> None:
        super().__init__(path)
        self._writes = writes

    def readlines(self, hint: int | None = -1, /) -> list[bytes]:
        head = self.read(20)
        if self._writes:
            self._writes.pop()()
        return (head + self.read()).splitlines(keepends=True)


def test_lines_that_change_while_they_are_read_are_read_again(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    journal = JournalFile(path)
    journal.write(b"", b'{"e":"alive","m":1}\n', b'{"e":"alive","m":2}\n')
    settled = b'{"e":"steps","first":0,"us":[250000]}\n'
    open_line = b'{"e":"alive","m":3}\n'
    with OvertakenFile(path, [lambda: journal.write(settled, open_line)]) as file:
        assert lines_at_rest(file) == [settled, open_line]
    journal.close()


def test_lines_that_change_all_the_time_are_read_all_the_same(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    path.write_bytes(b"{}\n")

    def grow() -> None:
        with path.open("ab") as file:
            file.write(b"{}\n")

    with OvertakenFile(path, [grow] * 1000) as file:
        assert set(lines_at_rest(file)) == {b"{}\n"}
