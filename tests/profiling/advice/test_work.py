"""Gains of causes in what a step runs, on numbers written by hand."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from mfu_jax.profiling.advice.work import callback, remat
from mfu_jax.profiling.join.ops import DeviceWork


def stats(*, late: float, is_cpu: bool, beside: float = 0.0) -> Any:
    """A step of 100 ms, 30 of which wait for a callback; a CPU's pool has two threads.

    Args:
        late: seconds from the end of a step to the next call.
        is_cpu: whether the device is a CPU.
        beside: how long the callback runs beside other ops.
    """
    record = SimpleNamespace(name="ask", scope="")
    work = SimpleNamespace(work=DeviceWork.HOST, record=record)
    op = SimpleNamespace(op=work, seconds=0.03, self_seconds=0.03 + beside, runs=1)
    threads, platform = (2, "cpu") if is_cpu else (0, "tpu")
    measured = SimpleNamespace(ops=[op], late_calls=late, threads=threads, platform=platform)
    return SimpleNamespace(step=0.1, is_cpu=is_cpu, measured=measured)


@pytest.mark.parametrize(
    ("late", "is_cpu", "beside", "gain"),
    [
        (0.0, True, 0.0, 0.03),
        (0.01, False, 0.0, 0.03),  # another cause makes an accelerator's calls late
        (0.01, True, 0.0, 0.04),  # 60 ms of work, while the loop takes 10
        (0.05, True, 0.0, 0.05),  # 20 ms of work, while the loop takes 50
        (0.0, True, 0.04, 0.05),  # 40 ms on one thread, which two would do in 20
        (0.0, False, 0.04, 0.03),  # an accelerator computes beside it as fast as without
    ],
)
def test_the_gain_of_a_callback(late: float, is_cpu: bool, beside: float, gain: float) -> None:
    found = callback(stats(late=late, is_cpu=is_cpu, beside=beside))
    assert found is not None
    assert found[0] == pytest.approx(gain)


MB = 10**6


def recomputing(*, is_cpu: bool, computation: str, kept: int) -> Any:
    """A step of 100 ms, 30 of which recompute results of this size, in a small program."""

    def op(name: str, phase: str, computation: str) -> Any:
        shape = SimpleNamespace(operands=(), result_bytes=kept)
        record = SimpleNamespace(
            name=name, scope="", phase=phase, computation=computation, flops=1, shape=shape, runs=1
        )
        return SimpleNamespace(op=SimpleNamespace(record=record), seconds=0.03, runs=1)

    ops = [op("ahead", "forward", "forward"), op("again", "rematerialized", computation)]
    reader = SimpleNamespace(phase="backward", shape=SimpleNamespace(operands=("again",)))
    return SimpleNamespace(
        step=0.1,
        is_cpu=is_cpu,
        ops=lambda choose: [op for op in ops if choose(op.op.record)],
        bytes_per_second=1e12,
        measured=SimpleNamespace(platform="cpu" if is_cpu else "tpu"),
        memory_limit=10**12,
        memory_used=3 * MB,
        program=SimpleNamespace(costs=SimpleNamespace(records={"down": reader})),
    )


@pytest.mark.parametrize(
    ("is_cpu", "computation", "kept", "is_seen"),
    [
        (False, "forward", 100 * MB, True),
        (True, "backward", MB, True),
        (True, "backward", 100 * MB, False),  # saving them takes a CPU longer than recomputing
        (True, "forward", MB, False),  # unscanned: XLA recomputes in any case
    ],
)
def test_remat_on_cpus_must_be_worth_saving(
    is_cpu: bool, computation: str, kept: int, is_seen: bool
) -> None:
    found = remat(recomputing(is_cpu=is_cpu, computation=computation, kept=kept))
    assert (found is not None) == is_seen
    if found is not None:
        assert found[0] == pytest.approx(0.03, rel=0.01)
