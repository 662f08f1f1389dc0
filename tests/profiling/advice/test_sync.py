"""The gain of not waiting for the device, on numbers written by hand."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from mfu_jax.host_work import HostWork
from mfu_jax.profiling.advice.host import sync
from mfu_jax.profiling.attribution.host_time import HostTime


@pytest.mark.parametrize(
    ("is_cpu", "asleep", "gain"),
    [
        (True, 0.04, 0.04),  # the host sleeps: the device has all cores
        (True, 0.0, 0.02),  # the host works on one of two cores
        (True, 0.02, 0.03),
        (False, 0.0, 0.04),  # an accelerator needs none
    ],
)
def test_what_a_cpus_device_gains_beside_the_hosts_work(
    is_cpu: bool, asleep: float, gain: float
) -> None:
    """A step of 100 ms, 40 of which the device is idle after a wait of 60."""
    waiting = HostTime(0.06, 0.04, 1.0, 9, "$array.py:298 __float__", "$loop.py:3 log")
    nothing = HostTime(0.0, 0.0, 0.0, 0, "", "")
    measured = SimpleNamespace(
        late_calls=0.04,
        late_asleep=asleep,
        executions={"jit_step": 1.0},
        steps=9,
        threads=2 if is_cpu else 0,
    )
    stats: Any = SimpleNamespace(
        is_cpu=is_cpu,
        measured=measured,
        idle_time={HostWork.WAIT: 0.04},
        host=lambda kind: waiting if kind is HostWork.WAIT else nothing,
    )
    seconds, evidence = sync(stats)
    assert seconds == pytest.approx(gain)
    assert "in 9 of 9 steps ($array.py:298 __float__ in $loop.py:3 log)" in evidence
