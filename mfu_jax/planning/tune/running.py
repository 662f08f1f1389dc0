"""Runs a search: plans, then runs, within a budget; then what each change brought on its own."""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from mfu_jax.errors import UserError
from mfu_jax.planning.compilation.compiling import NoCompilerError
from mfu_jax.planning.sweep.outcomes import speed
from mfu_jax.planning.sweep.running import with_pareto
from mfu_jax.planning.tune.evidence import Trial, TrialLog
from mfu_jax.planning.tune.result import TOKENS, Change, TuneResult, texts
from mfu_jax.planning.tune.search import TuningSearch
from mfu_jax.planning.tune.space import Point, Space, moved

_MOST_PLANS = 60
_PLANNING_SHARE = 0.5  # of the budget, if runs follow
_CUT_OFF_SECONDS = 1.0  # before the end of the budget: a failure is the limit's
_CUT_OFF = "cut off by the budget"  # how such a trial's note begins
_NOTHING = 0.0005  # of the speed: a change that brings less is left out of the winner
_SMALL = 3  # trials, if a third of the points are fewer

_TRIED: Mapping[str, Literal["planned", "measured"]] = {"plan": "planned", "run": "measured"}

Try = Callable[[Point, float], Trial]


@dataclass(frozen=True, kw_only=True)
class Tuning:
    """What to search, and how.

    Attributes:
        target: the devices, as text.
        space: what may be chosen.
        flags: command-line words of a point.
        unit: what a speed counts: ``tokens/s/chip``.
        plan: plans a point within the given seconds; None: there are no plans for these devices.
        run: runs a point within the given seconds; None: the devices are not attached.
        invalid: why a point cannot be built; None if it can.
        limit_bytes: memory of a device; 0: not known.
        budget_seconds: no trial starts that would end later.
        most_plans: None: a third of the points, at most 60.
        most_runs: None: any number.
        seed: of ties.
        monotonic: the clock.
    """

    target: str
    space: Space
    flags: Callable[[Point], Sequence[str]]
    unit: str = TOKENS
    plan: Try | None = None
    run: Try | None = None
    invalid: Callable[[Point], UserError | None] = lambda point: None
    limit_bytes: int = 0
    budget_seconds: float = math.inf
    most_plans: int | None = None
    most_runs: int | None = None
    seed: int = 0
    monotonic: Callable[[], float] = field(default=time.monotonic)


def tune(
    tuning: Tuning, evidence: TrialLog, progress: Callable[[str], None] = lambda line: None
) -> TuneResult:
    """Searches until nothing else is expected to be worth a trial, or a limit is reached.

    Args:
        tuning: what to search.
        evidence: what is known already, and where trials are kept.
        progress: called with a line for each trial.

    Raises:
        UserError: the start is not valid, or nothing could be tried.
    """
    if wrong := tuning.invalid(tuning.space.start):
        raise UserError(
            f"the search cannot begin with these settings: {wrong.what}", hint=wrong.hint
        )
    return _Run(tuning, evidence, progress).result()


