"""Causes in what the step runs, and where: evaluation, callbacks, recomputation, collectives."""

from __future__ import annotations

import math

import numpy as np

from mfu_jax.flops.executed.records import InstructionRecord
from mfu_jax.host_work import HostWork
from mfu_jax.profiling.advice.stats import (
    FULL,
    LEAST,
    ProfileStats,
    largest_names,
    milliseconds,
    record_of,
    seconds_of,
)
from mfu_jax.profiling.attribution.device_times import OpTime
from mfu_jax.profiling.breakdown.ops import communication_of
from mfu_jax.profiling.join.ops import DeviceWork
from mfu_jax.profiling.timeline.time_attribution import summed
from mfu_jax.util.formatting import rounded_up
from mfu_jax.verdict import NOTABLE, remat_policy

_RECOMPUTED = "rematerialized"
# Bytes per second that a CPU's step was seen to save in a scan: copied into the array of all layers
# and back, in pages that the system clears.
_SAVING = 2.2e9
_UNEVEN = 0.1  # of a step: gap between the slowest device and the others
_CLEAR = 4  # standard errors: two healthy CPU devices, which share cores, were 2 apart


def rarer_evaluation(stats: ProfileStats, gain: float) -> str:
    """The interval at which evaluations take no notable part of a step any more."""
    each = gain / (_evaluations(stats) or 1.0)
    steps = each / (NOTABLE * max(stats.step - gain, LEAST * stats.step))
    return f"eval_interval={rounded_up(steps)}"


def _evaluations(stats: ProfileStats) -> float:
    """How many evaluations, other programs or calls of the loop's, a step has."""
    ran = sum(stats.measured.executions[program] for program in stats.evaluations)
    return max(stats.host(HostWork.EVALUATION).times, ran)


def evaluation(stats: ProfileStats) -> tuple[float, str] | None:
    """Programs that only evaluate, or an evaluation within the step."""
    seconds = _evaluation_within(stats)
    seen = [f"{milliseconds(seconds)} of evaluation within the step's program"] if seconds else []
    measured, called = stats.measured, stats.host(HostWork.EVALUATION)
    steps = max([called.steps, *(measured.steps_with[p] for p in stats.evaluations)])
    if steps > 1 or 2 * steps >= measured.steps:  # a single one may be any schedule's
        ops = [op for op in measured.ops if op.op.name.program in stats.evaluations]
        idle = stats.idle_time[HostWork.EVALUATION]
        seconds += seconds_of(ops) + idle
        names = [program.module for program in stats.evaluations] + [called.name]
        seen.append(
            f"{', '.join(sorted(filter(None, names)))} runs {_evaluations(stats):.3g} times a "
            f"step, for {milliseconds(seconds_of(ops))} on the device, which is idle for "
            f"{milliseconds(idle)} besides"
        )
    return (seconds, "; ".join(seen)) if seen else None


def _evaluation_within(stats: ProfileStats) -> float:
    """Seconds per step of evaluation within the step's own program.

    Only matmuls tell it from the forward pass. Other work in the same modules is divided between
    the two passes like their matmuls in the same computation, since each pass has its own loops.
    """
    inside = stats.ops(lambda record: record.phase == "evaluation")
    modules = {_module(record_of(op)) for op in inside}
    forward = stats.ops(lambda r: r.phase == "forward" and _module(r) in modules)
    beside = [op for op in forward if not record_of(op).flops and op.op.work is DeviceWork.COMPUTE]
    own, others = _flops_by_computation(inside), _flops_by_computation(forward)
    shares = {name: flops / (flops + others.get(name, 0.0)) for name, flops in own.items() if flops}
    return seconds_of(inside) + sum(
        op.seconds * shares.get(record_of(op).computation, 0.0) for op in beside
    )


def _flops_by_computation(ops: list[OpTime]) -> dict[str, float]:
    return summed((record_of(op).computation, op.runs * record_of(op).flops) for op in ops)


def _module(record: InstructionRecord) -> str:
    """The outermost model module that an op belongs to."""
    return record.scope.partition("/")[0]


def callback(stats: ProfileStats) -> tuple[float, str] | None:
    """The device waits for Python within the step, and computes nothing meanwhile.

    A CPU runs a program with callbacks within its call, so every next call is late. Without
    callbacks, a step takes as long as the device's work or the loop's, whichever is longer. What a
    CPU computes beside a callback has one thread less. A GPU is also idle after a callback, until
    the thread that ran it has launched more kernels.
    """
    ops = [op for op in stats.measured.ops if op.op.work is DeviceWork.HOST]
    if not ops:
        return None
    waiting, late = seconds_of(ops), stats.measured.late_calls if stats.is_cpu else 0.0
    beside, threads = sum(op.self_seconds for op in ops) - waiting, stats.measured.threads
    if stats.measured.platform == "gpu":
        waiting += stats.measured.after_callbacks
    slowed = beside / threads if stats.is_cpu and threads else 0.0
    runs = sum(op.runs for op in ops)
    then = f", and {milliseconds(late)} more until the next call" if late else ""
    also = f"; they keep one of {threads} threads for {milliseconds(beside)} more" if slowed else ""
    return stats.step - max(stats.step - waiting - late - slowed, late), (
        f"callbacks to the host ({largest_names(ops)}) run {runs:.3g} × a step; the device waits "
        f"{milliseconds(waiting)} for them{then}{also}"
    )


