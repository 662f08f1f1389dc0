"""Holds the counted FLOPs against the tensor cores' own counter while the run goes on.

Tensor cores that work in every cycle reach the peak, scaled by their clock. So the share of cycles
in which they work is HFU × (the peak's clock / the present one) × what tiles add, if peak, dtype
and count are right. Both are taken over the same seconds: from one reading of the counter to the
next.
"""

from __future__ import annotations

import math
from collections import deque
from typing import NamedTuple

from mfu_jax import names
from mfu_jax.logger.records.step_cost import StepCost
from mfu_jax.logger.records.step_record import StepRecord
from mfu_jax.logger.timing.timed_step import TimedStep
from mfu_jax.util.formatting import percent

# What else may differ if the ledger has the tiles of Triton and cuDNN: an H100's counters are up to
# 3% above the count in cuBLAS, whose tiles only a trace names. Without the ledger's, up to 7% in
# large matmuls, convolutions and causal attention, and 40% in Triton's odd shapes.
_WITH_TILES, _WITHOUT_TILES = 0.05, 0.10
# At its power limit a GPU changes its clock from kernel to kernel, lowest in matmuls; NVML reads
# that of a moment. In healthy steps of Llama 3 8B and 3.2 1B on an H200, whose cuBLAS kernels take
# 18% longer once it is warm, the counter is 1.10 and 1.15 times the count (h200_runs.json).
_AT_POWER_LIMIT = 0.20
# So many readings must agree, beyond so many standard errors: every reading is a new test.
_FEWEST_OF_GPUS, _ERRORS_OF_GPUS = 10, 5.0
_FEWEST_OF_TPUS, _ERRORS_OF_TPUS = 30, 4.0
# Readings may be equal by chance, so a GPU's is not taken to be more exact than this.
_GPU_DEVIATION = 0.02
# Of an interval, this share must be steps, or waits for data, in which nothing runs.
_COVERED = 0.95
_MOST_STEPS = 100_000

_DTYPE = (
    "a peak of a dtype that the matmuls do not run in (too high: fp8 for bf16; too low: float32 "
    "for TF32), or of another device"
)
_MORE = (
    "a kernel without FLOPs (see the unaccounted list), or tiles that odd shapes do not fill",
    "a clock below the one that was read: throttling, or a TPU's power state",
    "another process on the device",
)
_FEWER = (
    "FLOPs of the whole job, or of pairs that a kernel skips",
    "matmuls that do not run on the tensor cores (precision=highest on a GPU)",
)


class TensorActivity(NamedTuple):
    """What the counters say of some seconds.

    Attributes:
        begin: of the wall clock, in seconds.
        end: likewise.
        active: share of cycles in which the tensor cores worked, over all devices.
        clock: their clock relative to the one at which they reach the peak; 1 if not known.
        at_power_limit: whether a GPU throttles for its power, so that its clock is not known well.
    """

    begin: float
    end: float
    active: float
    clock: float = 1.0
    at_power_limit: bool = False


class _StepSpan(NamedTuple):
    begin: float
    end: float
    hfu: float | None  # with tiles


