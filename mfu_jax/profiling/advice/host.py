"""Causes on the host: the device is idle, because its next step is called late.

Idle time is given to one cause each: compilation and evaluation own what they overlap, a wait what
follows it until the next step; the rest is due to what the thread is busy with, data first.
"""

from __future__ import annotations

from typing import NamedTuple

from mfu_jax.profiling.advice.facts import Facts, milliseconds
from mfu_jax.profiling.host_work import HostTime, HostWork

_MANY = 4  # executions of programs in a step


class IdleTime(NamedTuple):
    """Idle seconds of a step by what they are due to."""

    recompiles: float
    evaluation: float
    sync: float
    data: float
    dispatch: float
    other: float


def idle_time(facts: Facts) -> IdleTime:
    """Divides the idle time of late calls; zeros where the trace marks no steps."""
    rest = facts.measured.late_calls
    shares = []
    for limit in (
        facts.host(HostWork.COMPILE).idle,
        facts.host(HostWork.EVALUATION).idle,
        facts.host(HostWork.WAIT).idle,
        facts.host(HostWork.DATA).seconds,
        facts.host(HostWork.DISPATCH).seconds,
        facts.host(HostWork.OTHER).seconds,
    ):
        shares.append(min(limit, rest))
        rest -= shares[-1]
    return IdleTime(*shares)


def recompiles(facts: Facts) -> tuple[float, str]:
    """The thread traces and compiles between steps."""
    found = facts.host(HostWork.COMPILE)
    return idle_time(facts).recompiles, (
        f"the host traces and compiles for {milliseconds(found.seconds)} of a step"
        f"{_called(found)}, while the device is idle; keep shapes, static arguments and the jitted "
        f"function itself the same in every step"
    )


def sync(facts: Facts) -> tuple[float, str]:
    """The thread waits for the step that it has just called, so that the next one comes late."""
    found = facts.host(HostWork.WAIT)
    return idle_time(facts).sync, (
        f"the host waits for the device {found.times:.3g} times a step{_called(found)}, and calls "
        f"the next step only then: the device is idle for {milliseconds(found.idle)}; read values "
        f"of the step before, or of every k-th"
    )


def slow_data(facts: Facts) -> tuple[float, str]:
    """The thread makes or waits for data, longer than the device computes."""
    found = facts.host(HostWork.DATA)
    return idle_time(facts).data, (
        f"the host spends {milliseconds(found.seconds)} of a step on data ({found.name}), and the "
        f"device is idle for {_idle(facts)}; prefetch in another thread or process"
    )


def dispatch(facts: Facts) -> tuple[float, str]:
    """The thread cannot call programs as fast as the device runs them."""
    found = facts.host(HostWork.DISPATCH)
    runs = sum(facts.measured.executions.values())
    many = "in one program, such as a scan" if runs >= _MANY else "of several steps in one scan"
    return idle_time(facts).dispatch, (
        f"{runs:.3g} programs a step take the host {milliseconds(found.seconds)} to call, and the "
        f"device is idle for {_idle(facts)}; put the work {many}"
    )


def host_bound(facts: Facts) -> tuple[float, str]:
    """The thread does something else for longer than the device computes."""
    found = facts.host(HostWork.OTHER)
    return idle_time(facts).other, (
        f"the host is busy for {milliseconds(found.seconds)} of a step with other work, most of it "
        f"in {found.name}, and the device is idle for {_idle(facts)}; do it in another "
        f"thread, or in fewer steps"
    )


def _idle(facts: Facts) -> str:
    return milliseconds(facts.measured.late_calls)


def _called(found: HostTime) -> str:
    return f" ({found.name} in {found.caller})" if found.caller else f" ({found.name})"
