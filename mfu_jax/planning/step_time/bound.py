"""A lower bound on a program's time: each resource's work over its peak.

At best, resources work in parallel, so the bound is the largest of these times. It holds for the
program as compiled; another program of the same model may be faster.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping

from mfu_jax.flops.executed.records import ProgramCosts
from mfu_jax.planning.step_time import links
from mfu_jax.planning.step_time.uncounted_attention import executed_by_dtype
from mfu_jax.planning.targets import Target


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
