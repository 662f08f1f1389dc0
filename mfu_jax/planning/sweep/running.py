"""Runs a sweep: compiles the points that the search chooses, within a budget; estimates others."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal

from mfu_jax.errors import UserError
from mfu_jax.planning.compilation.compiling import NoCompilerError
from mfu_jax.planning.result.plan import Plan
from mfu_jax.planning.sweep.outcomes import Outcome, StateFile, outcome_of
from mfu_jax.planning.sweep.search import Analytic, Search, same_but_remat
from mfu_jax.planning.sweep.space import SweepPoint

_SMALL = 3  # points; a sweep this small may compile all of them

Source = Literal["compiled", "estimated", "ruled out", "invalid", "failed", "unknown"]


@dataclass(frozen=True, kw_only=True)
class SweepRow:
    """One point of a finished sweep. Unknown numbers are None.

    Attributes:
        values: swept key → its value as text.
        source: where the numbers come from. ``estimated``: from compiled neighbours.
        fits: whether it fits.
        memory_peak_bytes: per device.
        step_time_seconds: predicted.
        tokens_per_sec_per_chip: predicted.
        mfu: predicted.
        pareto: Pareto-optimal: no other point that fits needs less memory and is faster.
        note: why it is invalid, failed or ruled out.
    """

    values: Mapping[str, str]
    source: Source
    fits: bool | None = None
    memory_peak_bytes: int | None = None
    step_time_seconds: float | None = None
    tokens_per_sec_per_chip: float | None = None
    mfu: float | None = None
    pareto: bool = False
    note: str = ""


@dataclass(frozen=True, kw_only=True)
class SweepResult:
    """The result of a sweep.

    Attributes:
        target: the chips, as text.
        memory_limit_bytes: per device.
        rows: every point.
        winner: the fastest compiled point that fits; None if none does.
        flags: the winner as command-line words, ready to use.
        compiles: number of points compiled by this call.
        resumed: number of points compiled by an earlier, interrupted call.
        notes: what was left undone.
    """

    target: str
    memory_limit_bytes: int
    rows: tuple[SweepRow, ...]
    winner: SweepRow | None
    flags: str
    compiles: int
    resumed: int
    notes: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """Everything as plain JSON values."""
        return asdict(self)


@dataclass(frozen=True, kw_only=True)
class Sweep:
    """What to sweep, and how.

    Attributes:
        target: the chips, as text.
        points: every combination.
        flags: command-line words that run a point.
        compile: makes a point's plan within the given seconds, if any.
        invalid: why a point is invalid; empty if it is valid.
        analytic: figures that follow from a point's config.
        limit_bytes: nominal memory of a device.
        most_compiles: maximum number of compiles; None: a third of the points, at least three.
        budget_seconds: None: no limit.
        monotonic: the clock.
    """

    target: str
    points: Sequence[SweepPoint]
    flags: Callable[[SweepPoint], Sequence[str]]
    compile: Callable[[SweepPoint, float | None], Plan]
    invalid: Callable[[SweepPoint], str]
    analytic: Callable[[SweepPoint], Analytic]
    limit_bytes: int
    most_compiles: int | None = None
    budget_seconds: float | None = None
    monotonic: Callable[[], float] = field(default=time.monotonic)


def run(
    sweep: Sweep,
    state: StateFile | None = None,
    progress: Callable[[str], None] = lambda line: None,
) -> SweepResult:
    """Compiles points until the best one is known, or a limit is reached.

    Args:
        sweep: what to sweep.
        state: state of an earlier, interrupted call; every compiled point is added to it.
        progress: called with one line per compiled point.

    Raises:
        UserError: the compiler is not installed, or every point is invalid or fails.
    """
    reasons = {point: sweep.invalid(point) for point in sweep.points}
    valid = [point for point, reason in reasons.items() if not reason]
    if not valid:
        raise UserError(f"no point of the sweep is valid; the first: {reasons[sweep.points[0]]}")
    search = Search(valid, sweep.analytic, sweep.limit_bytes)
    resumed = _resume(search, state)
    runner = _Runner(sweep, search, state, progress, resumed)
    runner.run()
    if not search.outcomes and runner.failures:
        raise UserError(f"no point could be compiled; the first: {_first(runner.failures)}")
    rows = _with_pareto([_row(point, search, reasons, runner.failures) for point in sweep.points])
    best = search.best()
    winner = None if best is None else rows[list(sweep.points).index(best)]
    return SweepResult(
        target=sweep.target,
        memory_limit_bytes=search.limit_bytes,
        rows=tuple(rows),
        winner=winner,
        flags=" ".join(sweep.flags(best)) if best else "",
        compiles=runner.compiles,
        resumed=resumed,
        notes=(*runner.notes, *_faster(rows, winner)),
    )


def most_compiles(sweep: Sweep) -> int:
    """How many points a sweep may compile."""
    if sweep.most_compiles is not None:
        return sweep.most_compiles
    return max(len(sweep.points) // 3, min(len(sweep.points), _SMALL))


class _Runner:
    """The loop of a sweep."""

    def __init__(
        self,
        sweep: Sweep,
        search: Search,
        state: StateFile | None,
        progress: Callable[[str], None],
        resumed: int,
    ) -> None:
        self.sweep, self.search, self.state, self.progress = sweep, search, state, progress
        self.most = most_compiles(sweep) - resumed
        self.began = sweep.monotonic()
        self.compiles = 0
        self.longest = 0.0
        self.failures: dict[SweepPoint, str] = {}
        self.notes: list[str] = []

    def run(self) -> None:
        while point := self.search.next():
            left = self._seconds_left()
            if self.compiles >= self.most:
                self.notes.append(
                    f"{most_compiles(self.sweep)} of {len(self.sweep.points)} points compiled, the "
                    "most that was allowed; pass compiles=N for more"
                )
                return
            if left is not None and left < self.longest:
                self.notes.append("the budget is spent; the same command goes on from here")
                return
            self._compile(point, left)

    def _seconds_left(self) -> float | None:
        if self.sweep.budget_seconds is None:
            return None
        return max(0.0, self.sweep.budget_seconds - (self.sweep.monotonic() - self.began))

    def _compile(self, point: SweepPoint, seconds: float | None) -> None:
        self.compiles += 1
        self.progress(f"compile {self.compiles} of at most {self.most}: {point}")
        began = self.sweep.monotonic()
        try:
            outcome = outcome_of(self.sweep.compile(point, seconds), point.batch)
        except NoCompilerError:
            raise
        except UserError as error:
            self.failures[point] = str(error)
            self.search.fail(point)
            return
        finally:
            self.longest = max(self.longest, self.sweep.monotonic() - began)
        self.search.record(point, outcome)
        if self.state:
            self.state.add(point, outcome)


def _resume(search: Search, state: StateFile | None) -> int:
    known = state.outcomes if state else {}
    for point, outcome in known.items():
        if point in search.analytic:
            search.record(point, outcome)
    return len(search.outcomes)


def _row(
    point: SweepPoint,
    search: Search,
    reasons: Mapping[SweepPoint, str],
    failures: Mapping[SweepPoint, str],
) -> SweepRow:
    if reasons[point]:
        return SweepRow(values=point.values, source="invalid", note=reasons[point])
    if point in failures:
        return SweepRow(values=point.values, source="failed", note=failures[point])
    if outcome := search.outcomes.get(point):
        return _compiled_row(point, outcome)
    if why := search.ruled_out(point):
        return SweepRow(values=point.values, source="ruled out", fits=False, note=why)
    return _estimated_row(point, search)


def _compiled_row(point: SweepPoint, outcome: Outcome) -> SweepRow:
    return SweepRow(
        values=point.values,
        source="compiled",
        fits=outcome.fits,
        memory_peak_bytes=outcome.peak_bytes or None,
        step_time_seconds=outcome.step_time_seconds,
        tokens_per_sec_per_chip=outcome.tokens_per_sec_per_chip,
        mfu=outcome.mfu,
    )


def _estimated_row(point: SweepPoint, search: Search) -> SweepRow:
    fits = search.predicted_to_fit(point)
    found = search.estimate(point)
    if found:
        return SweepRow(
            values=point.values,
            source="estimated",
            fits=fits,
            memory_peak_bytes=found.peak_bytes,
            step_time_seconds=found.step_time_seconds,
            tokens_per_sec_per_chip=found.tokens_per_sec_per_chip,
            mfu=found.mfu,
        )
    return _by_flops(point, fits, search) or SweepRow(
        values=point.values, source="unknown", fits=fits
    )


def _by_flops(point: SweepPoint, fits: bool | None, search: Search) -> SweepRow | None:
    """An estimate from a compiled point with another remat policy, scaled by executed FLOPs."""
    mine = search.analytic[point].executed_flops
    compiled = ((p, o) for p, o in search.outcomes.items() if o.fits and same_but_remat(p, point))
    other, outcome = min(compiled, key=lambda pair: abs(pair[0].batch - point.batch), default=_NONE)
    theirs = search.analytic[other].executed_flops if other else None
    if not (mine and theirs and other and outcome and outcome.step_time_seconds):
        return None
    seconds = outcome.step_time_seconds * mine / theirs
    share = point.batch / other.batch * outcome.step_time_seconds / seconds
    rate, mfu = outcome.tokens_per_sec_per_chip, outcome.mfu
    return SweepRow(
        values=point.values,
        source="estimated",
        fits=fits,
        step_time_seconds=seconds,
        tokens_per_sec_per_chip=None if rate is None else rate * share,
        mfu=None if mfu is None else mfu * share,
        note=f"by its FLOPs, from {other}",
    )


_NONE: tuple[SweepPoint | None, Outcome | None] = (None, None)


def _with_pareto(rows: Sequence[SweepRow]) -> list[SweepRow]:
    """Marks the points that fit and that no other point beats in memory and time per token."""
    candidates = [r for r in rows if r.fits and r.memory_peak_bytes and _speed(r)]

    def beaten(row: SweepRow) -> bool:
        return any(
            (other.memory_peak_bytes or 0) <= (row.memory_peak_bytes or 0)
            and _speed(other) >= _speed(row)
            and (other.memory_peak_bytes, _speed(other)) != (row.memory_peak_bytes, _speed(row))
            for other in candidates
        )

    return [replace(row, pareto=row in candidates and not beaten(row)) for row in rows]


def _faster(rows: Sequence[SweepRow], winner: SweepRow | None) -> list[str]:
    """A note on a point that may be faster than the winner but was not compiled."""
    first = fastest_first([row for row in rows if row.fits and row.source == "estimated"])[:1]
    if not first or winner is None or _speed(first[0]) <= _speed(winner):
        return []
    named = " ".join(f"{key}={text}" for key, text in first[0].values.items())
    return [f"{named} may be faster, by its estimate; it was not compiled"]


def fastest_first(rows: Sequence[SweepRow]) -> list[SweepRow]:
    """Points sorted by speed: first those that fit, then those that may, then those that do not."""
    return sorted(rows, key=lambda row: (-_VERDICTS.index(row.fits), -_speed(row)))


_VERDICTS = (False, None, True)


def _speed(row: SweepRow) -> float:
    if row.tokens_per_sec_per_chip:
        return row.tokens_per_sec_per_chip
    return 1 / row.step_time_seconds if row.step_time_seconds else 0.0


def _first(failures: Mapping[SweepPoint, str]) -> str:
    return next(iter(failures.values()))