def lighter_remat(stats: ProfileStats, _: float) -> str:
    """The policy that the memory allows."""
    return remat_policy(_share_kept(stats, _recomputed(stats)))


def remat(stats: ProfileStats) -> tuple[float, str] | None:
    """Work is recomputed although its results would fit into memory.

    On CPUs, only if it takes longer than saving may take, and not where XLA could fuse the forward
    pass's matmuls into the backward pass: it was seen to recompute those without being asked. A
    GPU's kernels write their results in any case; only a scan copies what it saves.
    """
    ops, used, limit = _recomputed(stats), stats.memory_used, stats.memory_limit
    kept = _kept_bytes(stats, ops)
    if not ops or not limit or used is None or not kept:
        return None
    is_gpu = stats.measured.platform == "gpu"
    written = _kept_bytes(stats, [op for op in ops if record_of(op).runs > 1 or not is_gpu])
    writing = written / stats.bytes_per_second if stats.bytes_per_second else 0.0
    if stats.is_cpu and seconds_of(ops) - kept / _SAVING < LEAST * stats.step:
        return None
    return _share_kept(stats, ops) * (seconds_of(ops) - writing), (
        f"{milliseconds(seconds_of(ops))} of a step are recomputed, most in {largest_names(ops)}; "
        f"the program uses {_gib(used)} of {_gib(limit)} GiB, and the results that it needs again "
        f"take at most {_gib(kept)} GiB, which the forward pass would write in "
        f"{milliseconds(writing)}"
    )


def _recomputed(stats: ProfileStats) -> list[OpTime]:
    ops = stats.ops(lambda record: record.phase == _RECOMPUTED)
    if not stats.is_cpu:
        return ops
    matmuls = stats.ops(lambda record: record.phase == "forward" and record.flops)
    forward = {record_of(op).computation for op in matmuls}
    return [op for op in ops if record_of(op).computation not in forward]


def _share_kept(stats: ProfileStats, recomputed: list[OpTime]) -> float:
    """The share of recomputed results for which there is memory."""
    free = FULL * stats.memory_limit - (stats.memory_used or 0)
    return min(1.0, max(0.0, free) / max(_kept_bytes(stats, recomputed), 1))


def _kept_bytes(stats: ProfileStats, recomputed: list[OpTime]) -> int:
    """Bytes of recomputed results that other ops read; the rest is only needed to recompute.

    The backward pass reads them in either case; only writing them in the forward pass is new.
    """
    users: dict[str, set[str]] = {}
    for record in stats.program.costs.records.values():
        for operand in record.shape.operands:
            users.setdefault(operand, set()).add(record.phase)
    needed = [op for op in recomputed if users.get(record_of(op).name) != {_RECOMPUTED}]
    return sum(round(op.runs * record_of(op).shape.result_bytes) for op in needed)


def _gib(size: float) -> str:
    return f"{size / 2**30:.3g}"


def imbalance(stats: ProfileStats) -> tuple[float, str] | None:
    """One device computes longer than the others, step after step, so they wait for it."""
    devices = stats.measured.devices
    steps = min(len(device.compute) for device in devices)
    if len(devices) < 2 or steps < 2:
        return None
    compute = np.array([device.compute[:steps] for device in devices])
    slowest = int(np.argmax(compute.sum(axis=1)))
    gaps = compute[slowest] - np.delete(compute, slowest, axis=0).mean(axis=0)
    gain = float(gaps.mean())
    error = float(gaps.std(ddof=1)) / math.sqrt(steps)
    if gain < max(_UNEVEN * stats.step, _CLEAR * error):
        return None
    took = float(compute[slowest].mean())
    return gain, (
        f"{devices[slowest].device} computes for {milliseconds(took)} of a step, the other "
        f"{len(devices) - 1} for {milliseconds(took - gain)} in the mean, and wait for it"
    )


def fewer_shards(stats: ProfileStats, _: float) -> str:
    """Half the devices of the longest collective's axis, if the mesh is known."""
    longest = max(_gathers(stats), key=lambda op: op.seconds)
    axis = communication_of(longest).rpartition(" over ")[2]
    half = stats.program.mesh.get(axis, 0) // 2
    fewer = f"{axis}={half}" if half else "half as many"
    return f"shard weights over fewer devices ({fewer}), or overlap by XLA's scheduler"


def _gathers(stats: ProfileStats) -> list[OpTime]:
    kinds = ("all-gather", "reduce-scatter")
    return [
        op
        for op in stats.measured.ops
        if op.op.work is DeviceWork.COMMUNICATION and op.op.kind.startswith(kinds)
    ]


def all_gather(stats: ProfileStats) -> tuple[float, str] | None:
    """Devices wait for weights or gradients while they could compute."""
    ops, uneven = _gathers(stats), imbalance(stats)
    exposed = seconds_of(ops) - (uneven[0] if uneven else 0.0)
    if stats.is_cpu or not ops:  # CPU devices never overlap communication with compute
        return None
    gain = min(exposed, seconds_of(stats.compute()))
    names = ", ".join(sorted({communication_of(op) for op in ops}))
    return gain, (f"{milliseconds(exposed)} of a step go to {names}, with nothing beside it")
