"""How often a process says that it lives, and how old that is when it is killed at random."""

from __future__ import annotations

import bisect
import random

import pytest
from mfu_jax.logger.journal.process import Liveness


def signs_until(
    end: float, liveness: Liveness, late: list[float]
) -> tuple[list[float], list[float]]:
    """Moments of all signs of life from 0, and what it says then; each sign is on time or late."""
    chance = random.Random(7)
    signs, said = [0.0], [liveness.seconds]
    while signs[-1] < end:
        signs.append(signs[-1] + liveness.interval_seconds + chance.choice(late))
        liveness.on_sign(signs[-1])
        said.append(liveness.seconds)
    return signs, said


def ages_at_kills(signs: list[float], begin: float) -> list[float]:
    chance = random.Random(8)
    kills = [chance.uniform(begin, signs[-1]) for _ in range(100_000)]
    return [kill - signs[bisect.bisect_right(signs, kill) - 1] for kill in kills]


def test_the_mean_silence_is_that_of_kills_at_random() -> None:
    liveness = Liveness(0.0)
    signs, said = signs_until(20.0, liveness, [0.0, 0.001, 0.005, 0.029])
    ages = ages_at_kills(signs, 0.0)
    mean = sum(ages) / len(ages)
    assert sum(said) / len(said) == pytest.approx(mean, rel=0.05)
    assert mean > 1.2 * liveness.interval_seconds / 2


def test_a_kill_is_known_to_a_thousandth_of_a_life_and_a_day_of_it_costs_two_signs_a_second() -> (
    None
):
    for seconds in (40.0, 100.0, 300.0):
        liveness = Liveness(0.0)
        signs, _ = signs_until(seconds, liveness, [0.0])
        ages = ages_at_kills(signs, 0.9 * seconds)
        assert max(ages) < seconds / 750
        assert liveness.seconds == pytest.approx(sum(ages) / len(ages), rel=0.1)
    liveness = Liveness(0.0)
    liveness.on_sign(86_400.0)
    assert liveness.interval_seconds == 0.5


def test_a_stop_of_an_hour_does_not_make_the_next_kill_uncertain() -> None:
    liveness = Liveness(0.0)
    for sign in (0.03 * n for n in range(1, 100)):
        liveness.on_sign(sign)
    liveness.on_sign(3600.0)
    before = liveness.interval_seconds
    for n in range(1, 2000):
        liveness.on_sign(3600.0 + n * before)
    assert liveness.seconds < 0.6 * liveness.interval_seconds
