"""Counts false alarms and missed differences of A/B verdicts over simulated pairs of runs.

By hand: ``python -m tests.support.comparison_campaign [PAIRS [STEPS]]``
"""

from __future__ import annotations

import random
import sys
from dataclasses import dataclass

from mfu_jax.runs.comparison import compare
from mfu_jax.runs.run_comparison import result
from tests.support.run_noise import KINDS, Noise, step_times


@dataclass
class Counts:
    """Of pairs without a difference, and of pairs in which B takes 2% longer."""

    pairs: int = 0
    false_alarms: int = 0
    detected: int = 0

    def add(self, noise: Noise, steps: int, rng: random.Random) -> None:
        """Simulates one pair of either sort."""
        a, b, slower = (step_times(noise, steps, rng, mean=mean) for mean in (1.0, 1.0, 1.02))
        self.pairs += 1
        self.false_alarms += result(compare(a, b).inverse) != "same"
        self.detected += result(compare(a, slower).inverse) == "slower"


def campaign(pairs: int, steps: int, *, seed: int) -> dict[str, Counts]:
    """The counts by kind of noise; `pairs` of each."""
    counts = {}
    for kind, noise in KINDS.items():
        rng = random.Random(f"{kind} {seed}")
        counts[kind] = Counts()
        for _ in range(pairs):
            counts[kind].add(noise, steps, rng)
    return counts


def main(pairs: int = 200, steps: int = 400) -> None:
    """Prints the counts."""
    print(f"{steps} steps a run; false alarms at 0%, detections at 2%, of {pairs} pairs each")
    for kind, found in campaign(pairs, steps, seed=0).items():
        alarms, detected = found.false_alarms / found.pairs, found.detected / found.pairs
        print(f"{kind:<12} {alarms:6.1%} {detected:7.1%}", flush=True)


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
