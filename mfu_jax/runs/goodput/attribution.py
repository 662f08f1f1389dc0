"""Divides the time of one process into categories: every microsecond belongs to exactly one.

Times are whole microseconds since 1970 on the run's clock. Pauses take precedence over
compilations, and those over steps; time that none covers is start-up, idle or lost.
"""

from __future__ import annotations

import itertools
import operator
from collections import defaultdict, deque
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from mfu_jax.runs.goodput.attempts import LoggedAttempt, StepBlock
from mfu_jax.runs.goodput.run_time import CATEGORIES

DAY = 86_400_000_000  # µs
_ALL = 10**18  # µs
# At another exception the step in flight ends before the process does, and is known.
_FAILED_STEP = ("exception: JaxRuntimeError", "exception: XlaRuntimeError")

Times = defaultdict[int, defaultdict[str, int]]
"""Day (days since 1970, UTC) → category → µs."""


def no_times() -> Times:
    """Empty times to add to."""
    return defaultdict(lambda: defaultdict(int))


@dataclass(kw_only=True)
class AttemptOnRunClock:
    """An attempt placed on the run's clock, in µs.

    Attributes:
        attempt: from its run log.
        offset: the run's clock − its monotonic clock, in seconds.
        start: when the process started.
        end: when it ended.
        how: how it ended.
        redone_from: steps from this one on were repeated later; None: none were.
        done_after: steps after its last known one that a later attempt built on.
    """

    attempt: LoggedAttempt
    offset: float
    start: int
    end: int
    how: str
    redone_from: int | None = None
    done_after: int = 0

    def at(self, seconds: float) -> int:
        """A time of the attempt's monotonic clock on the run's clock."""
        return round(1e6 * (seconds + self.offset))

    def counted(self, block: StepBlock) -> int:
        """How many steps of a block were not repeated later."""
        if self.redone_from is None:
            return len(block.us)
        return max(0, min(len(block.us), -((block.first - self.redone_from) // block.by)))


class _Overlay(NamedTuple):
    """A pause or a compilation."""

    begin: int
    end: int
    category: str
    is_pause: bool


@dataclass
class WallClockAttribution:
    """Divides the time of one attempt.

    Args:
        placed: the attempt.
        median_us: median time of the steps that counted, over the whole run.
        times: receives the time.
    """

    placed: AttemptOnRunClock
    median_us: int
    times: Times = field(default_factory=no_times)

    def run(self) -> Times:
        """Divides the time from the process's start to its end."""
        placed = self.placed
        self._overlays = _overlays(placed)
        self._next = 0
        self._now = placed.start
        for index, block in enumerate(placed.attempt.blocks):
            self._add_block(block, is_first=index == 0 and not placed.attempt.goes_on)
        self._add_tail()
        return self.times

    def _add_block(self, block: StepBlock, *, is_first: bool) -> None:
        """Adds the steps of a block; `is_first`: it is the first of its process."""
        counted = self.placed.counted(block)
        for index, end in enumerate(block.ends(self.placed.at(block.end_m))):
            begin, is_start = end - block.us[index], is_first and index == 0
            self._add_step(begin, end, block.data_us[index], index < counted, is_start=is_start)

    def _add_step(
        self, begin: int, end: int, waited: int, is_counted: bool, *, is_start: bool
    ) -> None:
        """Adds a step and the wait for data before it."""
        step = [("lost_steps", _ALL)]
        if is_counted:
            rest = "startup" if is_start else "slow_steps"
            step = [("train", self.median_us), (rest, _ALL)]
        paused = 0 if is_start else self._paused_until(end)
        if not paused:
            self._until(begin - waited, "startup" if is_start else "idle")
            self._until(begin, "data_wait")
            self._spread(end, step)
            return
        # The pause's place in the loop is known, but not where the steps around it ended.
        idle = max(0, begin - self._now - paused - waited)
        self._spread(end, [("idle", idle), ("data_wait", waited), *step])

    def _paused_until(self, end: int) -> int:
        """Paused time from now to `end`."""
        spent = 0
        for overlay in itertools.islice(self._overlays, self._next, None):
            if overlay.begin >= end:
                break
            if overlay.is_pause:
                spent += max(0, min(end, overlay.end) - max(self._now, overlay.begin))
        return spent

    def _add_tail(self) -> None:
        """Adds what follows the last known step."""
        placed, attempt = self.placed, self.placed.attempt
        if not attempt.blocks:
            self._until(placed.end, "idle" if attempt.goes_on else "startup")
            return
        shares: list[tuple[str, int]] = []  # of the time without pauses
        if placed.done_after:
            shares.append(("train", placed.done_after * self.median_us))
        if placed.how in ("killed", "running", *_FAILED_STEP):
            unseen = max(0, placed.end - placed.at(attempt.alive))
            rest = "other" if placed.how == "running" else "lost_steps"
            shares += [("data_wait", round(attempt.waited_us(unseen))), (rest, _ALL)]
        self._spread(placed.end, [*shares, ("idle", _ALL)])

    def _until(self, end: int, category: str) -> None:
        """Advances to `end`, in `category` except for overlays; no effect if `end` has passed."""
        self._spread(end, [(category, _ALL)])

    def _spread(self, end: int, shares: Sequence[tuple[str, int]]) -> None:
        """Advances to `end`: overlays take precedence, and shares fill the rest in turn.

        Args:
            end: a time; nothing happens if it has passed.
            shares: category and maximum µs of each; the last one takes all that is left.
        """
        end = min(end, self.placed.end)
        left = deque(shares)
        while self._now < end:
            overlay = self._overlays[self._next] if self._next < len(self._overlays) else None
            if overlay is not None and overlay.begin <= self._now:
                if overlay.end <= self._now:
                    self._next += 1
                else:
                    self._spend(min(end, overlay.end), overlay.category)
                continue
            category, most = left.popleft()
            stop = min(end, self._now + most, end if overlay is None else overlay.begin)
            most -= stop - self._now
            self._spend(stop, category)
            if most:
                left.appendleft((category, most))

    def _spend(self, end: int, category: str) -> None:
        """Adds the time until `end`."""
        add_time(self.times, category, self._now, end)
        self._now = max(self._now, end)


def add_time(times: Times, category: str, begin: int, end: int) -> None:
    """Adds the time from `begin` to `end`, day by day; none if that is not later."""
    while begin < end:
        stop = min(end, (begin // DAY + 1) * DAY)
        times[begin // DAY][category] += stop - begin
        begin = stop


def in_seconds(days: Collection[Mapping[str, int]]) -> dict[str, float]:
    """Category → seconds of some days together, every category among them."""
    return {name: sum(day.get(name, 0) for day in days) / 1e6 for name in CATEGORIES}


def _overlays(placed: AttemptOnRunClock) -> list[_Overlay]:
    """Pauses, and compilations outside them, ordered by begin; they do not overlap."""
    pauses = [
        _Overlay(
            placed.at(begin), placed.end if end is None else placed.at(end), _category(name), True
        )
        for name, begin, end in placed.attempt.spans
    ]
    compiled = [
        _Overlay(placed.at(begin), placed.at(begin + spent), "compile", False)
        for begin, spent in placed.attempt.compiled
    ]
    begin = operator.attrgetter("begin")
    found = list(_disjoint(sorted(pauses, key=begin)))
    free = _between(_disjoint(sorted(compiled, key=begin)), found)
    return sorted([*found, *free], key=begin)


def _category(name: str) -> str:
    """The category of a pause with this name."""
    return name if name in CATEGORIES and CATEGORIES[name].is_pause else "other"


def _disjoint(overlays: list[_Overlay]) -> Iterator[_Overlay]:
    """Each overlay, trimmed to start at the end of the previous one."""
    now = 0
    for overlay in overlays:
        begin = max(now, overlay.begin)
        if begin < overlay.end:
            now = overlay.end
            yield overlay._replace(begin=begin)


def _between(overlays: Iterator[_Overlay], above: list[_Overlay]) -> Iterator[_Overlay]:
    """The parts of overlays that none of those `above` covers."""
    index = 0
    for overlay in overlays:
        begin = overlay.begin
        while index < len(above) and above[index].end <= begin:
            index += 1
        over = index
        while over < len(above) and above[over].begin < overlay.end:
            if begin < above[over].begin:
                yield overlay._replace(begin=begin, end=above[over].begin)
            begin = max(begin, above[over].end)
            over += 1
        if begin < overlay.end:
            yield overlay._replace(begin=begin)