class _Run:
    """One search."""

    def __init__(self, tuning: Tuning, evidence: TrialLog, progress: Callable[[str], None]) -> None:
        self.tuning, self.evidence, self.progress = tuning, evidence, progress
        self.notes: list[str] = [*evidence.notes]
        self._ends = tuning.monotonic() + tuning.budget_seconds
        self._valid: dict[Point, bool] = {}

    def result(self) -> TuneResult:
        """Searches, and sums up."""
        searches = [*self._phases()]
        last = next((s for s in reversed(searches) if s.best() is not None), searches[-1])
        best, changes = self._explained(last, last.best())
        rows: dict[str, Trial] = {}
        for search in searches:
            rows |= {_key(trial.settings): trial for trial in search.trials.values()}
        if all(trial.note.startswith(_CUT_OFF) for trial in rows.values()):
            raise UserError(
                f"no trial was done within {self.tuning.budget_seconds:g} s, the budget",
                hint="usually the first compilation takes longer; pass a larger budget=…",
            )
        begun = last.trials.get(self.tuning.space.start)
        start = begun if begun and begun.is_ok else None
        winner = None if best is None else last.trials[best]
        plans, *runs = [*searches, None][:2] if self.tuning.plan else [None, *searches]
        marked = [trial for trial in with_pareto([*rows.values()]) if isinstance(trial, Trial)]
        return TuneResult(
            target=self.tuning.target,
            unit=self.tuning.unit,
            points=self.tuning.space.size,
            rows=tuple(marked),
            start=start,
            winner=winner,
            settings={} if best is None else self.tuning.space.settings(best),
            changed={} if best is None else self._changed(best),
            flags="" if best is None else " ".join(self.tuning.flags(best)),
            gain_fraction=speed(winner) / speed(start) - 1 if winner and start else None,
            changes=changes,
            planned_over_measured=_ratios(searches),
            plans=0 if plans is None else len(plans.trials),
            runs=sum(len(search.trials) for search in runs if search is not None),
            notes=tuple(self.notes),
        )

    def _changed(self, best: Point) -> dict[str, Any]:
        before = self.tuning.space.settings(self.tuning.space.start)
        after = self.tuning.space.settings(best)
        return {key: value for key, value in after.items() if before.get(key) != value}

    def _phases(self) -> Iterator[TuningSearch]:
        tuning, planned = self.tuning, None
        most = max(tuning.space.size // 3, min(tuning.space.size, _SMALL))
        if tuning.plan:
            share = _PLANNING_SHARE if tuning.run else 1.0
            ends = tuning.monotonic() + share * tuning.budget_seconds
            search = self._search(None)
            most_plans = tuning.most_plans or min(most, _MOST_PLANS)
            try:
                self._fill(search, "plan", tuning.plan, most_plans, ends)
            except NoCompilerError as error:
                if tuning.run is None:
                    raise
                self.notes.append(f"no plans: {error.what}")
            yield search
            ok = {p: speed(t) for p, t in search.trials.items() if t.is_ok}
            planned = ok or None  # without a plan that fits, runs are on their own
        if tuning.run:
            search = self._search(planned)
            most_runs = tuning.most_runs or tuning.space.size  # it ends by itself, or by the budget
            self._fill(search, "run", tuning.run, most_runs, self._ends)
            yield search

    def _search(self, planned: Mapping[Point, float] | None) -> TuningSearch:
        return TuningSearch(
            self.tuning.space,
            limit_bytes=self.tuning.limit_bytes,
            planned=planned,
            is_valid=self._is_valid,
            seed=self.tuning.seed,
        )

    def _is_valid(self, point: Point) -> bool:
        if point not in self._valid:
            self._valid[point] = self.tuning.invalid(point) is None
        return self._valid[point]

    def _fill(
        self, search: TuningSearch, by: Literal["plan", "run"], attempt: Try, most: int, ends: float
    ) -> None:
        """Tries what the search asks for."""
        left = ends - self.tuning.monotonic()
        for trial in self.evidence.trials:
            known = self.tuning.space.point_of(trial.values)
            if trial.note.startswith(_CUT_OFF) and trial.wall_seconds < left:
                continue  # there is more time for it now
            if trial.by == by and known and self._settings(known) == trial.settings:
                search.record(known, trial)
        longest, start = 0.0, self.tuning.space.start
        while (point := search.next() if start in search.trials else start) is not None:
            began = self.tuning.monotonic()
            if len(search.trials) >= most:
                self.notes.append(
                    f"{most} {by}s of {self.tuning.space.size:,} combinations, the most that was "
                    f"allowed; {by}s=N allows more"
                )
                return
            if ends - began <= longest or not self._attempt(search, by, point, attempt, ends):
                self.notes.append(
                    f"the budget for {by}s is spent; the same command goes on from here"
                )
                return
            longest = max(longest, self.tuning.monotonic() - began)

    def _settings(self, point: Point) -> dict[str, str]:
        return texts(self.tuning.space.settings(point))

    def _attempt(
        self, search: TuningSearch, by: str, point: Point, attempt: Try, ends: float
    ) -> bool:
        """Tries a point; False if the budget cut it off."""
        self.progress(f"{by} {len(search.trials) + 1}: {self.tuning.space.changes(point)}")
        began = self.tuning.monotonic()
        trial = attempt(point, max(0.0, ends - began))
        trial = dataclasses.replace(
            trial,
            values=self.tuning.space.labels(point),
            settings=self._settings(point),
            wall_seconds=self.tuning.monotonic() - began,
        )
        is_cut = trial.source == "failed" and self.tuning.monotonic() > ends - _CUT_OFF_SECONDS
        if is_cut:  # kept, so that a repeated command does not spend its budget on it again
            note = f"{_CUT_OFF}, after {trial.wall_seconds:.0f} s"
            trial = dataclasses.replace(trial, fits=None, note=note)
        self.evidence.add(trial)
        search.record(point, trial)
        return not is_cut

    def _explained(
        self, search: TuningSearch, best: Point | None
    ) -> tuple[Point | None, tuple[Change, ...]]:
        """The winner without changes that brought nothing, and what the others brought."""
        if best is None:
            return None, ()
        changes = tuple(self._changes(search, best))
        space, plain = self.tuning.space, best
        for change in changes:
            if change.gain_fraction is not None and abs(change.gain_fraction) < _NOTHING:
                axis = next(i for i, axis in enumerate(space.axes) if axis.name == change.axis)
                plain = moved(plain, axis, space.start[axis])
        if plain == best or not self._try(search, plain, search.trials[best].by):
            return best, changes
        if speed(search.trials[plain]) < (1 - _NOTHING) * speed(search.trials[best]):
            return best, changes
        return plain, tuple(self._changes(search, plain))

    def _try(self, search: TuningSearch, point: Point, by: Literal["plan", "run"]) -> bool:
        """Tries a point beyond the search's own, if the limits allow; whether it fits."""
        attempt = self.tuning.plan if by == "plan" else self.tuning.run
        may_try = point not in search.trials and self._has_time(search, by)
        if attempt is not None and may_try and self._is_valid(point):
            self._attempt(search, by, point, attempt, self._ends)
        return point in search.trials and search.trials[point].is_ok

    def _changes(self, search: TuningSearch, winner: Point) -> Iterator[Change]:
        """From the start to the winner, always the change that then brings most."""
        space, point = self.tuning.space, self.tuning.space.start
        by: Literal["plan", "run"] = search.trials[winner].by
        begun = search.trials.get(point)
        reached = speed(begun) if begun and begun.is_ok else None
        left = [axis for axis, choice in enumerate(winner) if choice != point[axis]]
        while left:
            ways = [(axis, moved(point, axis, winner[axis])) for axis in left]
            ways.sort(key=lambda way: -self._guess(search, way[1]))
            axis, point = ways[0]
            self._try(search, point, by)
            trial = search.trials.get(point)
            left.remove(axis)
            found = self._speed_at(search, point, trial)
            kind: Literal["measured", "planned", "estimated", "unknown"] = "unknown"
            if found and reached:
                kind = "estimated" if trial is None else _TRIED[by]
            yield Change(
                axis=space.axes[axis].name,
                before=space.labels(space.start)[space.axes[axis].name],
                after=space.labels(point)[space.axes[axis].name],
                gain_fraction=found / reached - 1 if found and reached else None,
                source=kind,
            )
            reached = found or reached

    def _speed_at(self, search: TuningSearch, point: Point, trial: Trial | None) -> float | None:
        if trial is None:
            return search.predicted(point)
        return speed(trial) if trial.is_ok else None

    def _guess(self, search: TuningSearch, point: Point) -> float:
        trial = search.trials.get(point)
        if trial is not None:
            return speed(trial) if trial.is_ok else 0.0
        return search.predicted(point) or 0.0

    def _has_time(self, search: TuningSearch, by: str) -> bool:
        most = self.tuning.most_plans if by == "plan" else self.tuning.most_runs
        if most is not None and len(search.trials) >= most:
            return False
        took = [trial.wall_seconds for trial in search.trials.values()]
        return self.tuning.monotonic() + max(took, default=0.0) < self._ends


def _ratios(searches: Sequence[TuningSearch]) -> dict[str, float]:
    if len(searches) < 2:
        return {}
    plans, runs = searches
    return {
        runs.trials[point].name: speed(runs.trials[point]) / speed(plan)
        for point, plan in plans.trials.items()
        if plan.is_ok and point in runs.trials and runs.trials[point].is_ok
    }


def _key(settings: Mapping[str, str]) -> str:
    return " ".join(f"{key}={settings[key]}" for key in sorted(settings))
