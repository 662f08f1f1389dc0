"""Runs a search: plans, then runs, within a budget; then what each change brought on its own."""

from __future__ import annotations

import dataclasses
import functools
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from mfu_jax.errors import UserError, first_line
from mfu_jax.planning.compilation.compiling import NoCompilerError
from mfu_jax.planning.result.plan import Plan
from mfu_jax.planning.tune.evidence import By, Trial, TrialLog, speed
from mfu_jax.planning.tune.result import TOKENS, Change, TuneResult, texts, with_pareto
from mfu_jax.planning.tune.search import TuningSearch
from mfu_jax.planning.tune.space import Point, Space, moved
from mfu_jax.util.formatting import counted

_MOST_PLANS = 60
_PLANNING_SHARE = 0.5  # of the budget, if runs follow
_CUT_OFF_SECONDS = 1.0  # before the end of the budget: a failure is the limit's
_CUT_OFF = "cut off by the budget"  # how such a trial's note begins
_NOTHING = 0.0005  # of the speed: a change that brings less is left out of the winner
_SMALL = 3  # trials, if a third of the points are fewer

Try = Callable[[Point, float], Trial]


@dataclass(frozen=True, kw_only=True)
class Tuning:
    """What to search, and how.

    Attributes:
        target: the devices, as text.
        chip: its name in the hardware table; empty if unknown.
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
        steps: of a run.
        seed: of ties.
        notes: what a reader of the result must know.
        monotonic: the clock.
    """

    target: str
    chip: str = ""
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
    steps: int = 0
    seed: int = 0
    notes: tuple[str, ...] = ()
    monotonic: Callable[[], float] = field(default=time.monotonic)


