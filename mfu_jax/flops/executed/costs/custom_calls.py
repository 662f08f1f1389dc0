"""Costs of custom kernels: by their rules, by what the user gave, or as the mean of all devices."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable, Iterator, Sequence

from mfu_jax.flops.attention_kernels import is_attention
from mfu_jax.flops.count import KernelRun, KernelRuns
from mfu_jax.flops.executed.cost_types import InstructionCost, MatmulCost, unaccounted
from mfu_jax.flops.executed.costs.literals import Literals
from mfu_jax.flops.executed.hlo.dataflow import Dataflow
from mfu_jax.flops.executed.hlo.module import HloComputation, HloInstruction
from mfu_jax.flops.executed.hlo.text import ELIDED
from mfu_jax.flops.executed.kernels.registry import (
    PALLAS_TARGETS,
    KernelCall,
    KernelCost,
    UnknownCost,
    kernel_cost,
)
from mfu_jax.flops.lengths import Lengths

KernelFlops = KernelRuns | Callable[[KernelCall], int | None]


class CustomCalls:
    """Reads the costs of a program's custom kernels.

    Args:
        dataflow: dataflow of the program.
        kernel_flops: FLOPs of custom kernels, as `executed_flops` takes them.
        lengths: lengths that are data, if the user gave them.
    """

    def __init__(
        self, dataflow: Dataflow, kernel_flops: KernelFlops | None, lengths: Lengths
    ) -> None:
        self.devices = dataflow.module.header_int("num_partitions")
        self.kernel_flops = kernel_flops
        self.literals = Literals(dataflow, elided=True)
        self.lengths = lengths

    def cost(self, computation: HloComputation, instruction: HloInstruction) -> InstructionCost:
        """Cost of one run of a custom call."""
        self.literals.elided = False
        literal = functools.partial(self.literals.of, computation, instruction)
        call = KernelCall(computation, instruction, literal, self.lengths)
        cost = self._cost_by_devices(call)
        if isinstance(cost, UnknownCost):
            elided = self.literals.elided
            if elided:
                cost = dataclasses.replace(cost, reason=f"it needs {ELIDED}")
            cost = self._given_cost(call, cost)
        if isinstance(cost, UnknownCost):
            way_out = f"{'or ' * elided}give its cost with @register_kernel or kernel_flops="
            reason, name = f"{cost.reason}; {way_out}", call.target or call.name
            return InstructionCost(unaccounted=unaccounted(instruction, name, reason))
        cost = self._inside_arrays(call, cost)
        if not (cost.flops or cost.seen_by_xla):
            return InstructionCost(note=cost.note)
        matmul = MatmulCost(
            instruction=instruction,
            flops=cost.flops,
            dtype=cost.dtype or call.dtype,
            rematerialized=cost.rematerialized,
            kernel="" if cost.seen_by_xla == cost.flops else call.name,
            seen_by_xla=cost.seen_by_xla,
            is_attention=is_attention(call.target)
            or is_attention(call.name)
            or call.attention_in_scope is not None,
            padding=cost.padding,
            beyond=cost.beyond,
            grid_steps=cost.grid_steps,
        )
        return InstructionCost(matmul, note=cost.note)

    def _cost_by_devices(self, call: KernelCall) -> KernelCost | UnknownCost:
        """The cost of a kernel; the mean over all devices if their tables differ."""
        self.literals.choose(0)
        cost = kernel_cost(call)
        differing = sorted(self.literals.by_device)
        if not differing or isinstance(cost, UnknownCost):
            return cost
        return _device_mean(call, differing, self.devices, self.literals.choose)

    def _given(self, call: KernelCall) -> int | tuple[KernelRun, ...] | None:
        if callable(self.kernel_flops):
            return self.kernel_flops(call)
        given = self.kernel_flops or {}
        return given.get(call.name, given.get(call.target))

    def _inside_arrays(self, call: KernelCall, cost: KernelCost) -> KernelCost:
        """The cost without what blocks run beyond their arrays, if a trace knows the kernel.

        A kernel that its author did not name has another name in HLO: it is known by its FLOPs.
        """
        if callable(self.kernel_flops) or not (cost.flops and self.kernel_flops):
            return cost
        given = self._given(call)
        if given is None and call.target not in PALLAS_TARGETS:
            return cost
        known = self.kernel_flops.values() if given is None else [given]
        runs = {run for run in _runs(known) if sum(run) == cost.flops}
        if len(runs) != 1:
            return cost
        (run,) = runs
        return dataclasses.replace(
            cost,
            flops=run.flops,
            rematerialized=cost.rematerialized * run.flops // cost.flops,
            padding=max(0, cost.padding - run.overhang),
            beyond=cost.beyond._replace(stated=cost.beyond.stated + run.overhang),
        )

    def _given_cost(self, call: KernelCall, cost: UnknownCost) -> KernelCost | UnknownCost:
        """The cost that the caller gave as `kernel_flops`, else the kernel author's estimate."""
        given = self._given(call)
        flops = given if isinstance(given, int) else None
        if isinstance(given, tuple) and len(given) == 1:
            flops = sum(given[0])
        note = ""
        if flops is None:
            if cost.estimate is None:
                return cost
            flops = cost.estimate
            note = f"{call.name}: {cost.reason}; counted by its author's cost_estimate"
        return KernelCost(
            flops=flops,
            rematerialized=int(flops * cost.share_rematerialized),
            dtype=cost.dtype,
            seen_by_xla=cost.estimate or 0,
            note=note,
        )


def _runs(known: Iterable[int | tuple[KernelRun, ...]]) -> Iterator[KernelRun]:
    for runs in known:
        yield from (KernelRun(runs, 0),) if isinstance(runs, int) else runs


def _device_mean(
    call: KernelCall, differing: Sequence[int], devices: int, choose: Callable[[int], None]
) -> KernelCost | UnknownCost:
    """The mean of all devices' costs, with a note that gives the least and the most.

    Each device reads its own part of a table: with splash attention over a split sequence and a
    causal mask, the last device keeps the most blocks.

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
        grid_steps=costs[0].grid_steps,
        note="; ".join(filter(None, (note, costs[0].note))),
    )
