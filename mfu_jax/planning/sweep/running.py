"""Runs a sweep: compiles the points that the search chooses, within a budget; estimates others."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, TypeVar

from mfu_jax.errors import UserError, first_line
from mfu_jax.planning.compilation.compiling import NoCompilerError
from mfu_jax.planning.result.plan import Plan
from mfu_jax.planning.sweep.outcomes import (
    EstimatedOutcome,
    Outcome,
    SweepRow,
    outcome_of,
    speed,
)
from mfu_jax.planning.sweep.search import Analytic, Search, same_but_remat
from mfu_jax.planning.sweep.space import SweepPoint

Row = TypeVar("Row", bound=SweepRow)
_SMALL = 3  # points; a sweep this small may compile all of them


@dataclass(frozen=True, kw_only=True)
class SweepResult:
    """The result of a sweep.

    Attributes:
        target: the chips, as text.
        memory_limit_bytes: per device.
        rows: every point.
        winner: the fastest compiled point that fits; None if none does.
        flags: the winner as command-line words, ready to use.
        compiles: number of points compiled, or read from the cache of compiled programs.
        notes: what was left undone.
    """

    target: str
    memory_limit_bytes: int
    rows: tuple[SweepRow, ...]
    winner: SweepRow | None
    flags: str
    compiles: int
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
        compile: makes a point's plan within the given seconds.
        invalid: why a point is invalid; empty if it is valid.
        analytic: figures that follow from a point's config.
        limit_bytes: nominal memory of a device.
        most_compiles: maximum number of compiles; None: a third of the points, at least three.
        budget_seconds: no compile starts that would end later.
        monotonic: the clock.
    """

    target: str
    points: Sequence[SweepPoint]
    flags: Callable[[SweepPoint], Sequence[str]]
    compile: Callable[[SweepPoint, float], Plan]
    invalid: Callable[[SweepPoint], str]
    analytic: Callable[[SweepPoint], Analytic]
    limit_bytes: int
    most_compiles: int | None = None
    budget_seconds: float = math.inf
    monotonic: Callable[[], float] = field(default=time.monotonic)


def run(sweep: Sweep, progress: Callable[[str], None] = lambda line: None) -> SweepResult:
    """Compiles points until the best one is known, or a limit is reached.

    Args:
        sweep: what to sweep.
        progress: called with one line per compiled point.

    Raises:
        UserError: the compiler is not installed, or every point is invalid or fails.
    """
    reasons = {point: sweep.invalid(point) for point in sweep.points}
    valid = [point for point, reason in reasons.items() if not reason]
    if not valid:
        raise UserError(f"no point of the sweep is valid; the first: {reasons[sweep.points[0]]}")
    search = Search(valid, sweep.analytic, sweep.limit_bytes)
    failures, notes = _compile_points(sweep, search, progress)
    if failures and not search.outcomes:
        raise UserError(f"no point could be compiled; the first: {next(iter(failures.values()))}")
    rows = with_pareto([_row(point, search, reasons, failures) for point in sweep.points])
    best = search.best()
    winner = None if best is None else rows[list(sweep.points).index(best)]
    return SweepResult(
        target=sweep.target,
        memory_limit_bytes=search.limit_bytes,
        rows=tuple(rows),
        winner=winner,
        flags=" ".join(sweep.flags(best)) if best else "",
        compiles=len(search.outcomes) + len(failures),
        notes=(*notes, *_faster(rows, winner)),
    )


def _compile_points(
    sweep: Sweep, search: Search, progress: Callable[[str], None]
) -> tuple[dict[SweepPoint, str], tuple[str, ...]]:
    """Compiles what the search asks for; returns the failures, and a note on the limit reached."""
    count = len(sweep.points)
    most = sweep.most_compiles
    if most is None:
        most = max(count // 3, min(count, _SMALL))
    ends, longest, compiles = sweep.monotonic() + sweep.budget_seconds, 0.0, 0
    failures: dict[SweepPoint, str] = {}
    while point := search.next():
        began = sweep.monotonic()
        left = max(0.0, ends - began)
        if compiles >= most:
            allowed = f"{most} of {count} points compiled, the most that was allowed"
            return failures, (f"{allowed}; pass compiles=N for more",)
        if left < longest:
            return failures, ("the budget is spent; the same command goes on from here",)
        compiles += 1
        progress(f"compile {compiles} of at most {most}: {point}")
        try:
            search.record(point, outcome_of(sweep.compile(point, left), point.batch))
        except NoCompilerError:
            raise
        except UserError as error:
            failures[point] = first_line(error)
            search.fail(point)
        longest = max(longest, sweep.monotonic() - began)
    return failures, ()


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
        return SweepRow(source="compiled", fits=outcome.fits, **_numbers(point, outcome))
    if why := search.ruled_out(point):
        return SweepRow(values=point.values, source="ruled out", fits=False, note=why)
    fits = search.predicted_to_fit(point)
    if found := search.estimate(point):
        return SweepRow(source="estimated", fits=fits, **_numbers(point, found))
    return _by_flops(point, fits, search) or SweepRow(
        values=point.values, source="unknown", fits=fits
    )


def _numbers(point: SweepPoint, found: Outcome | EstimatedOutcome) -> dict[str, Any]:
    return {
        "values": point.values,
        "memory_peak_bytes": found.peak_bytes or None,
        "step_time_seconds": found.step_time_seconds,
        "tokens_per_sec_per_chip": found.tokens_per_sec_per_chip,
        "mfu": found.mfu,
    }


def _by_flops(point: SweepPoint, fits: bool | None, search: Search) -> SweepRow | None:
    """An estimate from a compiled point with another remat policy, scaled by executed FLOPs."""
    mine = search.analytic[point].executed_flops
    compiled = [p for p, o in search.outcomes.items() if o.fits and same_but_remat(p, point)]
    if not compiled:
        return None
    other = min(compiled, key=lambda p: abs(p.batch - point.batch))
    outcome, theirs = search.outcomes[other], search.analytic[other].executed_flops
    if not (mine and theirs and outcome.step_time_seconds):
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


def with_pareto(rows: Sequence[Row]) -> list[Row]:
    """Marks the points that fit and that no other point beats in memory and time per token."""
    candidates = [r for r in rows if r.fits and r.memory_peak_bytes and speed(r)]

    def beaten(row: SweepRow) -> bool:
        return any(
            (other.memory_peak_bytes or 0) <= (row.memory_peak_bytes or 0)
            and speed(other) >= speed(row)
            and (other.memory_peak_bytes, speed(other)) != (row.memory_peak_bytes, speed(row))
            for other in candidates
        )

    return [replace(row, pareto=row in candidates and not beaten(row)) for row in rows]


def _faster(rows: Sequence[SweepRow], winner: SweepRow | None) -> list[str]:
    """A note on a point that may be faster than the winner but was not compiled."""
    first = fastest_first([row for row in rows if row.fits and row.source == "estimated"])[:1]
    if not first or winner is None or speed(first[0]) <= speed(winner):
        return []
    return [f"{first[0].name} may be faster, by its estimate; it was not compiled"]


def fastest_first(rows: Sequence[SweepRow]) -> list[SweepRow]:
    """Points sorted by speed: first those that fit, then those that may, then those that do not."""
    return sorted(rows, key=lambda row: (-_VERDICTS.index(row.fits), -speed(row)))


_VERDICTS = (False, None, True)
