"""Between which times a run of a predicted step should lie: a lower bound, and the expected range.

The bound is each resource's work over its peak. At best, resources work in parallel, so it is the
largest of these times. It holds for the program as compiled; another program of the same model may
be faster.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import replace

from mfu_jax.flops.executed.records import ProgramCosts
from mfu_jax.planning.step_time import links
from mfu_jax.planning.step_time.attention_kernels import executed_by_dtype
from mfu_jax.planning.step_time.durations import (
    FAST,
    HOST,
    SLOW,
    Durations,
    Efficiencies,
    host_gbps,
)
from mfu_jax.planning.step_time.schedule import predicted_time
from mfu_jax.planning.targets import Target

_FASTER_HOST = 2  # × the bandwidth assumed if it is not known


def time_range(
    costs: ProgramCosts,
    durations: Durations,
    *,
    seconds: float,
    bound: float,
    residuals: tuple[float, float] | None,
) -> tuple[float, float] | None:
    """The shortest and the longest expected time, in seconds per step.

    Args:
        costs: the program's costs.
        durations: the durations behind the prediction.
        seconds: the prediction.
        bound: lower bound: no run is faster, whatever the residuals say.
        residuals: measured / predicted times of other runs; None: too few were compared.

    Returns:
        The range; without residuals, for GPUs the times at higher and lower shares of their peaks,
        and None for TPUs.
    """
    if residuals is not None:
        low, high = residuals
        fastest = seconds - _saved_by_a_faster_host(costs, durations)
        return max(bound, fastest * low), seconds * high
    if durations.target.platform != "cuda":
        return None
    least, most = (_seconds(costs, durations, shares) for shares in (FAST, SLOW))
    return max(bound, least), max(bound, most)


def host_notes(costs: ProgramCosts, target: Target) -> tuple[str, ...]:
    """A note if the step copies to or from host memory at an unknown bandwidth."""
    copies = any(record.host_bytes and record.runs for record in costs.records.values())
    if not copies or HOST in target.chip.interconnect:
        return ()
    taken = host_gbps(target.chip)
    return (
        f"the bandwidth between a {target.chip.name} and its host's memory is not known: "
        f"{taken:g} GB/s are taken, and up to {_FASTER_HOST * taken:g} in the range",
    )


def _saved_by_a_faster_host(costs: ProgramCosts, durations: Durations) -> float:
    if not host_notes(costs, durations.target):
        return 0.0
    shares = durations.efficiencies
    faster = replace(shares, host=_FASTER_HOST * shares.host)
    now, then = (_seconds(costs, durations, efficiencies) for efficiencies in (shares, faster))
    return now - then


def _seconds(costs: ProgramCosts, durations: Durations, shares: Efficiencies) -> float:
    return predicted_time(costs, replace(durations, efficiencies=shares)).seconds


def bounds(
    costs: ProgramCosts, target: Target, memory: Mapping[str, int] | None
) -> dict[str, float]:
    """Seconds that each resource would be busy at its peak.

    Args:
        costs: the program's costs.
        target: the chips.
        memory: the program's ``memory_analysis()``: bytes that it must move through HBM once.

    Returns:
        ``matmul``, ``hbm``, ``host``, and each link by name; a link's time is its busiest lane's.
    """
    chip = target.chip
    found: dict[str, float] = defaultdict(float)
    busy: dict[str, dict[str, float]] = defaultdict(lambda: defaultdict(float))
    for dtype, flops in executed_by_dtype(costs).items():
        found["matmul"] += flops / chip.peak_flops_per_sec(dtype)
    if memory:
        once = memory.get("argument_size_in_bytes", 0) + memory.get("output_size_in_bytes", 0)
        found["hbm"] = once / chip.memory_bandwidth_bytes_per_sec
    host = chip.interconnect.get("host_gbps_per_device")
    for record in costs.records.values():
        if host and record.host_bytes:
            lane = "up" if record.to_host else "down"  # both directions work at once
            busy["host"][lane] += record.runs * record.host_bytes / (host * 1e9)
        if message := links.between_slices(record, target):
            busy["dcn"][message[0]] += record.runs * message[1]
        if record.collective and record.runs:
            group = record.device_groups[0] if record.device_groups else ()
            link = links.route(target, group, record.collective.group_size).link
            alone = record.runs * links.seconds(record.collective, group, target)
            for lane in links.lanes(record.collective, record.device_groups, link):
                busy[link][lane] += alone
    return dict(found) | {link: max(lanes.values()) for link, lanes in busy.items()}
