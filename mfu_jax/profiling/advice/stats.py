"""The numbers of a profile that advice is based on."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING

from mfu_jax import hardware
from mfu_jax.errors import UserError
from mfu_jax.flops.executed.records import InstructionRecord
from mfu_jax.hardware.chips import Chip
from mfu_jax.hardware.step_peaks import StepPeaks
from mfu_jax.host_work import HostWork
from mfu_jax.profiling.attribution.device_times import OpTime
from mfu_jax.profiling.attribution.host_time import HostTime
from mfu_jax.profiling.attribution.host_work import KINDS
from mfu_jax.profiling.attribution.step_times import MeasuredStep
from mfu_jax.profiling.join.ops import DeviceWork
from mfu_jax.profiling.timeline.devices import Program

if TYPE_CHECKING:
    from mfu_jax.profiling.join.programs import KnownProgram

# By their own idle time.
_OVERLAPPING = (HostWork.COMPILE, HostWork.EVALUATION, HostWork.TRANSFER, HostWork.WAIT)
LEAST = 0.05
"""Of a step: a smaller gain is noise, or not worth a change."""

FULL = 0.9  # share of the memory that a program may use
_NOTHING = HostTime(0.0, 0.0, 0.0, 0, "", "")
_EVALUATES = re.compile(r"(^|_)(eval|evaluate|evaluation|valid|validate|validation|test)(_|$)")


@dataclass(frozen=True, kw_only=True)
class ProfileStats:
    """What the rules use.

    Attributes:
        measured: times by op.
        peaks: peaks of one device.
        program: the step's program.
        programs: all programs that ran and are known.
        settings: the trainer's, key → text; empty if unknown.
    """

    measured: MeasuredStep
    peaks: StepPeaks
    program: KnownProgram
    programs: Mapping[Program, KnownProgram] = field(default_factory=dict)
    settings: Mapping[str, str] = field(default_factory=dict)

    @property
    def step(self) -> float:
        """Seconds of a step."""
        return self.measured.step_seconds

    @property
    def is_cpu(self) -> bool:
        """Whether the devices are CPUs, which gain nothing from bf16, kernels or overlap."""
        return self.measured.platform == "cpu"

    @property
    def chip(self) -> Chip | None:
        """The devices' chip; None if it is not in the table."""
        try:
            return hardware.lookup(self.program.device_kind or self.measured.kind)
        except UserError:
            return None

    @cached_property
    def evaluations(self) -> frozenset[Program]:
        """Other programs that evaluate: by name, or as a forward pass that returns only scalars."""
        others = frozenset(self.measured.executions) - self.measured.versions
        return frozenset(program for program in others if self._evaluates(program))

    def _evaluates(self, program: Program) -> bool:
        if _EVALUATES.search(program.module):
            return True
        if (known := self.programs.get(program)) is None:
            return False
        is_forward = all(r.phase != "backward" for r in known.costs.records.values() if r.flops)
        is_scalar = all(not array.dims for array in known.costs.results)
        return known.costs.executed.total > 0 and is_forward and is_scalar

    @property
    def gaps(self) -> float:
        """Step time without late calls, over the time in which ops run: gaps belong to ops.

        Every op waits to be launched; one op less is one gap less. 1 if no steps are marked.
        """
        busy, late = self.measured.busy_seconds, self.measured.late_calls
        return max(1.0, (self.step - late) / busy) if self.measured.host and busy else 1.0

    def host(self, kind: HostWork) -> HostTime:
        """The time that the thread calling the steps spent on this kind of work."""
        return self.measured.host.get(kind, _NOTHING)

    def ops(self, choose: Callable[[InstructionRecord], object]) -> list[OpTime]:
        """The ops whose instruction is chosen; ops without an instruction are left out."""
        return [op for op in self.measured.ops if op.op.record and choose(op.op.record)]

    def compute(self) -> list[OpTime]:
        """The ops that compute and have an instruction."""
        return [op for op in self.ops(lambda _: True) if op.op.work is DeviceWork.COMPUTE]

    def shortest(self, op: OpTime) -> float:
        """The time of an op's matmuls at the peak."""
        return op.shortest(self.peaks)

    def moving(self, op: OpTime) -> float | None:
        """The time of an op's bytes at the memory's peak; None if that is unknown."""
        if self.peaks.bytes_per_sec is None or op.op.record is None:
            return None
        return op.runs * op.op.record.hbm_bytes / self.peaks.bytes_per_sec

    @property
    def bytes_per_second(self) -> float | None:
        """The memory's peak; if unknown, what vector work reaches; None without such work.

        A CPU's threads share its memory, and the table has no peak for it.
        """
        if self.peaks.bytes_per_sec is not None:
            return self.peaks.bytes_per_sec
        vector = [op for op in self.compute() if not record_of(op).flops]
        seconds = seconds_of(vector)
        moved = sum(op.runs * record_of(op).hbm_bytes for op in vector)
        return moved / seconds if moved and seconds else None

    @cached_property
    def idle_time(self) -> Mapping[HostWork, float]:
        """Idle seconds per step by cause; zeros if the trace has no calls of the step.

        Each part has one cause: compilation and evaluation own what they overlap, a wait what
        follows it until the next step; the rest goes to whatever keeps the thread busy, data first.
        """
        found = {kind: self.host(kind) for kind in KINDS}
        own = {k: host.idle if k in _OVERLAPPING else host.seconds for k, host in found.items()}
        after = sum(self.measured.late_after.get(program, 0.0) for program in self.evaluations)
        # Waits for an evaluation that the loop itself calls, outside a function of that name.
        waited = max(0.0, min(after - own[HostWork.EVALUATION], own[HostWork.WAIT]))
        own[HostWork.EVALUATION] += waited
        own[HostWork.WAIT] -= waited
        rest, shares = self.measured.late_calls, {}
        for kind, seconds in own.items():  # in the order of precedence
            shares[kind] = min(seconds, rest)
            rest -= shares[kind]
        return shares

    @property
    def unexplained_idle(self) -> float:
        """Idle seconds per step until the next call that nothing on the host's thread explains."""
        return self.measured.late_calls - sum(self.idle_time.values())

    @property
    def memory_limit(self) -> int:
        """Memory of one device; 0 if unknown."""
        usable = self.chip.usable_memory_bytes if self.chip else 0
        return self.program.dump.topology.memory_bytes or usable

    @property
    def memory_used(self) -> int | None:
        """An upper bound on the program's peak memory; None if unknown."""
        memory = self.program.dump.memory or {}
        sizes = [memory.get(f"{part}_size_in_bytes") for part in ("argument", "output", "temp")]
        if None in sizes:
            return None
        return sum(size or 0 for size in sizes) - memory.get("alias_size_in_bytes", 0)

    @property
    def logits(self) -> tuple[int, ...] | None:
        """The dimensions of the widest result of a forward matmul far wider than its input."""
        wide = [
            record.shape.results[0].dims
            for record in self.program.costs.records.values()
            if (matmul := record.shape.matmul)
            and record.phase in ("forward", "evaluation")
            and record.shape.results
            and matmul.batch == 1
            and matmul.n >= 8 * matmul.k
        ]
        return max(wide, key=lambda dims: dims[-1], default=None)


def seconds_of(ops: Iterable[OpTime]) -> float:
    """The ops' wall time in a step."""
    return sum(op.seconds for op in ops)


def record_of(op: OpTime) -> InstructionRecord:
    """The instruction of an op that has one."""
    assert op.op.record is not None
    return op.op.record


def largest_names(ops: Iterable[OpTime], count: int = 3) -> str:
    """The names of the longest ops, with their scopes."""
    longest = sorted(ops, key=lambda op: -op.seconds)[:count]
    named = [(record_of(op).name, record_of(op).scope) for op in longest]
    return ", ".join(f"{name} ({scope})" if scope else name for name, scope in named)


def milliseconds(seconds: float) -> str:
    """A time as text.

    >>> milliseconds(0.0123)
    '12.3 ms'
    """
    return f"{seconds * 1e3:.3g} ms"
