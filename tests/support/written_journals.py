"""Journals written line by line, for readers; seconds since boot are the only clock."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

UNIX = 1_700_000_000.0  # 2023-11-14 22:13:20 UTC, less the seconds since boot


class WrittenJournal:
    """The journal of one process; each method adds a line.

    Args:
        folder: of the run.
        process: number of the process.
    """

    def __init__(self, folder: Path, process: int = 0) -> None:
        self.path = folder / f"metrics.jsonl.journal.{process}.jsonl"
        self._process = process
        self.unix = UNIX

    def line(self, event: str, m: float, **values: Any) -> None:
        with self.path.open("a") as file:
            file.write(json.dumps({"e": event, "t": self.unix + m, "m": m, **values}) + "\n")

    def start(self, began: float, m: float, **values: Any) -> None:
        known = {"version": 1, "process": self._process, "processes": 1, "host": "a", "pid": 7}
        more = {"boot": "b", "began_m": began, "mark_us": 50_000}
        self.line("start", m, **{**known, **more, **values})

    def steps(self, end: float, first: int, us: list[int], **values: Any) -> None:
        self.line("steps", end, first=first, us=us, **values)

    def span(self, name: str, begin: float, seconds: float | None, **values: Any) -> None:
        more = {} if seconds is None else {"us": round(1e6 * seconds)}
        self.line("span", begin, name=name, **values, **more)

    def alive(self, m: float, waited: float = 0.0, **values: Any) -> None:
        self.line("alive", m, wait_us=round(1e6 * waited), **values)

    def stop(self, m: float, how: str = "clean") -> None:
        self.line("stop", m, how=how)
