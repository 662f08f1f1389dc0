"""Causes between devices."""

from __future__ import annotations

import math

import numpy as np

from mfu_jax.profiling.advice.stats import ProfileStats, milliseconds, seconds_of
from mfu_jax.profiling.breakdown.waterfall import communication_of
from mfu_jax.profiling.join.ops import DeviceWork

_LEAST = 0.1  # of a step: gap between the slowest device and the others
_CLEAR = 4  # standard errors: two healthy CPU devices, which share cores, were 2 apart


def imbalance(stats: ProfileStats) -> tuple[float, str] | None:
    """One device computes longer than the others, step after step, so they wait for it."""
    devices = stats.measured.devices
    steps = min(len(device.compute) for device in devices)
    if len(devices) < 2 or steps < 2:
        return None
    compute = np.array([device.compute[:steps] for device in devices])
    slowest = int(compute.sum(axis=1).argmax())
    gaps = compute[slowest] - np.delete(compute, slowest, axis=0).mean(axis=0)
    gain = float(gaps.mean())
    error = float(gaps.std(ddof=1)) / math.sqrt(steps)
    if gain < max(_LEAST * stats.step, _CLEAR * error):
        return None
    took = float(compute[slowest].mean())
    return gain, (
        f"{devices[slowest].device} computes for {milliseconds(took)} of a step, the other "
        f"{len(devices) - 1} for {milliseconds(took - gain)} in the mean, and wait for it; divide "
        f"the work evenly, or look at that device's clock and neighbours"
    )


def all_gather(stats: ProfileStats) -> tuple[float, str] | None:
    """Devices wait for weights or gradients while they could compute."""
    kinds = ("all-gather", "reduce-scatter")
    ops = [
        op
        for op in stats.measured.ops
        if op.op.work is DeviceWork.COMMUNICATION and op.op.kind.startswith(kinds)
    ]
    uneven = imbalance(stats)
    exposed = seconds_of(ops) - (uneven[0] if uneven else 0.0)
    if stats.is_cpu or not ops:  # CPU devices never overlap communication with compute
        return None
    gain = min(exposed, seconds_of(stats.compute()))
    names = ", ".join(sorted({communication_of(op) for op in ops}))
    return gain, (
        f"{milliseconds(exposed)} of a step go to {names}, with nothing beside it; let XLA overlap "
        f"it (latency-hiding scheduler, asynchronous collective fusion), gather a layer ahead, or "
        f"shard weights over fewer devices"
    )
