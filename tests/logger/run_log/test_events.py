"""How often a process shows that it lives."""

from __future__ import annotations

import pytest

from mfu_jax.logger.run_log.events import alive_seconds


def test_a_kill_is_known_to_a_fiftieth_of_a_life_and_to_a_second_of_any() -> None:
    """Half of the time between two signs is the error of a kill's date."""
    assert [alive_seconds(age) for age in (0.0, 1.0, 10.0, 3600.0)] == [0.05, 0.05, 0.2, 1.0]
    now, signs = 0.0, 0
    while now < 86_400:
        now += alive_seconds(now)
        signs += 1
    assert signs == pytest.approx(86_400, rel=0.01)
