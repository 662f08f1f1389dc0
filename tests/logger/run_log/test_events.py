"""How often a process shows that it lives."""

from __future__ import annotations

import math

import pytest

from mfu_jax.logger.run_log.events import alive_seconds


def test_a_kill_is_known_to_an_800th_of_a_life_and_to_a_second_of_any() -> None:
    """Half of the time between two signs is the error of a kill's date."""
    assert [alive_seconds(age) for age in (0.0, 40.0, 80.0, 3600.0)] == [0.05, 0.05, 0.1, 1.0]
    now, signs = 0.0, 0
    while now < 86_400:
        now += alive_seconds(now)
        signs += 1
    assert signs == pytest.approx(800 + 800 * math.log(20) + 86_400 - 800, rel=0.01)
