"""Kernels whose blocks differ between devices: each reads its own part of a table.

Splash attention over a split sequence is one: of a causal mask, the last device keeps the most.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from mfu_jax.flops.executed.kernels.registry import (
    KernelCall,
    KernelCost,
    UnknownCost,
    kernel_cost,
)


def device_mean(
    call: KernelCall, differing: Sequence[int], devices: int, choose: Callable[[int], None]
) -> KernelCost | UnknownCost:
    """The mean of all devices' costs, with a note that gives the least and the most.

    Args:
        call: the kernel's call.
        differing: indices of its operands that differ between devices.
        devices: how many run the program.
        choose: makes `call` read the tables of one device.
    """
    known: dict[tuple[str | None, ...], KernelCost | UnknownCost] = {}
    costs: list[KernelCost] = []  # of each device
    for device in range(devices):
        choose(device)
        tables = tuple([call.literal(index) for index in differing])
        if tables not in known:
            known[tables] = kernel_cost(call)
        cost = known[tables]
        if isinstance(cost, UnknownCost):
            return cost
        costs.append(cost)
    flops = [cost.flops for cost in costs]
    total = sum(flops)
    note = (
        f"{call.name}: devices skip different blocks, {min(flops):,} to {max(flops):,} FLOPs; "
        f"counted as the mean of {devices} devices"
    )
    if total % devices:
        note += f", rounded down: {total:,} in all"
    return KernelCost(
        flops=total // devices,
        rematerialized=sum(cost.rematerialized for cost in costs) // devices,
        padding=sum(cost.padding for cost in costs) // devices,
        dtype=costs[0].dtype,
        seen_by_xla=costs[0].seen_by_xla,
        note="; ".join(filter(None, (note, costs[0].note))),
    )
