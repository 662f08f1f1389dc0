"""What is known about a point: from its compiled program, or estimated from its neighbours."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mfu_jax.errors import UserError
from mfu_jax.planning.result.plan import Plan
from mfu_jax.planning.sweep.space import SweepPoint
from mfu_jax.storage.files import unwritable
from mfu_jax.util.user_files import read_text


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
        executed_flops: per device.
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
    executed_flops: int | None = None


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
        executed_flops=plan.executed_flops,
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
    return EstimatedOutcome(
        peak_bytes=max(round(_peak(batch, fitting, known, alike)), nearest.resident_bytes),
        step_time_seconds=seconds,
        step_time_at_best=min(best, seconds),
        tokens_per_sec_per_chip=_scaled(
            nearest.tokens_per_sec_per_chip, nearest, batch, base, seconds
        ),
        at_best=_scaled(nearest.tokens_per_sec_per_chip, nearest, batch, base, min(best, seconds)),
        mfu=_scaled(nearest.mfu, nearest, batch, base, seconds),
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


def _scaled(
    rate: float | None, nearest: Outcome, batch: float, base: float, seconds: float
) -> float | None:
    return None if rate is None else rate * batch / nearest.batch * base / seconds


_MOST_BYTES = 2**26
_EXPECTED = "the state of a sweep; usually another file; pass another state=FILE"


class StateFile:
    """Reads and appends outcomes.

    Args:
        path: path of the file, which need not exist.
        identity: identifies the sweep. A file of another sweep is an error.

    Raises:
        UserError: the file belongs to another sweep, is not a state file, or is not writable.
    """

    def __init__(self, path: Path, identity: str) -> None:
        self.path = path
        self.identity = identity
        self.outcomes = self._read()
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise unwritable(path, "state", error) from None

    def add(self, point: SweepPoint, outcome: Outcome) -> None:
        """Appends a point, which is on disk when this returns.

        Raises:
            UserError: the file cannot be written.
        """
        held = {"point": point.pairs, "outcome": dataclasses.asdict(outcome)}
        start = b"" if self.path.exists() else json.dumps({"sweep": self.identity}).encode()
        try:
            with open(self.path, "ab") as file:
                # Newline first, because a killed process may have left half a line.
                file.write(start + b"\n" + json.dumps(held).encode())
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            raise unwritable(self.path, "state", error) from None

    def _read(self) -> dict[SweepPoint, Outcome]:
        if not self.path.exists():
            return {}
        lines = read_text(str(self.path), _EXPECTED, _MOST_BYTES).splitlines()
        if not lines:
            return {}
        if _parsed(lines[0]).get("sweep") != self.identity:
            raise UserError(
                f"state {str(self.path)!r} is of another sweep: its keys, chips, flags or versions "
                "differ; pass another state=FILE, or delete it"
            )
        return dict(_outcome(_parsed(line)) for line in lines[1:] if _parsed(line))


def _parsed(line: str) -> Mapping[str, Any]:
    """A parsed line; empty if broken: a killed process may leave half a line."""
    try:
        value = json.loads(line)
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}


def _outcome(line: Mapping[str, Any]) -> tuple[SweepPoint, Outcome]:
    return SweepPoint(tuple((key, text) for key, text in line["point"])), Outcome(**line["outcome"])
