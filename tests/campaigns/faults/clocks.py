"""Clocks that jump, stop or run backwards under a loop whose steps take a quarter of a second."""

from __future__ import annotations

import logging
import random
from collections.abc import Callable

from mfu_jax.logger.metric_logger import MetricLogger
from mfu_jax.sinks import Sink, StepRecord
from tests.campaigns.promises import Promise

STEPS = 100
_SECONDS = 0.25
_KINDS: dict[str, Callable[[float, random.Random], float]] = {
    "the wall clock jumps ahead by an hour": lambda wall, chance: wall + 3600.0,
    "the wall clock jumps back by a day": lambda wall, chance: wall - 86400.0,
    "the wall clock jumps by up to 10 s at random": lambda wall, c: wall + c.uniform(-10, 10),
    "the wall clock is set to 1970": lambda wall, chance: 0.0,
}


class _Seconds(Sink):
    keeps_every_step = True

    def __init__(self) -> None:
        self.seconds: list[float] = []

    def write(self, record: StepRecord) -> None:
        self.seconds.append(record.scalars["perf/step_time_seconds"])


def rows(count: int, seed: int) -> list[Promise]:
    """One row per kind of fault, `count` runs each."""
    logging.getLogger("mfu_jax").setLevel(logging.CRITICAL)
    return [_row(kind, jump, count, seed) for kind, jump in _KINDS.items()]


def _row(
    kind: str, jump: Callable[[float, random.Random], float], count: int, seed: int
) -> Promise:
    row = Promise(kind)
    chance = random.Random(seed)
    for number in range(count):
        wall, monotonic = 1.7e9, 1000.0
        sink = _Seconds()
        logger = MetricLogger(
            sinks=[sink],
            warmup_steps=0,
            clock=lambda: wall,  # noqa: B023
            monotonic=lambda: monotonic,  # noqa: B023
        )
        faults = {chance.randrange(STEPS) for _ in range(5)}
        for step in range(STEPS):
            wall, monotonic = wall + _SECONDS, monotonic + _SECONDS
            if step in faults:
                wall = jump(wall, chance)
            logger.record(step, {"loss": 1.0})
        logger.close()
        row.count += 1
        # The first step begins with the logger, the last one ends with it.
        wrong = [s for s in sink.seconds[1:-1] if abs(s - _SECONDS) > 0.06]
        row.expect(not wrong, f"run {number}: step times {wrong[:3]}")
        row.expect(len(sink.seconds) == STEPS, f"run {number}: {len(sink.seconds)} records")
    return row
