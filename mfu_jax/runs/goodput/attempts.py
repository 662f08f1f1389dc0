"""Reads the run logs of a run's processes; imports neither jax nor numpy.

`mfu_jax.logger.run_log.events` describes their lines. Those of version 1, which mfu_jax 0.1.0 wrote
as ``….journal.N.jsonl``, differ: ``start`` has mark_us, the time between two signs of life;
``alive`` has wait_us, the wait for data since the last step, and silence_us, the mean age of the
last sign of life at a random moment; and the file's time tells nothing.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import operator
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mfu_jax.logger.run_log.events import DATA_WAIT, QUIET_SECONDS, VERSION, alive_seconds
from mfu_jax.runs.metrics.run_files import run_logs
from mfu_jax.storage.addresses import Address
from mfu_jax.util.formatting import counted

_BACK = "went back"
# In one block: enough for a mean wait, few enough to be alike.
_MOST_STEPS = 256
# A kill takes the steps that were not yet written together.
_UNWRITTEN_SECONDS = 0.5
_KEEPS = 0.95  # weight of earlier silences after one interval between signs of life


@dataclass(kw_only=True, slots=True)
class StepBlock:
    """Consecutive steps, in whole µs; see ``steps`` of the format.

    Attributes:
        end_m: when the last step ended, in seconds since boot.
        first: number of the first step.
        by: increment of the step numbers.
        us: time of each step.
        gap_us: time between each step and the previous one.
        data_us: the device's wait for data within that gap.
        cost: its kind, ``step``, ``compile`` or ``warmup``; and the seconds of one step at peak,
            for the model FLOPs and the executed ones, if known.
    """

    end_m: float
    first: int
    by: int = 1
    us: list[int]
    gap_us: list[int] = field(default_factory=list)
    data_us: list[int] = field(default_factory=list)
    cost: tuple[str, float | None, float | None] = ("step", None, None)

    def __post_init__(self) -> None:
        self.gap_us = self.gap_us or [0] * len(self.us)
        self.data_us = self.data_us or [0] * len(self.us)

    @property
    def spent_us(self) -> int:
        """From the end of the step before the block to the end of its last step."""
        return sum(self.us) + sum(self.gap_us)

    @property
    def wait_fraction(self) -> float:
        """The fraction of that time in which the device waited for data."""
        return sum(self.data_us) / self.spent_us if self.spent_us else 0.0

    def ends(self, end: int) -> list[int]:
        """When each step ended, in µs of any clock, if the last one ended at `end`."""
        between = map(operator.add, self.us, self.gap_us)
        ends = itertools.accumulate(between, initial=end - self.spent_us)
        return list(itertools.islice(ends, 1, None))

    @property
    def last(self) -> int:
        """Number of the last step."""
        return self.first + self.by * (len(self.us) - 1)

    def join(self, after: StepBlock) -> bool:
        """Adds the steps of the block that follows; False if they do not continue this one."""
        count, more, by = len(self.us), len(after.us), after.first - self.last
        has_other_stride = (count > 1 and self.by != by) or (more > 1 and after.by != by)
        if by <= 0 or has_other_stride or count + more > _MOST_STEPS or self.cost != after.cost:
            return False
        gap_us = round(1e6 * (after.end_m - self.end_m)) - after.spent_us + after.gap_us[0]
        if gap_us < 0:
            return False
        after.gap_us[0] = gap_us
        self.end_m, self.by = after.end_m, by
        self.us += after.us
        self.gap_us += after.gap_us
        self.data_us += after.data_us
        return True


@dataclass(kw_only=True)
class LoggedAttempt:
    """One process, as recorded in its run log; times in seconds since its machine booted.

    Attributes:
        process: process number in the job.
        host: name of the machine.
        pid: process id on that machine.
        boot: the same for all attempts on one monotonic clock; empty if unknown.
        offset: wall clock − monotonic clock at its start.
        began: start of the process.
        silence_seconds: average age of its last sign of life at a random moment.
        alive: time of its last sign of life.
        wait_seconds: how long it had waited for data by then, since its last known step; None: only
            long waits are known, as spans.
        how: why it stopped; empty: not recorded.
        blocks: its steps.
        spans: name, begin and end (None: still open) of its pauses.
        compiled: begin and seconds of its compilations.
        restored: the step from which it continued.
        goes_on: not a new process: the one before it went back to an earlier step.
    """

    process: int
    host: str
    pid: int
    boot: str
    offset: float
    began: float
    silence_seconds: float
    alive: float
    wait_seconds: float | None = None
    how: str = ""
    blocks: list[StepBlock] = field(default_factory=list)
    spans: list[tuple[str, float, float | None]] = field(default_factory=list)
    compiled: list[tuple[float, float]] = field(default_factory=list)
    restored: int | None = None
    goes_on: bool = False

    @property
    def first_step(self) -> int | None:
        """The number of its first completed step."""
        return self.blocks[0].first if self.blocks else None

    @property
    def last_step(self) -> int | None:
        """The number of its last completed step."""
        return self.blocks[-1].last if self.blocks else None

    def waited_us(self, unseen_us: int) -> float:
        """The µs for which it probably waited for data after its last known step.

        Spans cover long waits; short ones are assumed to be like those before the last steps.

        Args:
            unseen_us: from its last sign of life to its end.
        """
        last = self.blocks[-1]
        if self.wait_seconds is not None:
            return 1e6 * self.wait_seconds + unseen_us * last.wait_fraction
        if any(name == DATA_WAIT for name, _, _ in self.spans):
            return 0.0
        waits = [wait for wait in last.data_us if wait < 2e6 * self.silence_seconds]
        wait = sum(waits) / len(last.us)
        period = wait + sum(last.us) / len(last.us)
        if not period:  # steps shorter than a microsecond, which waited for nothing
            return 0.0
        paused = sum(e - b for _, b, e in self.spans if e is not None and b >= last.end_m)
        left = 1e6 * (self.alive - last.end_m - paused) + unseen_us
        # Steps went on for as long as it takes to write them; after that, one hangs.
        steps, rest = divmod(min(left, max(period, 1e6 * _UNWRITTEN_SECONDS + unseen_us)), period)
        return max(0.0, steps * wait + min(rest, wait))


def read_attempts_of(metrics_file: Path | Address) -> tuple[list[LoggedAttempt], list[str]]:
    """All attempts in the logs beside a metrics file, ordered by start; and notes for the user.

    Raises:
        UserError: a log cannot be read.
    """
    attempts: list[LoggedAttempt] = []
    notes: list[str] = []
    for name, lines, modified in run_logs(metrics_file):
        reader = _LogReader(name)
        reader.read(lines, modified)
        attempts += reader.attempts
        notes += reader.notes
    return sorted(attempts, key=lambda attempt: attempt.offset + attempt.began), notes


def _seconds(value: Any) -> float:
    """A time in a log; three centuries are a broken line, not days to add up."""
    if not abs(seconds := float(value)) < 1e10:
        raise ValueError(value)
    return seconds


class _LogReader:
    """Parses the lines of one log."""

    def __init__(self, name: str) -> None:
        self.attempts: list[LoggedAttempt] = []
        self.notes: list[str] = []
        self._name = name
        self._attempt: LoggedAttempt | None = None
        self._version = VERSION
        self._process_began = 0.0
        self._offset = 0.0  # wall clock − monotonic clock, at the last line
        self._spans: dict[tuple[str, float], float | None] = {}
        self._early: list[tuple[int, int, float]] = []
        self._broken = 0
        self._sum = self._squares = 0.0  # of the silences between signs of life

    def read(self, lines: Iterable[bytes], modified: float | None) -> None:
        """Adds the lines; a broken line costs only itself.

        Args:
            lines: of the log.
            modified: when it changed last, on the wall clock, if known.
        """
        for line in lines:
            try:
                self._take(json.loads(line))
            except (ValueError, TypeError, KeyError, IndexError, OverflowError, RecursionError):
                # A line that is just being written is not broken, nor are spaces of version 1.
                is_whole = self._version == 1 or line.endswith(b"\n")
                self._broken += is_whole and not line.isspace()
        if modified is not None:
            self._seen(modified)
        self._finish()
        if self._broken:
            self.notes.append(f"{self._name}: left out {counted(self._broken, 'broken line')}")

    def _take(self, values: dict[str, Any]) -> None:
        event = values["e"]
        if event == "start":
            self._finish()
            self._attempt = self._start(values)
        elif self._attempt is not None:
            if "m" not in values:  # told by the next process, which looked at the file's time
                self._seen(_seconds(values["t"]))
                return
            m = _seconds(values["m"])
            self._offset = _seconds(values["t"]) - m
            self._on_sign(m - self._attempt.alive, m - self._process_began)
            self._attempt.alive = max(self._attempt.alive, m)
            if (take := getattr(self, f"_on_{event}", None)) is not None:
                take(self._attempt, values)

    def _start(self, values: dict[str, Any]) -> LoggedAttempt | None:
        self._version = values["version"]
        if self._version not in (1, VERSION):
            self.notes.append(
                f"{self._name}: a process wrote version {self._version!r}; this mfu_jax reads "
                f"versions 1 and {VERSION}; its time counts as down time"
            )
            return None
        is_old = self._version == 1
        self._offset = _seconds(values["t"]) - _seconds(values["m"])
        self._process_began = _seconds(values["began_m"])
        self._sum = self._squares = 0.0
        return LoggedAttempt(
            process=int(values["process"]),
            host=str(values["host"]),
            pid=int(values["pid"]),
            boot=f"{values['host']} {values['boot']}" if values["boot"] else "",
            offset=self._offset,
            began=self._process_began,
            silence_seconds=float(values["mark_us"]) / 2e6 if is_old else 0.0,
            wait_seconds=0.0 if is_old else None,
            alive=_seconds(values["m"]),
        )

    def _on_sign(self, gap: float, age: float) -> None:
        """Notes a line, `gap` seconds after the one before it.

        In between, the file's time is set at each interval; the last interval is cut short.
        """
        if gap > 0:
            interval = alive_seconds(age)
            count, rest = divmod(gap, interval)
            keeps = _KEEPS ** (gap / interval)
            self._sum = keeps * self._sum + gap
            self._squares = keeps * self._squares + count * interval**2 + rest**2

    def _silence(self, age: float) -> float:
        """Mean age of the last sign of life at a random moment of a process.

        A moment falls into a silence of d seconds with a probability proportional to d, on average
        d/2 after its start.
        """
        return self._squares / (2 * self._sum) if self._sum else alive_seconds(age) / 2

    def _seen(self, wall: float) -> None:
        """The log's file changed at that time; a copy's time means nothing."""
        attempt, moment = self._attempt, wall - self._offset
        if attempt is None or self._version == 1:
            return
        if attempt.alive < moment <= attempt.alive + 2 * QUIET_SECONDS:
            attempt.alive = moment

    def _finish(self) -> None:
        """Called once all lines of the attempt are read."""
        attempt, self._attempt = self._attempt, None
        spans, self._spans = self._spans, {}
        early, self._early = self._early, []
        if attempt is None:
            return
        attempt.blocks.sort(key=lambda block: block.end_m)
        attempt.spans = [(name, begin, end) for (name, begin), end in spans.items()]
        if self._version > 1:
            attempt.silence_seconds = self._silence(attempt.alive - self._process_began)
            if attempt.blocks:  # known steps have their waits
                known = attempt.blocks[-1].end_m - attempt.blocks[-1].us[-1] / 2e6
                attempt.spans = [s for s in attempt.spans if s[0] != DATA_WAIT or s[1] > known]
        for number, us, end_m in early:  # a kill during a pause may lose the step's own line
            if attempt.last_step is None or number > attempt.last_step:
                _add_unwritten(attempt, number, end_m - us / 1e6)
                attempt.blocks.append(StepBlock(end_m=end_m, first=number, us=[us]))
        self.attempts.append(attempt)

    def _on_steps(self, attempt: LoggedAttempt, values: dict[str, Any]) -> None:
        us, count = values["us"], len(values["us"])
        gap_us = values.get("gap_us") or [0] * count
        data_us = values.get("data_us") or [0] * count
        numbers = us + gap_us + data_us
        if {len(gap_us), len(data_us)} != {count} or set(map(type, numbers)) != {int}:
            raise TypeError(values)
        if min(numbers) < 0:
            raise ValueError(values)
        _seconds(max(numbers) / 1e6)
        costs = (values.get("optimal_s"), values.get("executed_s"))
        optimal, executed = (None if cost is None else _seconds(cost) for cost in costs)
        block = StepBlock(
            end_m=_seconds(values["m"]),
            first=int(values["first"]),
            by=max(1, int(values.get("by", 1))),
            us=us,
            gap_us=gap_us,
            data_us=data_us,
            cost=(str(values.get("kind", "step")), optimal, executed),
        )
        is_long = self._version == 1  # its line was rewritten as long as it grew
        if is_long or not attempt.blocks or not attempt.blocks[-1].join(block):
            attempt.blocks.append(block)

    def _on_span(self, attempt: LoggedAttempt, values: dict[str, Any]) -> None:
        begin = _seconds(values["m"])
        end = begin + _seconds(values["us"] / 1e6) if "us" in values else None
        attempt.alive = max(attempt.alive, end or begin)
        self._spans[str(values["name"]), begin] = end
        if "step" in values:
            self._early.append((int(values["step"]), int(values["step_us"]), begin))

    def _on_compile(self, attempt: LoggedAttempt, values: dict[str, Any]) -> None:
        attempt.compiled += [(_seconds(begin), _seconds(us / 1e6)) for begin, us in values["spans"]]

    def _on_alive(self, attempt: LoggedAttempt, values: dict[str, Any]) -> None:
        if self._version == 1:
            attempt.wait_seconds = float(values["wait_us"]) / 1e6
            if "silence_us" in values:
                attempt.silence_seconds = float(values["silence_us"]) / 1e6

    def _on_stop(self, attempt: LoggedAttempt, values: dict[str, Any]) -> None:
        attempt.how = str(values["how"])

    def _on_back(self, attempt: LoggedAttempt, values: dict[str, Any]) -> None:
        """Splits the attempt into the steps so far and those to come; the later ones count."""
        if not attempt.blocks:
            return
        now = attempt.alive
        cut = max(block.end_m for block in attempt.blocks)
        rest = dataclasses.replace(
            attempt,
            began=cut,
            alive=now,
            blocks=[],
            compiled=[span for span in attempt.compiled if span[0] >= cut],
            restored=int(values["step"]),
            goes_on=True,
        )
        attempt.compiled = [span for span in attempt.compiled if span[0] < cut]
        attempt.alive, attempt.how = cut, _BACK
        spans = {key: end for key, end in self._spans.items() if key[1] >= cut}
        self._spans = {key: end for key, end in self._spans.items() if key not in spans}
        # A pause records its step at once; "back" is written with the steps, a little later.
        later = [early for early in self._early if early[2] - early[1] / 2e6 > cut]
        self._early = [early for early in self._early if early not in later]
        self._finish()
        self._attempt, self._spans, self._early = rest, spans, later

    def _on_restored(self, attempt: LoggedAttempt, values: dict[str, Any]) -> None:
        attempt.restored = int(values["step"])


def _add_unwritten(attempt: LoggedAttempt, stop: int, until: float) -> None:
    """Adds equal steps between the last known one and `stop`, for lines that a kill lost.

    Args:
        attempt: of the process.
        stop: number of the next known step.
        until: when that step began, in seconds since boot.
    """
    if not attempt.blocks or attempt.blocks[-1].by > 1:
        return
    before = attempt.blocks[-1]
    count = stop - before.last - 1
    paused = sum(e - b for _, b, e in attempt.spans if e is not None and before.end_m <= b < until)
    left = until - before.end_m - paused
    if count <= 0 or left <= 0:
        return
    waited = left * before.wait_fraction
    if attempt.wait_seconds is not None:
        waited = min(waited, attempt.wait_seconds)
        attempt.wait_seconds -= waited
    us, gap_us = round(1e6 * (left - waited) / count), round(1e6 * waited / count)
    gaps = [gap_us] * count
    attempt.blocks.append(
        StepBlock(end_m=until, first=before.last + 1, us=[us] * count, gap_us=gaps, data_us=[*gaps])
    )
