"""How old the last sign of life is when a process is killed, against kills at random."""

from __future__ import annotations

import bisect
import itertools
import random

import pytest

from mfu_jax.logger.journal.silence import Silence


def test_the_mean_silence_is_that_of_kills_at_random() -> None:
    chance = random.Random(7)
    passed = [chance.choice([0.03, 0.031, 0.035, 0.03, 0.2]) for _ in range(2000)]
    signs = [*itertools.accumulate(passed, initial=100.0)]
    silence = Silence(0.03, signs[0])
    *_, mean = map(silence.heard, signs[1:])
    kills = [chance.uniform(signs[0], signs[-1]) for _ in range(100_000)]
    ages = [kill - signs[bisect.bisect_right(signs, kill) - 1] for kill in kills]
    assert mean == pytest.approx(sum(ages) / len(ages), rel=0.02)


def test_a_stop_of_an_hour_does_not_make_the_next_kill_uncertain() -> None:
    silence = Silence(0.03, 0.0)
    signs = [0.03 * n for n in range(1, 1000)]
    signs += [3600.0 + sign for sign in signs]
    *_, mean = map(silence.heard, signs)
    assert 0.015 < mean < 0.02
