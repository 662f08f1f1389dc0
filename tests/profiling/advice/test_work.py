"""Gains of causes in what a step runs, on numbers written by hand."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from mfu_jax.profiling.advice.work import callback
from mfu_jax.profiling.join import Work


def facts(*, late: float, is_cpu: bool) -> Any:
    """A step of 100 ms, of which the device waits 30 ms for a callback."""
    record = SimpleNamespace(name="ask", scope="")
    op = SimpleNamespace(op=SimpleNamespace(work=Work.HOST, record=record), seconds=0.03, runs=1)
    return SimpleNamespace(
        step=0.1, is_cpu=is_cpu, measured=SimpleNamespace(ops=[op], late_calls=late)
    )


@pytest.mark.parametrize(
    ("late", "is_cpu", "gain"),
    [
        (0.0, True, 0.03),
        (0.01, False, 0.03),  # another cause makes an accelerator's calls late
        (0.01, True, 0.04),  # 60 ms of work, while the loop takes 10
        (0.05, True, 0.05),  # 20 ms of work, while the loop takes 50
    ],
)
def test_the_gain_of_a_callback(late: float, is_cpu: bool, gain: float) -> None:
    found = callback(facts(late=late, is_cpu=is_cpu))
    assert found is not None
    assert found[0] == pytest.approx(gain)
