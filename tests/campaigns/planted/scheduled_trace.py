"""The trace that a TPU would record of a program that ran exactly as a plan predicts.

Every op of the program in order, loops multiplied out, each with the plan's duration
(`mfu_jax.planning.step_time.durations`).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from mfu_jax.dumps.files import write
from mfu_jax.dumps.program import ProgramDump
from mfu_jax.flops.executed.hlo.module import HloModule
from mfu_jax.flops.executed.hlo.parsing import parse_hlo
from mfu_jax.flops.executed.instruction_costs import instruction_costs
from mfu_jax.flops.executed.records import InstructionRecord, ProgramCosts
from mfu_jax.planning.step_time.durations import Durations, Efficiencies
from mfu_jax.planning.step_time.schedule import by_computation, predicted_time
from mfu_jax.planning.targets import Target
from tests.support.accelerator_traces import write_trace
from tests.support.xspace import Plane

STEPS = 3
_PICOSECONDS = 10**12
_AHEAD = 1e-3  # seconds by which the host calls a step ahead of its start


class Op(NamedTuple):
    """One run of an instruction, in seconds from the start of its computation.

    Attributes:
        name: of the instruction.
        start: when it begins.
        end: when it ends; for a loop, with its last iteration.
        is_beside: whether it is a transfer that runs alongside other ops.
    """

    name: str
    start: float
    end: float
    is_beside: bool = False

    def later(self, seconds: float) -> Op:
        """The same run, this many seconds later."""
        return self._replace(start=self.start + seconds, end=self.end + seconds)


class Schedule:
    """A program on a chip.

    Args:
        program: compiled for it.
        target: the chip.
    """

    def __init__(self, program: ProgramDump, target: Target) -> None:
        self.costs: ProgramCosts = instruction_costs(program)
        self._module: HloModule = parse_hlo(program.text)
        self._durations = Durations(target=target, efficiencies=Efficiencies())
        self._records = {records[0].computation: records for records in by_computation(self.costs)}
        self._known: dict[str, tuple[list[Op], float]] = {}

    @property
    def seconds(self) -> float:
        """Seconds per step by the planner, which adds them up without writing a trace."""
        return predicted_time(self.costs, self._durations).seconds

    def step(self) -> tuple[list[Op], float]:
        """The ops of a step, and its duration."""
        return self._of(self._module.entry.name)

    def _of(self, computation: str) -> tuple[list[Op], float]:
        if computation not in self._known:
            self._known[computation] = self._walked(self._records.get(computation, []))
        return self._known[computation]

    def _walked(self, records: Sequence[InstructionRecord]) -> tuple[list[Op], float]:
        """The ops that `planning.step_time.schedule.walk` adds up, one by one."""
        ops: list[Op] = []
        now = 0.0
        arrives: dict[str, float] = {}
        free: dict[str, float] = defaultdict(float)
        for record in records:
            begin = now
            if record.is_control:
                inner, now = self._inside(record, now)
                ops += inner
            elif not record.opcode.endswith(("-done", "-update")):
                for part in self._durations.of(record):
                    start = max([now, *(free[lane] for lane in part.lanes)])
                    end = start + part.seconds
                    free.update(dict.fromkeys(part.lanes, end))
                    if part.lanes and record.is_start:
                        arrives[record.name] = end
                        ops.append(Op(record.name, start, end, is_beside=True))
                    else:
                        now = end
            if record.started_by and not record.opcode.endswith("-update"):
                now = max(now, arrives.pop(record.started_by, now))
            ops.append(Op(record.name, begin, now))
        return ops, max([now, *arrives.values()])

    def _inside(self, record: InstructionRecord, now: float) -> tuple[list[Op], float]:
        """The ops of what an instruction calls, as often as they run there."""
        instruction = self._module[record.computation][record.name]
        ops: list[Op] = []
        for callee, times in self._calls(record, instruction.callees):
            inner, length = self._of(callee)
            for _ in range(times):
                ops += [op.later(now) for op in inner]
                now += length
        return ops, now

    def _calls(
        self, record: InstructionRecord, callees: Sequence[str]
    ) -> Iterator[tuple[str, int]]:
        for callee in callees:
            if (records := self._records.get(callee)) and record.runs:
                yield callee, records[0].runs // record.runs


def write_scheduled(folder: Path, program: ProgramDump, target: Target) -> float:
    """Writes the program, and a trace of three steps; returns the planner's seconds per step."""
    schedule = Schedule(program, target)
    write(program, folder / "programs" / "train_step.mfu")
    ops, length = schedule.step()
    starts = [(1 + step) * length for step in range(STEPS)]
    write_trace(folder, _host(starts), _device(schedule.costs, target, ops, starts, length))
    return schedule.seconds


def _device(
    costs: ProgramCosts, target: Target, ops: Sequence[Op], starts: Sequence[float], length: float
) -> Plane:
    plane = Plane("/device:TPU:0", device_type_string=target.chip.device_kinds[0])
    names = {op.name: f"%{op.name} = bf16[] {costs.records[op.name].opcode}(%p)" for op in ops}
    plane.line("XLA Modules", [_event(f"{costs.name}(7)", s, s + length) for s in starts])
    for line, is_beside in (("XLA Ops", False), ("Async XLA Ops", True)):
        chosen = [op for op in ops if op.is_beside == is_beside]
        events = [_event(names[op.name], s + op.start, s + op.end) for s in starts for op in chosen]
        plane.line(line, events)
    return plane


def _host(starts: Sequence[float]) -> Plane:
    plane = Plane("/host:CPU")
    marks = [("train", s - _AHEAD, s - _AHEAD / 2, {"step_num": i}) for i, s in enumerate(starts)]
    plane.line("python", [_event(*mark) for mark in marks])
    return plane


def _event(
    name: str, start: float, end: float, stats: dict[str, int] | None = None
) -> tuple[str, int, int, dict[str, int]]:
    first = round(start * _PICOSECONDS)
    return name, first, round(end * _PICOSECONDS) - first, stats or {}
