"""Causes on the host: the device is idle because its next step is called late."""

from __future__ import annotations

from collections.abc import Callable

from mfu_jax.host_work import HostWork
from mfu_jax.profiling.advice.stats import (
    LEAST,
    ProfileStats,
    milliseconds,
    seconds_of,
)
from mfu_jax.profiling.attribution.host_time import HostTime
from mfu_jax.profiling.timeline.devices import TO_DEVICE
from mfu_jax.util.formatting import counted

HostRule = Callable[[ProfileStats], tuple[float, str]]


def _rule(kind: HostWork, evidence: str) -> HostRule:
    """The rule of one kind of work.

    Args:
        kind: the kind of the thread's work.
        evidence: the text, with placeholders for numbers in braces.
    """

    def rule(stats: ProfileStats) -> tuple[float, str]:
        found = stats.host(kind)
        steps = stats.measured.steps
        runs = sum(stats.measured.executions.values())
        return stats.idle_time[kind], evidence.format(
            seconds=milliseconds(found.seconds),
            idle=milliseconds(found.idle),
            late=milliseconds(stats.measured.late_calls),
            often=f"in {min(found.steps, steps)} of {counted(steps, 'step')}",
            name=found.name,
            called=_called(found),
            within=f", called by {found.caller}" if found.caller else "",
            runs=f"{runs:.3g}",
        )

    return rule


def _called(found: HostTime) -> str:
    names = " in ".join(filter(None, (found.name, found.caller)))
    return f" ({names})" if names else ""


recompiles = _rule(
    HostWork.COMPILE,
    "the host traces and compiles for {seconds} of a step{called}, while the device is idle",
)
_waiting = _rule(
    HostWork.WAIT,
    "the host waits for the device {often}{called}, and goes on only then: the device is idle for "
    "{idle} of a step",
)


def sync(stats: ProfileStats) -> tuple[float, str]:
    """The host waits for the device, and works only then.

    Without the wait, a CPU's device computes beside that work, and has one core less meanwhile.
    """
    gain, evidence = _waiting(stats)
    late, threads = stats.measured.late_calls, stats.measured.threads
    if not (stats.is_cpu and late and threads):
        return gain, evidence
    lost = gain * (1 - stats.measured.late_asleep / late) / threads
    if lost < LEAST * gain:
        return gain, evidence
    return gain - lost, (
        f"{evidence}; the host's work beside it then takes one of the {threads} threads that "
        f"compute, {milliseconds(lost)}"
    )


_transferring = _rule(
    HostWork.TRANSFER,
    "the step waits for arrays that the host hands over{called}: the device is idle for {idle} of "
    "a step",
)


def transfer(stats: ProfileStats) -> tuple[float, str] | None:
    """The step waits until its arguments are copied to the device."""
    idle, evidence = _transferring(stats)
    copies = [op for op in stats.measured.ops if op.op.is_host_copy and op.op.kind == TO_DEVICE]
    copying = seconds_of(copies)
    if not idle + copying:
        return None
    beside = f", and copies for {milliseconds(copying)} beside nothing else" if copying else ""
    return idle + copying, f"{evidence}{beside}"


slow_data = _rule(
    HostWork.DATA,
    "the host spends {seconds} of a step on data ({name}{within}), and the device is idle for "
    "{late}",
)
dispatch = _rule(
    HostWork.DISPATCH,
    "calling programs, {runs} a step, takes the host {seconds}, and the device is idle for {late}",
)
host_bound = _rule(
    HostWork.PYTHON,
    "the host is busy for {seconds} of a step with other work, most of it in {name}{within}, and "
    "the device is idle for {late}",
)
