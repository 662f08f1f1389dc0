"""Chooses which point of a sweep to compile next.

A larger batch needs more memory, and less recomputation needs more memory and less time, so one
compile also says something about neighbouring points. In each group (all but the batch fixed) the
search looks for the largest batch that fits, from the memory of the batches compiled so far, and
drops a group as soon as its best estimate is below what another group reaches.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from mfu_jax.planning.sweep.outcomes import EstimatedOutcome, Outcome, estimate, speed
from mfu_jax.planning.sweep.space import SweepPoint

REMAT = "remat_policy"
# Each policy keeps a subset of what the one before it keeps, and recomputes the rest.
_THRIFT = (
    *("none", "minimal_with_context", "minimal", "save_dot_except_mlpwi", "save_dot_except_mlp"),
    *("save_qkv_proj", "full"),
)
_SURE = 1.03  # accuracy of a line through two compiled peaks: see results/planning_cost.json
_MISSES = 2  # refused in a group: its memory is no line, so its open batches are halved
_UNSURE = 1.5  # with one compiled peak, whose fixed part is not known


@dataclass(frozen=True, kw_only=True)
class Analytic:
    """What follows from a point's config alone.

    Attributes:
        executed_flops: per device, recomputation included; None if not known.
        state_bytes: weights and optimizer state per device; 0 if not known.
    """

    executed_flops: float | None = None
    state_bytes: int = 0


class Search:
    """Chooses points until no remaining one could win.

    Args:
        points: all valid points.
        analytic: figures that follow from a point's config.
        limit_bytes: memory of a device.
    """

    def __init__(
        self,
        points: Sequence[SweepPoint],
        analytic: Callable[[SweepPoint], Analytic],
        limit_bytes: int,
    ) -> None:
        self.points = list(points)
        self.limit_bytes = limit_bytes
        self.outcomes: dict[SweepPoint, Outcome] = {}
        self.failed: set[SweepPoint] = set()
        self.analytic = {point: analytic(point) for point in self.points}
        self._groups: dict[tuple[tuple[str, str], ...], list[SweepPoint]] = defaultdict(list)
        for point in sorted(self.points, key=lambda p: p.batch):
            self._groups[point.group].append(point)

    def record(self, point: SweepPoint, outcome: Outcome) -> None:
        """Records that a point was compiled."""
        self.outcomes[point] = outcome
        if outcome.limit_bytes:
            self.limit_bytes = min(self.limit_bytes or outcome.limit_bytes, outcome.limit_bytes)

    def fail(self, point: SweepPoint) -> None:
        """Records that a point could not be compiled; the rest of its group would fail as well."""
        self.failed.update(self._groups[point.group])

    def next(self) -> SweepPoint | None:
        """The point to compile next; None if no other point could win."""
        wanted = [point for group in self._groups for point in self._wanted(group)]
        return min(wanted, key=self._order) if wanted else None

    def best(self) -> SweepPoint | None:
        """The fastest compiled point that fits."""
        fitting = [point for point, outcome in self.outcomes.items() if outcome.fits]
        return max(fitting, key=lambda p: speed(self.outcomes[p]), default=None)

    def estimate(self, point: SweepPoint) -> EstimatedOutcome | None:
        """The estimate for a point that was not compiled."""
        alike = [
            self._known(group)
            for group, points in self._groups.items()
            if group != point.group and same_but_remat(points[0], point)
        ]
        return estimate(point.batch, self._known(point.group), alike)

    def ruled_out(self, point: SweepPoint) -> str:
        """Why a point that was not compiled cannot fit; empty if it may."""
        state = self.analytic[point].state_bytes
        if self.limit_bytes and state > self.limit_bytes:
            return "its weights and optimizer state alone are larger than the memory"
        for other, outcome in self.outcomes.items():
            if not outcome.fits and other != point and _needs_more(point, other):
                return f"{other} does not fit, and needs less"
        return ""

    def predicted_to_fit(self, point: SweepPoint) -> bool | None:
        """Whether a point that was not compiled is expected to fit; None if not known."""
        if self.ruled_out(point):
            return False
        if any(o.fits and _needs_more(other, point) for other, o in self.outcomes.items()):
            return True
        found = self.estimate(point)
        if found is None or found.peak_bytes <= self.limit_bytes:
            return None if found is None else True
        fitting = sum(outcome.fits for outcome in self._known(point.group))
        is_far = found.peak_bytes > _UNSURE * self.limit_bytes
        return False if fitting > 1 or is_far else None

    def _known(self, group: tuple[tuple[str, str], ...]) -> list[Outcome]:
        return [self.outcomes[p] for p in self._groups[group] if p in self.outcomes]

    def _wanted(self, group: tuple[tuple[str, str], ...]) -> Iterator[SweepPoint]:
        """At most one point of a group: its first, or the largest one that is likely to fit."""
        known = self._known(group)
        open_points = [
            point
            for point in self._groups[group]
            if point not in self.outcomes and point not in self.failed and not self.ruled_out(point)
        ]
        fitting = [outcome.batch for outcome in known if outcome.fits]
        if not known:
            yield from (p for p in open_points[:1] if self._could_win(p))
            return
        larger = [p for p in open_points if p.batch > max(fitting, default=0)]
        likely = [p for p in larger if self._likely(p)]
        if sum(not outcome.fits for outcome in known) >= _MISSES:
            likely = likely[: (len(larger) + 1) // 2]
        for point in (likely or self._doubtful(larger, known))[-1:]:
            if self._could_win(point):
                yield point

    def _likely(self, point: SweepPoint) -> bool:
        found = self.estimate(point)
        return found is not None and found.peak_bytes <= self.limit_bytes

    def _doubtful(self, larger: Sequence[SweepPoint], known: Sequence[Outcome]) -> list[SweepPoint]:
        """The next larger batch, unless its estimate clearly exceeds the limit."""
        found = self.estimate(larger[0]) if larger else None
        fitting = sum(outcome.fits for outcome in known)
        margin = _SURE if fitting > 1 else _UNSURE
        if found is None or found.peak_bytes > margin * self.limit_bytes:
            return []
        return [larger[0]]

    def _could_win(self, point: SweepPoint) -> bool:
        """Whether a group's largest batch could be faster than what was compiled."""
        best = self.best()
        if best is None:
            return True
        reached = self.outcomes[best]
        found = self.estimate(self._farthest(point))
        if found is not None:
            return (found.at_best or 1 / found.step_time_at_best) > speed(reached)
        mine, theirs = self.analytic[point].executed_flops, self.analytic[best].executed_flops
        if mine is None or theirs is None or not same_but_remat(point, best):
            return True
        largest = self._groups[point.group][-1]
        fewer = mine / point.batch < theirs / best.batch
        return fewer or largest.batch > best.batch

    def _farthest(self, point: SweepPoint) -> SweepPoint:
        """The group's largest batch that may fit; just `point` once two compiled batches fit."""
        if sum(outcome.fits for outcome in self._known(point.group)) > 1:
            return point
        group = self._groups[point.group]
        return [p for p in group if p == point or not self.ruled_out(p)][-1]

    def _order(self, point: SweepPoint) -> tuple[bool, float, float]:
        """Sort key: groups with a compiled point last, as the others may rule more out."""
        flops = self.analytic[point].executed_flops
        compiled = bool(self._known(point.group))
        per_sequence = float("inf") if flops is None else flops / point.batch
        found = self.estimate(point)
        speed = (found.at_best or 0.0) if found else 0.0
        return compiled, -speed if compiled else per_sequence, -point.batch


def same_but_remat(one: SweepPoint, other: SweepPoint) -> bool:
    """Whether two points differ only in what is recomputed and in the batch."""
    first, second = dict(one.group), dict(other.group)
    first.pop(REMAT, None)
    second.pop(REMAT, None)
    return first == second


def _needs_more(one: SweepPoint, other: SweepPoint) -> bool:
    """Whether `one` certainly needs at least as much memory as `other`."""
    if not same_but_remat(one, other) or one.batch < other.batch:
        return False
    mine, theirs = _rank(one.values), _rank(other.values)
    if one.values.get(REMAT) == other.values.get(REMAT):
        return True
    return mine is not None and theirs is not None and mine < theirs


def _rank(values: Mapping[str, str]) -> int | None:
    policy = values.get(REMAT, "")
    return _THRIFT.index(policy) if policy in _THRIFT else None
