"""Step times with the noise of real runs; shares no code with what judges them."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass

Shape = Callable[[int, random.Random], Iterator[float]]
"""Factors of a run's steps: of how many, by what chance."""


@dataclass(frozen=True, kw_only=True)
class Noise:
    """What disturbs a step time of 1.

    Attributes:
        spread: standard deviation of each step's own logarithm.
        memory: correlation of one step with the next.
        wander: standard deviation of the part that remembers.
        outliers: share of steps with an outlier, at least 5% longer, of a Pareto law.
        drift: standard deviation of the change from the first step to the last.
        burst: share of the run that is 8% slower, in one piece.
        shape: what else the steps are multiplied by.
    """

    spread: float
    memory: float = 0.0
    wander: float = 0.0
    outliers: float = 0.02
    drift: float = 0.0
    burst: float = 0.0
    shape: Shape | None = None


def two_modes(steps: int, rng: random.Random) -> Iterator[float]:
    """Three steps in ten take 4% longer."""
    return (1.04 if rng.random() < 0.3 else 1.0 for _ in range(steps))


def clock_steps(steps: int, rng: random.Random) -> Iterator[float]:
    """The clock goes 1.5% down and up again, every 40 steps on average."""
    is_slow = rng.random() < 0.5
    for _ in range(steps):
        is_slow ^= rng.random() < 1 / 40
        yield 1.015 if is_slow else 1.0


def checkpoints(steps: int, rng: random.Random) -> Iterator[float]:
    """Every 50th step takes up to three times as long, and the two after it 8% longer."""
    phase = rng.randrange(50)
    for i in range(phase, phase + steps):
        yield rng.uniform(1.3, 3.0) if i % 50 == 0 else 1.08 if i % 50 <= 2 else 1.0


def collector(steps: int, rng: random.Random) -> Iterator[float]:
    """Every tenth step takes 4% longer: garbage collection."""
    phase = rng.randrange(10)
    return (1.04 if (i + phase) % 10 == 0 else 1.0 for i in range(steps))


def warming(steps: int, rng: random.Random) -> Iterator[float]:
    """A cold chip is 1 to 2% faster."""
    gain, patience = rng.uniform(0.01, 0.02), rng.uniform(20, 60)
    return (1 - gain * math.exp(-i / patience) for i in range(steps))


def cycles(steps: int, rng: random.Random) -> Iterator[float]:
    """A fan, or a neighbour with a period: 1.2% up and down in 25 to 60 steps."""
    period, phase = rng.uniform(25, 60), rng.uniform(0, math.tau)
    return (1 + 0.012 * math.sin(math.tau * i / period + phase) for i in range(steps))


def slowest_of_many(steps: int, rng: random.Random) -> Iterator[float]:
    """The slowest of many hosts: a Gumbel law, skewed to the slow side."""
    return (1 - 0.012 * math.log(-math.log(1 - rng.random())) for _ in range(steps))


def fat_tails(steps: int, rng: random.Random) -> Iterator[float]:
    """Student's t with 2.5 degrees of freedom: outliers to both sides."""
    for _ in range(steps):
        yield math.exp(0.01 * rng.gauss(0, 1) / math.sqrt(rng.gammavariate(1.25, 2) / 2.5))


def a_shift(steps: int, rng: random.Random) -> Iterator[float]:
    """From some step on the run is faster or slower, by 0.8%."""
    begin, change = rng.randrange(steps), rng.gauss(0, 0.008)
    return (1 + change * (i >= begin) for i in range(steps))


def alternating(steps: int, rng: random.Random) -> Iterator[float]:
    """Every other step takes 3% longer."""
    phase = rng.randrange(2)
    return (1 + 0.03 * ((i + phase) % 2) for i in range(steps))


KINDS = {
    "independent": Noise(spread=0.015),
    "remembering": Noise(spread=0.008, memory=0.9, wander=0.006),
    "wandering": Noise(spread=0.010, memory=0.97, wander=0.005),
    "drifting": Noise(spread=0.010, memory=0.8, wander=0.005, outliers=0.03, drift=0.005),
    "heavy": Noise(spread=0.030, memory=0.5, wander=0.010, outliers=0.05),
    "bursting": Noise(spread=0.010, memory=0.7, wander=0.004, burst=0.08),
    "two modes": Noise(spread=0.006, shape=two_modes),
    "clock steps": Noise(spread=0.008, shape=clock_steps),
    "checkpoints": Noise(spread=0.010, shape=checkpoints),
    "collector": Noise(spread=0.012, shape=collector),
    "AR(1)": Noise(spread=0.005, memory=0.95, wander=0.008, outliers=0.0),
}
# The estimator was chosen without these.
UNSEEN_KINDS = {
    "warming": Noise(spread=0.008, memory=0.6, wander=0.004, shape=warming),
    "cycles": Noise(spread=0.010, shape=cycles),
    "slowest of many": Noise(spread=0.004, memory=0.8, wander=0.004, shape=slowest_of_many),
    "fat tails": Noise(spread=0.002, shape=fat_tails),
    "a shift": Noise(spread=0.010, shape=a_shift),
    "alternating": Noise(spread=0.010, shape=alternating),
}


def step_times(noise: Noise, steps: int, rng: random.Random, *, mean: float = 1.0) -> list[float]:
    """The step times of one run, in seconds."""
    wander, slope = rng.gauss(0, noise.wander), rng.gauss(0, noise.drift)
    start = rng.randrange(steps)
    burst = range(start, start + round(noise.burst * steps))
    fresh = noise.wander * math.sqrt(1 - noise.memory**2)
    found = []
    for i in range(steps):
        wander = noise.memory * wander + rng.gauss(0, fresh)
        seconds = 1 + wander + slope * (i / steps - 0.5) + 0.08 * (i in burst)
        seconds *= math.exp(rng.gauss(0, noise.spread))
        if rng.random() < noise.outliers:
            seconds *= 1 + 0.05 * rng.paretovariate(1.3)
        found.append(mean * seconds)
    if noise.shape is not None:
        return [x * y for x, y in zip(found, noise.shape(steps, rng), strict=True)]
    return found
