"""Counts false alarms and missed differences of A/B verdicts over simulated pairs of runs.

    python -m tests.campaigns.comparisons [--pairs 200] [--steps 400]

Of short runs, 2% cannot be seen: thresholds are those of 200 steps and more.
"""

from __future__ import annotations

import operator
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from mfu_jax.runs.comparison.gate import GateCheck
from mfu_jax.runs.comparison.intervals import Difference, compare_with_repeats
from mfu_jax.runs.comparison.runs import STEP_TIME, WITH_WAITS, ComparedMetric, MetricChange, result
from tests.campaigns.promises import Promise, seeded, verdict
from tests.support.run_noise import KINDS, UNSEEN_KINDS, Noise, step_times

_WAIT_SECONDS = 0.01  # mean of an exponential law


@dataclass
class Counts:
    """Of pairs without a difference, and of pairs in which B takes 2% longer.

    Attributes:
        pairs: of either sort.
        false_alarms: verdicts *faster* and *slower* on the former.
        detected: verdicts *slower* on the latter.
        gate_alarms: failures of the gate on the former, by the step time or that with waits.
        gate_detected: failures of the gate on the latter.
    """

    pairs: int = 0
    false_alarms: int = 0
    detected: int = 0
    gate_alarms: int = 0
    gate_detected: int = 0

    def add(self, noise: Noise, steps: int, rng: random.Random) -> None:
        """Simulates one pair of either sort."""
        a, b, slower = (step_times(noise, steps, rng, mean=mean) for mean in (1.0, 1.0, 1.02))
        same, worse = (compare_with_repeats([a], run) for run in (b, slower))
        self.pairs += 1
        self.false_alarms += result(same.inverse) != "same"
        self.detected += result(worse.inverse) == "slower"
        waited_a, waited_b, waited_slower = (_with_waits(run, rng) for run in (a, b, slower))
        self.gate_alarms += _fails(same, compare_with_repeats([waited_a], waited_b))
        self.gate_detected += _fails(worse, compare_with_repeats([waited_a], waited_slower))


def _with_waits(run: Sequence[float], rng: random.Random) -> list[float]:
    return list(map(operator.add, run, (rng.expovariate(1 / _WAIT_SECONDS) for _ in run)))


def _fails(step_time: Difference, with_waits: Difference) -> bool:
    return _has_failed(STEP_TIME, step_time) or _has_failed(WITH_WAITS, with_waits)


def _has_failed(metric: ComparedMetric, difference: Difference) -> bool:
    return GateCheck(
        row=MetricChange(metric=metric, difference=difference), threshold=0.01
    ).has_failed


def campaign(
    pairs: int, steps: int, *, seed: int, kinds: Mapping[str, Noise] = KINDS
) -> dict[str, Counts]:
    """The counts by kind of noise; `pairs` of each."""
    counts = {}
    for kind, noise in kinds.items():
        rng = random.Random(f"{kind} {seed}")
        counts[kind] = Counts()
        for _ in range(pairs):
            counts[kind].add(noise, steps, rng)
    return counts


def main() -> int:
    """At most 3 of 100 false alarms, and 95 of 100 differences found, over all kinds of noise."""
    parser = seeded(__doc__)
    parser.add_argument("--pairs", type=int, default=200, help="of each kind of noise")
    parser.add_argument("--steps", type=int, default=400, help="of each run")
    given = parser.parse_args()
    kinds = {**KINDS, **UNSEEN_KINDS}
    verdicts = {
        "false alarms at 0%": Promise("pairs without a difference", allowed=0.03),
        "detections at 2%": Promise("pairs with a difference of 2%", allowed=0.05),
        "alarms of the gate": Promise("gates without a difference", allowed=0.03),
        "detections of the gate": Promise("gates with a difference of 2%", allowed=0.05),
    }
    for kind, found in campaign(given.pairs, given.steps, seed=given.seed, kinds=kinds).items():
        alarms = (found.false_alarms, found.detected, found.gate_alarms, found.gate_detected)
        print(kind, dict(zip(verdicts, alarms, strict=True)), flush=True)
        wrong = (alarms[0], given.pairs - alarms[1], alarms[2], given.pairs - alarms[3])
        for promise, count in zip(verdicts.values(), wrong, strict=True):
            promise.count += given.pairs
            promise.failures += [kind] * count
    for promise in verdicts.values():
        promise.worst = f"{len(promise.failures) / promise.count:.1%} wrong"
    return verdict(list(verdicts.values()))


if __name__ == "__main__":
    raise SystemExit(main())
