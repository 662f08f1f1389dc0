"""Which events of the host's thread are waits for the device, by when they end."""

from __future__ import annotations

import numpy as np
import pytest

from mfu_jax.profiling.attribution.host_work import waits_of
from mfu_jax.profiling.timeline.devices import Executions, Program
from mfu_jax.profiling.timeline.host import HostThread

MS = 10**9
STEPS, DONE, CALLED = 5, 60 * MS, 100 * MS  # a step takes 60 ms, and is called every 100


@pytest.mark.parametrize(
    ("name", "start", "end", "is_wait"),
    [
        ("$loop.py:3 is_finite", 5.0, 60.2, True),  # a ufunc reads the array there
        ("$loop.py:3 is_finite", 5.0, 59.8, True),  # two threads record the two ends
        ("$loop.py:3 work", 5.0, 62.0, False),
        ("$loop.py:3 work", 59.0, 60.2, False),  # 1.2 ms are short for a step
        ("$numpy asarray", 5.0, 68.0, True),  # woken up late
        ("$numpy asarray", 5.0, 50.0, False),
        ("$numpy asarray", 5.0, 90.0, False),
        ("$time sleep", 5.0, 60.2, False),
        ("train", 5.0, 60.2, False),  # a mark
        ("$array.py:298 __float__", 5.0, 50.0, True),  # by its name
    ],
)
def test_a_function_that_ends_with_an_execution_waits_for_it(
    name: str, start: float, end: float, is_wait: bool
) -> None:
    begins = np.arange(STEPS) * CALLED
    executions = Executions(
        programs=(Program("jit_step"),) * STEPS, starts=begins, ends=begins + DONE
    )
    thread = HostThread(
        step_numbers=np.arange(STEPS),
        step_starts=begins,
        step_ends=begins + MS,
        names=(name,),
        ops=np.zeros(STEPS, np.int64),
        starts=begins + round(start * MS),
        ends=begins + round(end * MS),
    )
    starts, _ = waits_of(thread, executions)
    assert starts.tolist() == (thread.starts.tolist() if is_wait else [])
