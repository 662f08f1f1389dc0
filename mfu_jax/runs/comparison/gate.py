"""Whether a run is slower than its baseline by more than a threshold and more than chance."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any
from xml.etree import ElementTree

from mfu_jax.errors import UserError, one_line
from mfu_jax.runs.comparison.runs import (
    STEP_TIME,
    WITH_WAITS,
    MetricChange,
    RunComparison,
    interval,
    signed,
    unseen,
)
from mfu_jax.storage.targets import write_whole
from mfu_jax.util.formatting import percent, span


@dataclass(frozen=True, kw_only=True)
class GateCheck:
    """One metric against the threshold.

    Attributes:
        row: the metric of both runs.
        threshold: the smallest slowdown that fails, as a fraction.
    """

    row: MetricChange
    threshold: float

    @property
    def has_failed(self) -> bool:
        """Whether the slowdown is real and at least the threshold."""
        speed = self.row.speed
        least = max(self.threshold, unseen(speed))
        return speed.is_real and speed.change < 0 and self.slowdown >= least

    @property
    def slowdown(self) -> float:
        """How much longer the same work takes; negative if it takes less."""
        return 1 / (1 + self.row.speed.change) - 1

    @property
    def hidden(self) -> float:
        """The largest slowdown that chance may hide: of the interval, or of a short run's noise."""
        low = self.row.speed.low
        in_interval = 0.0 if low is None else 1 / (1 + low) - 1
        return max(0.0, in_interval, self.slowdown + unseen(self.row.speed))

    @property
    def text(self) -> str:
        """The finding, in one line."""
        found, show = self.row.difference, self.row.metric.text
        return (
            f"{self.row.metric.title} {show(found.a)} → {show(found.b)} ({signed(found.change)}, "
            f"interval {interval(found)})"
        )


@dataclass(frozen=True, kw_only=True)
class Gate:
    """The checks of one run, and their result.

    Attributes:
        comparison: the run (B) against its baseline (A).
        checks: by metric.
    """

    comparison: RunComparison
    checks: tuple[GateCheck, ...]

    @property
    def failed(self) -> tuple[GateCheck, ...]:
        """The checks that failed."""
        return tuple(check for check in self.checks if check.has_failed)

    @property
    def has_failed(self) -> bool:
        """Whether the run is slower than its baseline."""
        return bool(self.failed)

    @property
    def is_decided(self) -> bool:
        """Whether the steps tell a slowdown of the threshold from none."""
        hidden = (check.hidden <= check.threshold for check in self.checks)
        return self.has_failed or (all(hidden) and not self._rare_waits)

    @property
    def _rare_waits(self) -> float:
        """Seconds that a step waits longer for data in the mean, if the threshold is reached.

        Trimmed means miss waits in fewer than a fifth of the steps.
        """
        step = self.comparison.row(STEP_TIME)
        waits = self.comparison.split.get("data wait", 0.0)
        is_enough = step is not None and waits >= self.checks[0].threshold * step.difference.a
        return waits if is_enough and self.comparison.is_step_time_decisive else 0.0

    @property
    def message(self) -> str:
        """The answer, in one line."""
        threshold = percent(self.checks[0].threshold)
        if self.has_failed:
            return f"regression of at least {threshold}: {'; '.join(c.text for c in self.failed)}"
        noisiest = max(self.checks, key=lambda check: check.hidden)
        if self.is_decided:
            return f"no regression of {threshold} or more: {self.checks[0].text}"
        if noisiest.hidden <= noisiest.threshold:
            return (
                f"could not tell a slowdown of {threshold}: waits for data take "
                f"{span(self._rare_waits)} of a step more, in few steps; {self.checks[0].text}"
            )
        return (
            f"could not tell a slowdown of {threshold}: {noisiest.text}; noise hides slowdowns "
            f"below {percent(noisiest.hidden)}"
        )

    @property
    def finding(self) -> str:
        """The answer, with its first word."""
        if self.has_failed:
            return f"FAILED: {self.message}"
        return f"passed: {self.message}" if self.is_decided else self.message

    def to_json(self) -> dict[str, Any]:
        """Everything as plain values."""
        return {
            "regression": self.has_failed,
            "could_tell": self.is_decided,
            "threshold": self.checks[0].threshold,
            "message": self.message,
            "checks": [
                {
                    "metric": check.row.metric.name,
                    "slowdown": check.slowdown,
                    "failed": check.has_failed,
                    **check.row.to_json(),
                }
                for check in self.checks
            ],
            "comparison": self.comparison.to_json(),
        }

    def annotation(self) -> str:
        """The command that makes GitHub Actions show the result beside the run."""
        kind = "error" if self.has_failed else "notice"
        text = one_line(self.message).replace("%", "%25")
        return f"::{kind} title=mfu-jax gate::{text}"

    def markdown(self, verdict: str) -> str:
        """A pull request's comment: the answer, the verdict, a row for each check, all metrics.

        Args:
            verdict: of the run, as one sentence, without the answer.
        """
        answer, _, numbers = one_line(self.finding).partition(": ")
        names = (c.row.metric.title for c in self.checks)
        cells = ((n, c.text.removeprefix(f"{n} ")) for n, c in zip(names, self.checks, strict=True))
        rows = [
            f"| {' | '.join(one_line(t).replace('|', chr(92) + '|') for t in c)} |" for c in cells
        ]
        return "\n".join(
            [
                f"**mfu-jax gate: {answer}** {numbers}",
                "",
                one_line(verdict),
                "",
                *("| check | run against baseline |", "|---|---|", *rows),
                "",
                f"<details><summary>{self.comparison.b} against {self.comparison.a}</summary>",
                *("", "```text", self.comparison.render(), "```", "</details>"),
            ]
        )

    def write_junit(self, name: str) -> None:
        """Writes the checks as one JUnit test suite.

        Raises:
            UserError: the file cannot be written.
        """
        suite = ElementTree.Element(
            "testsuite",
            name="mfu-jax gate",
            tests=str(len(self.checks)),
            failures=str(len(self.failed)),
            errors="0",
        )
        suite.extend(self._cases())
        text = ElementTree.tostring(suite, encoding="unicode", xml_declaration=True)
        write_whole(name, "--junit", text.encode())

    def _cases(self) -> Iterator[ElementTree.Element]:
        for check in self.checks:
            case = ElementTree.Element(
                "testcase", classname="mfu_jax.gate", name=check.row.metric.title
            )
            text = one_line(f"{check.text}; {self.comparison.b} against {self.comparison.a}")
            if check.has_failed:
                failure = ElementTree.SubElement(case, "failure", message=one_line(check.text))
                failure.text = text
            else:
                ElementTree.SubElement(case, "system-out").text = text
            yield case


def check(comparison: RunComparison, *, threshold: float) -> Gate:
    """Checks the metric that decides between two runs, and the time including the wait for data.

    Args:
        comparison: its run A is the baseline.
        threshold: the smallest slowdown that fails, as a fraction.

    Raises:
        UserError: too few steps to decide.
    """
    if not comparison.decisive.difference.is_known:
        a, b = comparison.steps
        raise UserError(
            f"{a} measured steps of {comparison.a} and {b} of the run are too few; expected 4 of "
            "each run, also of each baseline, better 20",
            hint="train longer, or pass warmup_steps=0",
        )
    rows = [comparison.decisive]
    if (waits := comparison.row(WITH_WAITS)) is not None and comparison.is_step_time_decisive:
        rows.append(waits)
    return Gate(
        comparison=comparison, checks=tuple(GateCheck(row=row, threshold=threshold) for row in rows)
    )
