"""Step times with the noise of real runs: outliers, drift, neighbours that are alike, bursts."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass


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
    """

    spread: float
    memory: float = 0.0
    wander: float = 0.0
    outliers: float = 0.02
    drift: float = 0.0
    burst: float = 0.0


KINDS = {
    "independent": Noise(spread=0.015),
    "remembering": Noise(spread=0.008, memory=0.9, wander=0.006),
    "wandering": Noise(spread=0.010, memory=0.97, wander=0.005),
    "drifting": Noise(spread=0.010, memory=0.8, wander=0.005, outliers=0.03, drift=0.005),
    "heavy": Noise(spread=0.030, memory=0.5, wander=0.010, outliers=0.05),
    "bursting": Noise(spread=0.010, memory=0.7, wander=0.004, burst=0.08),
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
    return found
