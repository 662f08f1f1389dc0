"""Turns a journal's events into lines: settled ones, and open ones that still grow."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from mfu_jax.logger.journal.lines import Moment, StepMark, StepsLine, line

_MOST_COMPILATIONS = 256


class LineEncoder:
    """Turns events into lines, which `take` returns.

    Args:
        now: the start of the journal.
    """

    def __init__(self, now: Moment) -> None:
        self._settled: list[bytes] = []
        self._steps: StepsLine | None = None
        self._last_number, self._last_end = -1, now[1]
        self._span: tuple[Moment, dict[str, Any]] | None = None
        self._compiled: list[tuple[float, float]] = []
        self._compiled_at: Moment = now

    def event(self, name: str, at: Moment, values: dict[str, Any]) -> None:
        """Adds a complete event."""
        self._settled.append(line(name, at, values))

    def steps(self, marks: Iterable[StepMark]) -> None:
        """Adds completed steps, in order."""
        for mark in marks:
            if mark.number > self._last_number:
                self._add(mark)

    def went_back(self, at: Moment, step: int) -> None:
        """The steps from `step` on are repeated."""
        self.settle()
        self.event("back", at, {"step": step})
        self._last_number = step - 1

    def begin(self, name: str, at: Moment, last: tuple[int, float] | None) -> None:
        """A pause begins; `last` is the number and seconds of a step that has just ended."""
        values: dict[str, Any] = {"name": name}
        if last is not None:
            values |= {"step": last[0], "step_us": _us(last[1])}
        self._span = at, values

    def end(self, at: Moment) -> None:
        """The pause ends."""
        if self._span is not None:
            begin, values = self._span
            self._span = None
            self.event("span", begin, {**values, "us": _us(at[1] - begin[1])})

    def compiled(self, at: Moment, seconds: float) -> None:
        """A stage of a compilation has ended; nested stages were reported before it."""
        spans, begin = self._compiled, at[1] - seconds
        while spans and spans[-1][0] >= begin:
            spans.pop()
        if spans and spans[-1][1] > begin:
            begin = spans.pop()[0]
        spans.append((begin, at[1]))
        self._compiled_at = at
        if len(spans) >= _MOST_COMPILATIONS:
            self._settle_compilations()

    def take(self, alive: bytes) -> tuple[bytes, list[bytes]]:
        """The lines settled since the last call, and the open ones followed by `alive`."""
        settled, self._settled = b"".join(self._settled), []
        parts = [self._compile_line()] if self._compiled else []
        if self._steps is not None:
            parts.append(self._steps.encode())
        if self._span is not None:
            parts.append(line("span", *self._span))
        return settled, [*parts, alive]

    def settle(self) -> None:
        """Settles all lines except an open pause."""
        self._settle_compilations()
        if self._steps is not None:
            self._settled.append(self._steps.encode())
            self._steps = None

    def _add(self, mark: StepMark) -> None:
        gap = max(0, _us(mark.end[1] - self._last_end) - mark.us)
        if self._steps is None or not self._steps.add(mark, gap):
            self.settle()
            self._steps = StepsLine(mark, gap)
        self._last_number, self._last_end = mark.number, mark.end[1]

    def _settle_compilations(self) -> None:
        if self._compiled:
            self._settled.append(self._compile_line())
            self._compiled = []

    def _compile_line(self) -> bytes:
        spans = [[round(begin, 6), _us(end - begin)] for begin, end in self._compiled]
        return line("compile", self._compiled_at, {"spans": spans})


def _us(seconds: float) -> int:
    return round(1e6 * seconds)
