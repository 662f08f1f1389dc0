"""Run logs written line by line, for readers; seconds since boot are the only clock."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

UNIX = 1_700_000_000.0  # 2023-11-14 22:13:20 UTC, less the seconds since boot


class WrittenLog:
    """The log of one process; each method adds a line.

    Args:
        folder: of the run.
        process: number of the process.
        version: 1 for a journal of mfu_jax 0.1.0.
    """

    def __init__(self, folder: Path, process: int = 0, version: int = 2) -> None:
        kind = "journal" if version == 1 else "events"
        self.path = folder / f"metrics.jsonl.{kind}.{process}.jsonl"
        self.version = version
        self.unix = UNIX
        self._process = process
        self._number = 0

    def line(self, event: str, m: float, **values: Any) -> None:
        number = {} if self.version == 1 else {"seq": self._number}
        head = {"e": event, **number, "t": self.unix + m, "m": m}
        self._number += 1
        with self.path.open("a") as file:
            file.write(json.dumps({**head, **values}, separators=(",", ":")) + "\n")

    def start(self, began: float, m: float, **values: Any) -> None:
        known = {"version": self.version, "process": self._process, "processes": 1, "host": "a"}
        more = {"pid": 7, "boot": "b", "began_m": began}
        mark = {"mark_us": 50_000} if self.version == 1 else {}
        self._number = 0
        self.line("start", m, **{**known, **more, **mark, **values})

    def steps(self, end: float, first: int, us: list[int], **values: Any) -> None:
        self.line("steps", end, first=first, us=us, **values)

    def span(self, name: str, begin: float, seconds: float | None, **values: Any) -> None:
        more = {} if seconds is None else {"us": round(1e6 * seconds)}
        self.line("span", begin, name=name, **values, **more)

    def alive(self, m: float, waited: float = 0.0, **values: Any) -> None:
        """Version 1: with the wait for data since the last step."""
        waits = {"wait_us": round(1e6 * waited)} if self.version == 1 else {}
        self.line("alive", m, **waits, **values)

    def stop(self, m: float, how: str = "clean") -> None:
        self.line("stop", m, how=how)

    def silence(self, age: float) -> float:
        """Seconds that a process of that age lived after its last sign of life, on average."""
        return 0.025 if self.version == 1 else min(max(0.05, 0.02 * age), 1.0) / 2