def planned(make: Callable[[], Plan]) -> Trial:
    """A plan as a trial; a compiler's failure is one, too.

    Raises:
        NoCompilerError: no plan can be made.
    """
    try:
        plan = make()
    except NoCompilerError:
        raise
    except UserError as error:
        return Trial(by="plan", source="failed", note=first_line(error))
    return Trial(
        by="plan",
        source="planned",
        fits=plan.fits,
        memory_peak_bytes=plan.memory_peak_bytes,
        step_time_seconds=plan.step_time_seconds,
        tokens_per_sec_per_chip=plan.tokens_per_sec_per_chip,
        mfu=plan.mfu,
    )


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
        self.space = tuning.space
        self.searches: dict[By, TuningSearch] = {}
        self.notes: list[str] = [*tuning.notes, *evidence.notes]
        self._ends = tuning.monotonic() + tuning.budget_seconds
        self._took: dict[By, dict[Point, Trial]] = {"plan": {}, "run": {}}  # trials made here
        self._is_valid = functools.cache(lambda point: tuning.invalid(point) is None)

    def result(self) -> TuneResult:
        """Searches, and sums up."""
        self._plan_and_run()
        by, last = next(
            (pair for pair in reversed(self.searches.items()) if pair[1].best() is not None),
            [*self.searches.items()][-1],
        )
        best, changes = self._explained(by, last.best())
        rows = {
            tuple(sorted(trial.settings.items())): trial
            for search in self.searches.values()
            for trial in search.trials.values()
        }
        if all(trial.note.startswith(_CUT_OFF) for trial in rows.values()):
            raise UserError(
                f"no trial was done within {self.tuning.budget_seconds:g} s, the budget",
                hint="usually the first compilation takes longer; pass a larger budget=…",
            )
        begun = last.trials.get(self.space.start)
        start = begun if begun and begun.is_ok else None
        winner = None if best is None else last.trials[best]
        counts = {by: len(search.trials) for by, search in self.searches.items()}
        before = self.space.settings(self.space.start)
        after = {} if best is None else self.space.settings(best)
        return TuneResult(
            target=self.tuning.target,
            chip=self.tuning.chip,
            unit=self.tuning.unit,
            points=self.space.size,
            rows=tuple(with_pareto([*rows.values()])),
            start=start,
            winner=winner,
            settings=after,
            changed={key: value for key, value in after.items() if before.get(key) != value},
            flags="" if best is None else " ".join(self.tuning.flags(best)),
            gain_fraction=speed(winner) / speed(start) - 1 if winner and start else None,
            changes=changes,
            planned_over_measured=self._ratios(),
            plans=counts.get("plan", 0),
            runs=counts.get("run", 0),
            notes=tuple(self.notes),
        )

    def _plan_and_run(self) -> None:
        tuning, size = self.tuning, self.space.size
        if tuning.plan:
            share = _PLANNING_SHARE if tuning.run else 1.0
            most = min(max(size // 3, min(size, _SMALL)), _MOST_PLANS)
            ends = tuning.monotonic() + share * tuning.budget_seconds
            try:
                self._fill("plan", tuning.most_plans or most, ends)
            except NoCompilerError as error:
                if tuning.run is None:
                    raise
                self.notes.append(f"no plans: {error.what}")
        if tuning.run:  # it ends by itself, or by the budget
            self._fill("run", tuning.most_runs or size, self._ends)

    def _fill(self, by: By, most: int, ends: float) -> None:
        """Tries what the search asks for."""
        # Runs follow the plans that fit; without any, they are on their own.
        plans = self.searches["plan"].trials if "plan" in self.searches else {}
        search = self.searches[by] = TuningSearch(
            self.space,
            by=by,
            limit_bytes=self.tuning.limit_bytes,
            planned={p: speed(t) for p, t in plans.items() if t.is_ok} or None,
            is_valid=self._is_valid,
            seed=self.tuning.seed,
        )
        left = ends - self.tuning.monotonic()
        for trial in self.evidence.trials:
            known = self.space.point_of(trial.values)
            if trial.note.startswith(_CUT_OFF) and trial.wall_seconds < left:
                continue  # there is more time for it now
            if trial.by == by and known and texts(self.space.settings(known)) == trial.settings:
                search.trials[known] = trial
        start = self.space.start
        while (point := search.next() if start in search.trials else start) is not None:
            if len(search.trials) >= most:
                self.notes.append(
                    f"{counted(most, by)} of {self.space.size:,} combinations, the most that was "
                    f"allowed; {by}s=N allows more"
                )
                return
            if not (self._has_time(by, point, ends) and self._attempt(by, point, ends)):
                self.notes.append(
                    f"the budget for {by}s is spent; the same command goes on from here"
                )
                return

    def _has_time(self, by: By, point: Point, ends: float) -> bool:
        """Whether a trial as long as the longest ends in time; steps grow with the batch."""
        steps = self.tuning.steps if by == "run" else 0
        longest = 0.0
        for other, trial in self._took[by].items():
            growth = max(0.0, self.space.batch(point) / self.space.batch(other) - 1)
            more = growth * steps * (trial.step_time_seconds or 0.0)
            longest = max(longest, trial.wall_seconds + more)
        return self.tuning.monotonic() + longest < ends

    def _attempt(self, by: By, point: Point, ends: float) -> bool:
        """Tries a point; False if the budget cut it off."""
        search, attempt = self.searches[by], self.tuning.plan if by == "plan" else self.tuning.run
        if attempt is None:
            return False
        self.progress(f"{by} {len(search.trials) + 1}: {self.space.changes(point)}")
        began = self.tuning.monotonic()
        trial = attempt(point, max(0.0, ends - began))
        trial = dataclasses.replace(
            trial,
            values=self.space.labels(point),
            settings=texts(self.space.settings(point)),
            wall_seconds=self.tuning.monotonic() - began,
        )
        is_cut = trial.source == "failed" and self.tuning.monotonic() > ends - _CUT_OFF_SECONDS
        if is_cut:  # kept, so that a repeated command does not spend its budget on it again
            note = f"{_CUT_OFF}, after {trial.wall_seconds:.0f} s"
            trial = dataclasses.replace(trial, fits=None, note=note)
        self._took[by][point] = search.trials[point] = trial
        self.evidence.add(trial)
        return not is_cut

    def _explained(self, by: By, best: Point | None) -> tuple[Point | None, tuple[Change, ...]]:
        """The winner without changes that brought nothing, and what the others brought."""
        if best is None:
            return None, ()
        search, plain = self.searches[by], best
        for change in self._changes(by, best):
            if change.gain_fraction is not None and change.gain_fraction < _NOTHING:
                axis = next(i for i, a in enumerate(self.space.axes) if a.name == change.axis)
                plain = moved(plain, axis, self.space.start[axis])
        self._tried(by, plain)
        best = search.best() or best  # one of these trials may be faster
        if plain in search.trials:
            least = (1 - _NOTHING) * speed(search.trials[best])
            best = plain if search.predicted(plain) >= least else best
        return best, tuple(self._changes(by, best))

    def _changes(self, by: By, winner: Point) -> Iterator[Change]:
        """From the start to the winner, always the change that then brings most."""
        search, space, point = self.searches[by], self.space, self.space.start
        begun = search.trials.get(point)
        reached = speed(begun) if begun and begun.is_ok else 0.0
        left = {axis for axis, choice in enumerate(winner) if choice != point[axis]}
        while left:
            axis = max(left, key=lambda axis: search.predicted(moved(point, axis, winner[axis])))
            left.remove(axis)
            point = moved(point, axis, winner[axis])
            found = self._tried(by, point)
            source = search.trials[point].source if point in search.trials else "estimated"
            name, is_known = space.axes[axis].name, found and reached
            yield Change(
                axis=name,
                before=space.labels(space.start)[name],
                after=space.labels(point)[name],
                gain_fraction=found / reached - 1 if is_known else None,
                source=source if is_known else "unknown",
            )
            reached = found or reached

    def _tried(self, by: By, point: Point) -> float:
        """The speed of a point beyond the search's own: of a trial, if the limits allow one."""
        search = self.searches[by]
        most = self.tuning.most_plans if by == "plan" else self.tuning.most_runs
        may_try = point not in search.trials and len(search.trials) < (most or math.inf)
        if may_try and self._is_valid(point) and self._has_time(by, point, self._ends):
            self._attempt(by, point, self._ends)
        return search.predicted(point)

    def _ratios(self) -> dict[str, float]:
        """Measured over planned speed, by name."""
        if len(self.searches) < 2:
            return {}
        plans, runs = self.searches["plan"].trials, self.searches["run"].trials
        return {
            run.name: speed(run) / speed(plans[point])
            for point, run in runs.items()
            if run.is_ok and point in plans and plans[point].is_ok
        }
