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
        self._began = self._alive = 0.0
        self._silences: list[list[tuple[float, float]]] = []  # of each start: weight, seconds

    def line(self, event: str, m: float, **values: Any) -> None:
        number = {} if self.version == 1 else {"seq": self._number}
        head = {"e": event, **number, "t": self.unix + m, "m": m}
        self._number += 1
        if event != "start":
            self._add_silences(m)
        self._alive = max(self._alive, m + (values.get("us", 0) / 1e6 if event == "span" else 0.0))
        with self.path.open("a") as file:
            file.write(json.dumps({**head, **values}, separators=(",", ":")) + "\n")

    def start(self, began: float, m: float, **values: Any) -> None:
        known = {"version": self.version, "process": self._process, "processes": 1, "host": "a"}
        more = {"pid": 7, "boot": "b", "began_m": began}
        mark = {"mark_us": 50_000} if self.version == 1 else {}
        self._number, self._began, self._alive = 0, began, m
        self._silences.append([])
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

    def alive_before(self, end: float, **values: Any) -> None:
        """The last sign of life of a process that lived until `end`, as far as can be told."""
        silence, known = 0.0, [*self._silences[-1]]
        for _ in range(20):
            self._silences[-1] = [*known]
            self._add_silences(end - silence)
            silence = self.silence(-1)
        self._silences[-1] = known
        self.alive(end - silence, **values)

    def silence(self, start: int = 0) -> float:
        """Seconds that a process lived after its last sign of life, on average.

        Args:
            start: which process.
        """
        if self.version == 1:
            return 0.025
        found = self._silences[start]
        return round(sum(w * d * d for w, d in found) / sum(2 * w * d for w, d in found), 6)

    def _add_silences(self, m: float) -> None:
        """From the last line until one at `m`: all but the last are as long as the interval."""
        if self._silences and m > self._alive:
            left, interval = m - self._alive, min(max(0.05, (m - self._began) / 800), 1.0)
            earlier = [(w * 0.95 ** (left / interval), d) for w, d in self._silences[-1]]
            while left > interval:
                earlier.append((1.0, interval))
                left -= interval
            self._silences[-1] = [*earlier, (1.0, left)]
