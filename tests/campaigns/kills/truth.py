"""Where the wall clock of a killed job went, by the job's own marks and the killer's log alone."""

from __future__ import annotations

import contextlib
import json
import os
import threading
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from mfu_jax.runs.goodput.run_time import CATEGORIES


class Marks:
    """The job's own log: ``unix seconds, event, number`` in one write each."""

    def __init__(self, path: Path) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def mark(self, event: str, number: int = -1, at: float | None = None) -> None:
        os.write(self._file, f"{at or time.time():.6f} {event} {number}\n".encode())

    def listen_to_jax(self) -> None:
        """Marks every stage of every compilation of this thread, with its µs."""
        import jax

        thread = threading.get_ident()

        def note(name: str, seconds: float, **details: Any) -> None:
            if "/jax/core/compile/" in name and threading.get_ident() == thread:
                self.mark("compiled", round(1e6 * seconds))

        jax.monitoring.register_event_duration_secs_listener(note)

    @contextlib.contextmanager
    def within(self, timed: AbstractContextManager[object], name: str) -> Iterator[None]:
        """A span just within one that the job times: to write its end is not in that one's time."""
        with timed:
            self.mark(f"+{name}")
            yield
            end = time.time()
        self.mark(f"-{name}", at=end)

    @contextlib.contextmanager
    def span(self, name: str, number: int = -1) -> Iterator[None]:
        self.mark(f"+{name}", number)
        yield
        self.mark(f"-{name}", number)


@dataclass
class Seen:
    """One process, as the killer and its own marks have it; unix seconds.

    Attributes:
        start: before it was forked.
        killed: when it got SIGKILL; None: it ended by itself.
        end: when it was gone.
        marks: time, event, number.
        told: the name of the signal that it was sent while it lived; empty: none.
    """

    start: float
    killed: float | None = None
    end: float = 0.0
    marks: list[tuple[float, str, int]] = field(default_factory=list)
    told: str = ""

    @property
    def steps(self) -> list[int]:
        """Number of every completed step."""
        return [number for _, event, number in self.marks if event == "-step"]


def write_log(path: Path, seen: list[list[Seen]]) -> None:
    """Keeps what the killer saw, so that a campaign can go on."""
    new = path.with_suffix(".new")
    new.write_text(json.dumps([[asdict(one) for one in attempts] for attempts in seen]))
    new.replace(path)


def read_log(path: Path) -> list[list[Seen]]:
    """The same of each process; empty if there is no such file."""
    if not path.exists():
        return []
    return [[Seen(**one) for one in attempts] for attempts in json.loads(path.read_text())]


def truth_of(attempts: list[Seen]) -> dict[str, float]:
    """Seconds by category of one process of the job, from marks and the killer's log alone."""
    spent = dict.fromkeys(CATEGORIES, 0.0)
    redone = float("inf")
    first_of_next: dict[int, float] = {}
    for index in range(len(attempts) - 1, -1, -1):
        first_of_next[index] = redone
        if attempts[index].steps:
            redone = min(redone, attempts[index].steps[0])
    divided = [_divide(seen, spent) for seen in attempts]
    kept = [
        seconds
        for index, steps in enumerate(divided)
        for number, seconds in steps[1:]
        if number < first_of_next[index]
    ]
    median = sorted(kept)[(len(kept) - 1) // 2] if kept else 0.0
    for index, steps in enumerate(divided):
        if index:
            spent["down"] += attempts[index].start - attempts[index - 1].end
        for place, (number, seconds) in enumerate(steps):
            if number >= first_of_next[index]:
                spent["lost_steps"] += seconds
            else:
                spent["train"] += min(seconds, median)
                spent["slow_steps" if place else "startup"] += max(0.0, seconds - median)
    return spent


def _divide(seen: Seen, spent: dict[str, float]) -> list[tuple[int, float]]:
    """Adds what is no step of one process; returns the number and the seconds of each step.

    A step lasts from the mark that ends the one before it, without the waits and pauses within.
    """
    steps: list[tuple[int, float]] = []
    now, inside, of_step = seen.start, "", 0.0
    compiled = _union([(at - us / 1e6, at) for at, event, us in seen.marks if event == "compiled"])
    for at, event, number in [*seen.marks, (seen.end, "end", -1)]:
        if event in ("compiled", "exit"):
            continue
        begin, now = now, at
        if inside not in ("", "step"):
            spent[inside] += at - begin
        else:
            over = sum(max(0.0, min(at, b) - max(begin, a)) for a, b in compiled)
            spent["compile"] += over
            of_step += at - begin - over
        if event == "-step":
            steps.append((number, of_step))
            of_step = 0.0
        elif event == "+step" and not steps:
            spent["startup"] += of_step
            of_step = 0.0
        inside = event[1:] if event[0] == "+" else ""
    rest = "idle" if seen.killed is None else "lost_steps"
    spent[rest if steps else "startup"] += of_step
    return steps


def _union(spans: list[tuple[float, float]]) -> list[tuple[float, float]]:
    """The same time in spans that do not overlap."""
    joined: list[tuple[float, float]] = []
    for begin, end in sorted(spans):
        if joined and begin <= joined[-1][1]:
            joined[-1] = joined[-1][0], max(joined[-1][1], end)
        else:
            joined.append((begin, end))
    return joined
