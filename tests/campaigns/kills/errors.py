"""How far the report of a killed run is from the truth, by category."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from mfu_jax.logger.config import LoggerConfig
from mfu_jax.runs.goodput.run_time import CATEGORIES, Attempt
from mfu_jax.runs.goodput.wall_clock import read_run
from tests.campaigns.kills.truth import Seen, truth_of

# What the promise allows: the larger of both.
_MOST_SECONDS, _MOST_SHARE = 0.2, 0.01
# A kill takes the numbers, not the time, of the steps that were not yet written together, and of
# those that ended while the last batch was on its way to the file.
_UNSEEN_SECONDS = LoggerConfig().write_period_seconds + 0.1
# A process that lived for longer has a run log; one that was killed before has been down time.
_NOTED_SECONDS = 1.0


@dataclass(frozen=True, kw_only=True)
class Category:
    """One category of one process: seconds as reported, and the true ones."""

    said: float
    truth: float

    @property
    def error(self) -> float:
        """Seconds."""
        return abs(self.said - self.truth)

    @property
    def of_allowed(self) -> float:
        """The error in parts of what is allowed."""
        return self.error / max(_MOST_SECONDS, _MOST_SHARE * self.truth)


@dataclass(frozen=True, kw_only=True)
class Errors:
    """What was compared.

    Attributes:
        starts: of processes.
        signals: how many of each hit a living process.
        categories: of all processes, by name.
        unseen: for each kill of a process 0, seconds since the end of the first step that has no
            number, and how many there are.
        wrong: broken promises, a line each.
    """

    starts: int
    signals: Counter[str]
    categories: dict[str, list[Category]]
    unseen: list[tuple[float, int]]
    wrong: list[str]

    @classmethod
    def of(cls, jobs: Iterable[Errors]) -> Errors:
        """Of several jobs."""
        found = list(jobs)
        return cls(
            starts=sum(job.starts for job in found),
            signals=sum((job.signals for job in found), Counter()),
            categories={
                name: [one for job in found for one in job.categories[name]]
                for name in found[0].categories
            },
            unseen=[one for job in found for one in job.unseen],
            wrong=[line for job in found for line in job.wrong],
        )


def compare(run_folder: Path, seen: list[list[Seen]]) -> Errors:
    """The report of one job beside what its killer saw."""
    run = read_run(run_folder)
    categories: dict[str, list[Category]] = {name: [] for name in (*CATEGORIES, "wall clock")}
    for process, attempts in enumerate(seen):
        said, truth = dict(run.processes[process].time), truth_of(attempts)
        said["wall clock"] = sum(said.values())
        truth["wall clock"] = attempts[-1].end - attempts[0].start
        for name, found in categories.items():
            found.append(Category(said=said[name], truth=truth[name]))
    name = run_folder.parent.name
    wrong = [
        f"{category} of process {process}: {one.said:.3f} s, truth {one.truth:.3f} s"
        for category, found in categories.items()
        for process, one in enumerate(found)
        if one.of_allowed > 1.0
    ]
    done = [step for attempt in seen[0] for step in attempt.steps]
    if run.steps != len(set(done)):
        wrong.append(f"{run.steps} steps, truth {len(set(done))}")
    unseen = len(done) - run.steps - run.lost_steps
    if not 0 <= unseen <= sum(map(_last_steps, seen[0])):
        wrong.append(f"{run.lost_steps} steps lost, {unseen} more in truth")
    if sum(run.time.values()) != run.wall_seconds:
        wrong.append("the categories do not add up")
    noted = sum(one.end - one.start > _NOTED_SECONDS for one in seen[0])
    if not noted <= run.restarts + 1 <= len(seen[0]):
        wrong.append(f"{run.restarts} restarts, truth {len(seen[0]) - 1}")
    if _recorded(run_folder) != sorted(set(done)):
        wrong.append("the metrics file lacks a step, or has one twice")
    return Errors(
        starts=sum(map(len, seen)),
        signals=Counter(one.told for attempts in seen for one in attempts if one.told),
        categories=categories,
        unseen=_unseen(run.attempts, seen[0]),
        wrong=[f"{name}: {line}" for line in wrong],
    )


def _unseen(attempts: Iterable[Attempt], seen: list[Seen]) -> list[tuple[float, int]]:
    """What each kill left without a number; see `Errors`."""
    last = {
        number: attempt.last_step
        for attempt in attempts
        for number, one in enumerate(seen)
        if attempt.last_step is not None and one.start < attempt.end <= one.end + _MOST_SECONDS
    }
    found = []
    for number, one in enumerate(seen):
        ends = [
            at for at, event, step in one.marks if event == "-step" and step > last.get(number, -1)
        ]
        if one.killed is not None and ends:
            found.append((one.killed - ends[0], len(ends)))
    return found


def _last_steps(seen: Seen) -> int:
    """Steps that a kill may have left without a number."""
    if seen.killed is None:
        return 0
    ends = [at for at, event, _ in seen.marks if event == "-step"]
    return sum(at > seen.killed - _UNSEEN_SECONDS for at in ends)


def _recorded(run_folder: Path) -> list[int]:
    lines = (run_folder / "metrics.jsonl").read_text().splitlines()
    return [record["step"] for record in map(json.loads, lines) if "step" in record]


def table(found: Errors) -> str:
    """The worst errors by category, then what was wrong."""
    signals = ", ".join(f"{count} {name}" for name, count in sorted(found.signals.items()))
    lines = [
        f"{found.starts} starts of processes, {sum(found.signals.values())} hit alive ({signals})",
        f"{'category':<12}{'truth':>12}{'worst error':>14}{'of allowed':>12}",
    ]
    for name, all_of_it in found.categories.items():
        worst = max(all_of_it, key=lambda one: one.of_allowed)
        truth = sum(one.truth for one in all_of_it)
        lines.append(f"{name:<12}{truth:10.1f} s{worst.error:12.3f} s{worst.of_allowed:12.0%}")
    if found.unseen:
        age, count = max(found.unseen)
        lines.append(
            f"{sum(n for _, n in found.unseen)} steps without a number after "
            f"{len(found.unseen)} kills; {count} after one, the first of them {age:.3f} s before it"
        )
    allowed = f"{_MOST_SHARE:.0%} or {_MOST_SECONDS} s"
    return "\n".join([*lines, *(found.wrong or [f"every category within {allowed}"])])
