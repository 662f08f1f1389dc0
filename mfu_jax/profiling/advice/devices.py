"""Causes between devices."""

from __future__ import annotations

from statistics import mean

from mfu_jax.profiling.advice.facts import Facts, milliseconds, seconds_of
from mfu_jax.profiling.join import Work
from mfu_jax.profiling.waterfall import communication_of

_LEAST = 0.1  # of a step: gap between the slowest device and the others


def imbalance(facts: Facts) -> tuple[float, str] | None:
    """One device computes longer than the others, so they wait for it."""
    computes = {op.op.name for op in facts.measured.ops if op.op.work is Work.COMPUTE}
    busy = {
        device.device: sum(s for name, s in device.ops.items() if name in computes)
        for device in facts.measured.devices
    }
    if len(busy) < 2:
        return None
    slowest = max(busy, key=lambda device: busy[device])
    others = mean(seconds for device, seconds in busy.items() if device != slowest)
    gain = busy[slowest] - others
    if gain < _LEAST * facts.step:
        return None
    return gain, (
        f"{slowest} computes for {milliseconds(busy[slowest])} of a step, the other "
        f"{len(busy) - 1} for {milliseconds(others)} in the mean, and wait for it; divide the work "
        f"evenly, or look at that device's clock and neighbours"
    )


def all_gather(facts: Facts) -> tuple[float, str] | None:
    """Devices wait for weights or gradients while they could compute."""
    kinds = ("all-gather", "reduce-scatter")
    ops = [
        op
        for op in facts.measured.ops
        if op.op.work is Work.COMMUNICATION and op.op.kind.startswith(kinds)
    ]
    uneven = imbalance(facts)
    exposed = seconds_of(ops) - (uneven[0] if uneven else 0.0)
    if facts.is_cpu or not ops:  # CPU devices never overlap communication with compute
        return None
    gain = min(exposed, seconds_of(facts.compute()))
    names = ", ".join(sorted({communication_of(op) for op in ops}))
    return gain, (
        f"{milliseconds(exposed)} of a step go to {names}, with nothing beside it; let XLA overlap "
        f"it (latency-hiding scheduler, asynchronous collective fusion), gather a layer ahead, or "
        f"shard weights over fewer devices"
    )
