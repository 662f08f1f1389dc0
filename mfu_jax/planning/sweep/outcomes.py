"""What is known about a point: from its compiled program, or estimated from its neighbours."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from mfu_jax.planning.result.plan import Plan

Source = Literal[
    "compiled",
    "estimated",
    "ruled out",
    "invalid",
    "failed",
    "unknown",
    "planned",
    "measured",
]


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

    @property
    def name(self) -> str:
        """The values as ``key=value``."""
        return " ".join(f"{key}={text}" for key, text in self.values.items())


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """A compiled point.

    Attributes:
        fits: the compiler's verdict.
        batch: sequences per device.
        peak_bytes: peak memory; for a refused program, what it would need.
        limit_bytes: the device's memory.
        resident_bytes: weights, optimizer state and batch; 0 if refused.
        step_time_seconds: predicted; None if refused.
        tokens_per_sec_per_chip: predicted; None if refused or not known.
        mfu: predicted.
        hfu: predicted: the share of the step that its matmuls would take at their peak.
    """

    fits: bool
    batch: float
    peak_bytes: int = 0
    limit_bytes: int = 0
    resident_bytes: int = 0
    step_time_seconds: float | None = None
    tokens_per_sec_per_chip: float | None = None
    mfu: float | None = None
    hfu: float | None = None


def outcome_of(plan: Plan, batch: float) -> Outcome:
    """The part of a plan that a sweep keeps."""
    return Outcome(
        fits=plan.fits,
        batch=batch,
        peak_bytes=plan.memory_peak_bytes or 0,
        limit_bytes=plan.memory_limit_bytes or 0,
        resident_bytes=plan.resident_bytes,
        step_time_seconds=plan.step_time_seconds,
        tokens_per_sec_per_chip=plan.tokens_per_sec_per_chip,
        mfu=plan.mfu,
        hfu=plan.hfu,
    )


@dataclass(frozen=True, kw_only=True)
class EstimatedOutcome:
    """An estimate for an uncompiled point, from compiled points that differ only in their batch.

    Attributes:
        peak_bytes: peak memory.
        step_time_seconds: predicted.
        step_time_at_best: if everything but the matmuls took as long as at the smaller batch.
        tokens_per_sec_per_chip: at `step_time_seconds`.
        at_best: at `step_time_at_best`.
        mfu: at `step_time_seconds`.
    """

    peak_bytes: int
    step_time_seconds: float
    step_time_at_best: float
    tokens_per_sec_per_chip: float | None
    at_best: float | None
    mfu: float | None


def estimate(
    batch: float, known: Sequence[Outcome], alike: Sequence[Sequence[Outcome]] = ()
) -> EstimatedOutcome | None:
    """Estimates the memory and time of a batch.

    Two compiled batches give a straight line. With one, memory beyond the resident state grows
    with the batch, except for the part that a group with two compiled batches shows not to grow
    (gradients, gathered weights). The matmuls' time and half of the other time grow with it, too.

    Args:
        batch: sequences per device.
        known: compiled points of the same group.
        alike: compiled points of groups that differ only in how much they recompute.
    """
    fitting = sorted((o for o in known if o.fits and o.step_time_seconds), key=lambda o: o.batch)
    if not fitting:
        return None
    nearest = min(fitting, key=lambda o: abs(o.batch - batch))
    base = nearest.step_time_seconds or 0.0
    matmuls = base * min(nearest.hfu or 0.0, 1.0)
    growth = batch / nearest.batch - 1
    best = base + matmuls * growth if growth > 0 else base + base * growth
    seconds = base + (matmuls + base) / 2 * growth
    if len(fitting) > 1:
        low, high = _around(fitting, batch)
        seconds = max(_on_line(low, high, "step_time_seconds", batch), min(best, seconds))
    best = min(best, seconds)

    def scaled(rate: float | None, seconds: float) -> float | None:
        return None if rate is None else rate * batch / nearest.batch * base / seconds

    return EstimatedOutcome(
        peak_bytes=max(round(_peak(batch, fitting, known, alike)), nearest.resident_bytes),
        step_time_seconds=seconds,
        step_time_at_best=best,
        tokens_per_sec_per_chip=scaled(nearest.tokens_per_sec_per_chip, seconds),
        at_best=scaled(nearest.tokens_per_sec_per_chip, best),
        mfu=scaled(nearest.mfu, seconds),
    )


def _peak(
    batch: float,
    fitting: Sequence[Outcome],
    known: Sequence[Outcome],
    alike: Sequence[Sequence[Outcome]],
) -> float:
    points = fitting if len(fitting) > 1 else sorted(known, key=lambda o: o.batch)
    points = [point for point in points if point.peak_bytes]
    if len(points) > 1:
        return _on_line(*_around(points, batch), "peak_bytes", batch)
    only = fitting[0]
    fixed = max([only.resident_bytes, *map(_fixed_bytes, alike)])
    fixed = min(fixed, only.peak_bytes)
    return fixed + (only.peak_bytes - fixed) * batch / only.batch


def _fixed_bytes(known: Sequence[Outcome]) -> float:
    """Memory for a batch of 0, extrapolated from two compiled batches; 0 if there are not two."""
    fitting = sorted((o for o in known if o.fits and o.peak_bytes), key=lambda o: o.batch)
    return _on_line(fitting[0], fitting[-1], "peak_bytes", 0.0) if len(fitting) > 1 else 0.0


def _around(points: Sequence[Outcome], batch: float) -> tuple[Outcome, Outcome]:
    """The two neighbours of a batch, else the two nearest to it."""
    above = next((i for i, o in enumerate(points) if o.batch >= batch), len(points) - 1)
    above = max(above, 1)
    return points[above - 1], points[above]


def _on_line(low: Outcome, high: Outcome, name: str, batch: float) -> float:
    first, second = getattr(low, name), getattr(high, name)
    return float(first + (second - first) * (batch - low.batch) / (high.batch - low.batch))


def speed(point: Outcome | SweepRow) -> float:
    """Tokens per second, or steps per second if the tokens are not known."""
    if point.tokens_per_sec_per_chip:
        return point.tokens_per_sec_per_chip
    return 1 / point.step_time_seconds if point.step_time_seconds else 0.0