class CountCheck:
    """Compares a run's HFU with the tensor cores' counter; on the recorder's thread.

    Args:
        is_tpu: a reading is what libtpu saw in 10 µs of a second, and no ledger has TPUs' tiles.
    """

    def __init__(self, *, is_tpu: bool = False) -> None:
        self._is_tpu = is_tpu
        self._has_tiles = not is_tpu
        self._cost: object = None
        self._tiles: float | None = None  # of the last cost
        self._intervals: deque[TensorActivity] = deque(maxlen=_MOST_STEPS)
        self._spans: deque[_StepSpan] = deque(maxlen=_MOST_STEPS)
        # Of all comparisons: their number, and sums of counter, count, and squared difference.
        self._compared = 0
        self._counter = self._count = self._squares = 0.0
        self._is_told = self._at_power_limit = False

    def add_interval(self, interval: TensorActivity) -> None:
        """Adds a reading, which is compared once all of its steps are known; on any thread."""
        self._intervals.append(interval)

    def on_step(self, step: TimedStep, record: StepRecord) -> tuple[dict[str, float], list[str]]:
        """The comparison that this step completes, as metrics, and the warning, at most once."""
        end, seconds = record.unix_seconds, record.scalars.get("perf/step_time_seconds", 0.0)
        begin = end - seconds
        if waits := step.wait_seconds:
            self._spans.append(_StepSpan(begin - waits, begin, 0.0))
        self._spans.append(_StepSpan(begin, end, self._hfu_of(step, record)))
        scalars: dict[str, float] = {}
        while self._intervals and self._intervals[0].end <= end:
            interval = self._intervals.popleft()
            hfu = self._hfu(interval)
            while self._spans and self._spans[0].end <= interval.end:
                self._spans.popleft()
            if hfu is not None:
                self._at_power_limit |= interval.at_power_limit
                self._compare(interval.active, hfu / interval.clock)
                scalars[names.TENSOR_ACTIVE] = interval.active
                scalars[names.TENSOR_ACTIVE_BY_COUNT] = hfu / interval.clock
        return scalars, self._warning() if scalars else []

    def _hfu_of(self, step: TimedStep, record: StepRecord) -> float | None:
        if step.cost is not self._cost and isinstance(step.cost, StepCost):
            self._cost, self._tiles = step.cost, step.cost.tiles
            if step.cost.executed_flops_per_device is not None:  # it is counted
                self._has_tiles &= self._tiles is not None
        hfu = record.scalars.get("perf/hfu")
        return None if hfu is None else hfu * (self._tiles or 1.0)

    def _hfu(self, interval: TensorActivity) -> float | None:
        """HFU over an interval, with tiles; None unless it was all steps with known FLOPs."""
        covered = optimal = 0.0
        for span in self._spans:
            seconds = min(span.end, interval.end) - max(span.begin, interval.begin)
            if seconds > 0:
                if span.hfu is None:
                    return None
                covered += seconds
                optimal += seconds * span.hfu
        length = interval.end - interval.begin
        return optimal / length if covered >= _COVERED * length > 0 else None

    def _compare(self, counter: float, count: float) -> None:
        self._compared += 1
        self._counter += counter
        self._count += count
        self._squares += (counter - count) ** 2

    def _warning(self) -> list[str]:
        fewest = _FEWEST_OF_TPUS if self._is_tpu else _FEWEST_OF_GPUS
        if self._is_told or self._compared < fewest or not (self._counter and self._count):
            return []
        counter, count = self._counter / self._compared, self._count / self._compared
        difference = counter - count
        if self._is_tpu:  # a core works in its 10 µs or not, and all of them may be in step
            errors, variance = _ERRORS_OF_TPUS, max(0.0, count * (1 - count))
        else:
            errors, variance = _ERRORS_OF_GPUS, _GPU_DEVIATION**2
        variance = max(variance, self._squares / self._compared - difference**2)
        error = errors * math.sqrt(variance / (self._compared - 1))
        tolerance = _WITH_TILES if self._has_tiles else _WITHOUT_TILES
        tolerance = max(tolerance, _AT_POWER_LIMIT * self._at_power_limit)
        if abs(difference) <= max(tolerance * count, error):
            return []
        self._is_told = True
        ratio = counter / count
        causes = [*(_MORE if ratio > 1 else _FEWER), _DTYPE]
        if 1.8 < max(ratio, 1 / ratio) < 2.2:
            causes.reverse()
        return [
            f"the tensor cores are active {percent(counter)} of the time by their counter, "
            f"{percent(count)} by the executed FLOPs, {ratio:.2f} times; usually "
            f"{'; or '.join(causes)}"
        ]
