"""Joins the ops of a trace with the instructions of its programs, by name."""

from __future__ import annotations

import re
from collections.abc import Iterable
from enum import IntEnum
from typing import TYPE_CHECKING, NamedTuple

from mfu_jax.flops.executed.records import InstructionRecord
from mfu_jax.profiling.timeline.devices import (
    TO_DEVICE,
    TO_HOST,
    OpName,
    Program,
    copy_kind,
)

if TYPE_CHECKING:
    from mfu_jax.profiling.join.programs import KnownProgram, ProgramLibrary


class DeviceWork(IntEnum):
    """What an op does. If several are active at once, time goes to the first of these."""

    COMPUTE = 0
    COMMUNICATION = 1
    TRANSFER = 2
    HOST = 3
    CONTROL = 4


_MESSAGES = re.compile(r"(send|recv)(-done)?$")
_TRANSFERS = re.compile(
    r"(copy|slice|dynamic-slice|dynamic-update-slice)-(start|done)$|infeed|outfeed"
)
_NCCL = re.compile(r"nccl\w*Kernel_(AllReduce|AllGather|ReduceScatter|SendRecv|Broadcast|AllToAll)")
_NCCL_KINDS = {
    "AllReduce": "all-reduce",
    "AllGather": "all-gather",
    "ReduceScatter": "reduce-scatter",
    "SendRecv": "send-recv",
    "Broadcast": "collective-broadcast",
    "AllToAll": "all-to-all",
}


class JoinedOp(NamedTuple):
    """An op of a trace, and the instruction that it runs.

    Attributes:
        name: as in the trace.
        record: the instruction; None if no program has it.
        source: the program of `record`.
        work: what the op does.
        kind: the collective's kind, else the opcode; for an op without an instruction, its kind
            judging by its name.
        start: the instruction that started the collective or copy; `record` if no other did.
    """

    name: OpName
    record: InstructionRecord | None
    source: KnownProgram | None
    work: DeviceWork
    kind: str
    start: InstructionRecord | None = None

    @property
    def is_host_copy(self) -> bool:
        """Whether the loop, no instruction, copies an array between the host and the device."""
        return self.record is None and self.kind in (TO_DEVICE, TO_HOST)

    @property
    def module(self) -> str:
        """Name of its program; if the trace names none, of the one that has its instruction."""
        return self.name.program.module or (self.source.costs.name if self.source else "")


class Join:
    """Joins ops with instructions.

    Args:
        library: the programs.
    """

    def __init__(self, library: ProgramLibrary) -> None:
        self._library = library

    def ops(self, names: Iterable[OpName]) -> list[JoinedOp]:
        """The joined ops of a table of names, in its order."""
        return [self._op(name) for name in names]

    def has_dump(self, program: Program) -> bool:
        """Whether a program of this name was dumped beside the trace."""
        return self._library.has_dump(program)

    def _op(self, name: OpName) -> JoinedOp:
        for source in self.sources(name.program):
            record = source.costs.records.get(name.name)
            if record is None and name.is_kernel:
                record = source.by_kernel.get(name.name)
            if record is not None:
                return _joined(name, record, source)
        return JoinedOp(name, None, None, *work_by_name(name.name))

    def sources(self, program: Program) -> list[KnownProgram]:
        """The programs that may have an op of this program: all, if the trace names none."""
        found = self._library.find(program) if program.module else None
        if found is not None:
            return [found]
        return [] if program.module else self._library.read


def _joined(name: OpName, record: InstructionRecord, source: KnownProgram) -> JoinedOp:
    start = source.costs.records.get(record.started_by) if record.started_by else record
    collective = start.collective if start else None
    if collective is not None and start is not None and not (record.flops or start.flops):
        return JoinedOp(name, record, source, DeviceWork.COMMUNICATION, collective.kind, start)
    return JoinedOp(name, record, source, _work(record), record.opcode, start)


def _work(record: InstructionRecord) -> DeviceWork:
    if record.is_control:
        return DeviceWork.CONTROL
    if record.shape.is_host_transfer or "callback" in record.shape.target:
        return DeviceWork.HOST
    if _MESSAGES.match(record.opcode):
        return DeviceWork.COMMUNICATION
    return DeviceWork.TRANSFER if _TRANSFERS.match(record.opcode) else DeviceWork.COMPUTE


def kernel_name(name: str) -> str:
    """The name that XLA gives the kernel of an instruction on GPUs."""
    return re.sub(r"[.-]", "_", name)


def work_by_name(name: str) -> tuple[DeviceWork, str]:
    """Work and kind of an op without an instruction, from its name."""
    if match := _NCCL.search(name):
        return DeviceWork.COMMUNICATION, _NCCL_KINDS[match[1]]
    if kind := copy_kind(name):
        return DeviceWork.TRANSFER, kind
    return DeviceWork.COMPUTE, re.sub(r"[._]?\d+$", "", name)
