"""Finds the instructions of GPU kernels that a trace does not name.

A command buffer launches a run of a computation's instructions in scheduled order. So the sequence
of its kernels is aligned with the schedule of every computation, and the best alignment names them.
One by one they could not be named: instructions with the same code share one kernel, under the
name of the first, and library calls launch kernels with names of their own, one or several.

Other kernels are named by order. Between two known ones, the device runs the instructions between
theirs, in the order of the scheduled text. If the number of unknown kernels there equals that of
instructions not seen elsewhere, they are matched in order; else they stay unknown.
"""

from __future__ import annotations

import dataclasses
import functools
import re
from collections import defaultdict
from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import numpy.typing as npt

from mfu_jax.flops.executed.records import InstructionRecord
from mfu_jax.profiling.join.ops import DeviceWork, Join, JoinedOp, kernel_name, work_by_name
from mfu_jax.profiling.timeline.devices import DeviceTimeline, OpName, OpTable, Program, spans

if TYPE_CHECKING:
    from mfu_jax.profiling.join.programs import KnownProgram

AlignmentScores = npt.NDArray[np.int32]

# Scores of a kernel for an instruction, in whole numbers, which add up exactly. Only their order
# matters: a name says more than a kind.
_SAME_NAME, _SAME_CODE, _OF_LIBRARY, _OF_COPY, _FAMILY, _ALSO = 40, 30, 20, 20, 10, 5
_NEVER = -(10**7)
_PERHAPS, _PERHAPS_ALSO = 5, 1  # any kernel, for a fusion that XLA has not named after its work
_TAKEN = _SAME_NAME - _SAME_CODE + 1  # less for an instruction of another command buffer
_LEFT_OUT = 10  # a kernel without an instruction
_SKIPPED = 3  # an instruction without a kernel
_LEAST = 0.5  # of the kernels: below that, it is another computation
_MOST_CELLS = 4 * 10**8

_SUFFIX = re.compile(r"(_\d+)+$")
_MEMORY = re.compile(r"mem(cpy|set)", re.IGNORECASE)
_CLEARS = re.compile(r"memset", re.IGNORECASE)
_MOVES = re.compile(r"copy|slice|fusion-start$")
_LIBRARIES = (  # kernels, and the targets of the calls that launch them; the first decides
    ("bprop|bwd|dot_do_o|convert_dq", r"fmha\w*Backward"),
    ("fprop|fwd|sdpa", r"fmha\w*(?<!Backward)$"),
    ("cudnn|dgrad|wgrad", r"cudnn"),
    ("nvjet|gemm|cublas|cutlass|splitK|gemv|xmma", r"cublas"),
)
_UNNAMED = "fusion"  # fusion.41: its kernels may be triton_softmax_8, sort_29_1
_NAMED = re.compile(r"command_buffer")
_CALLS = frozenset({"custom-call", "convolution", "fft", "cholesky", "triangular-solve", "sort"})


def with_instructions(timeline: DeviceTimeline, join: Join) -> DeviceTimeline:
    """The timeline with the names that follow from the kernels' order."""
    return _named_by_order(named_in_buffers(timeline, join), join)


def named_in_buffers(timeline: DeviceTimeline, join: Join) -> DeviceTimeline:
    """The timeline with instructions instead of the kernels of command buffers, where found."""
    buffers: dict[tuple[Program, str], list[int]] = defaultdict(list)
    for number, name in enumerate(timeline.names):
        if name.buffer:
            buffers[name.program, name.buffer].append(number)
    if not buffers:
        return timeline
    first, _ = spans(timeline.ops, len(timeline.names), timeline.starts, timeline.ends)
    found: dict[int, OpName] = {}
    programs = _Schedules(join)
    for (program, buffer), numbers in sorted(
        buffers.items(), key=lambda item: min(first[item[1]].tolist())
    ):
        numbers.sort(key=lambda number: timeline.names[number].position)
        kernels = [timeline.names[number].name for number in numbers]
        records = programs.aligned(program, buffer, kernels)
        for number, record in zip(numbers, records, strict=True):
            if record is not None:
                found[number] = OpName(program, record.name)
    table = OpTable()
    renamed = np.array(
        [table.number(found.get(n, name)) for n, name in enumerate(timeline.names)], np.int64
    )
    return dataclasses.replace(timeline, names=table.names, ops=renamed[timeline.ops])


class _Schedules:
    """The computations of the programs that may have run.

    Args:
        join: finds the programs.
    """

    def __init__(self, join: Join) -> None:
        self._join = join
        self._found: dict[int, list[KernelSchedule]] = {}
        self._taken: dict[int, str] = {}  # by `id`: the command buffer that runs the instruction

    def aligned(
        self, program: Program, buffer: str, kernels: Sequence[str]
    ) -> Sequence[InstructionRecord | None]:
        """The instruction of each kernel, from the computation with the best alignment.

        Two loops may have the same code, and kernels under the names of the first. Each has a
        command buffer of its own, which may be built several times, as several CUDA graphs.
        """
        owner = buffer.rpartition(" ")[0] if _NAMED.match(buffer) else buffer
        best, most = _Alignment(0, [None] * len(kernels)), 0
        for source in self._join.sources(program):
            for schedule in self._of(source):
                if schedule.knows(kernels):
                    found = schedule.aligned(kernels)
                    others = sum(self._taken.get(id(r), owner) != owner for r in found.records)
                    if (score := found.score - _TAKEN * others) > most:
                        best, most = found, score
        self._taken.update({id(r): owner for r in best.records if r is not None})
        return best.records

    def _of(self, source: KnownProgram) -> list[KernelSchedule]:
        if id(source) not in self._found:
            parts, names = source.computations.values(), source.costs.records
            self._found[id(source)] = [KernelSchedule(part, names) for part in parts]
        return self._found[id(source)]


class _Alignment(NamedTuple):
    """Instructions of kernels; a higher score is a better fit."""

    score: int
    records: Sequence[InstructionRecord | None]


class KernelSchedule:
    """The instructions of one computation that launch kernels, in scheduled order.

    Args:
        records: all its instructions, in scheduled order.
        names: of all instructions of the program.
    """

    def __init__(self, records: Iterable[InstructionRecord], names: Iterable[str]) -> None:
        launching = [r for r in records if not (r.is_control or r.started_by)]
        self._records = launching
        self._codes = frozenset(map(_code, names))
        self._names = np.array([kernel_name(record.name) for record in launching])
        self._own = np.array([_code(record.name) for record in launching])
        self._moves = np.array([bool(_MOVES.search(r.opcode)) for r in launching])
        self._calls = np.array([r.opcode in _CALLS or r.collective is not None for r in launching])
        self._score = functools.cache(self._scored)

    def knows(self, kernels: Iterable[str]) -> bool:
        """Whether it has instructions that are named like some kernel, or library calls only."""
        return bool(np.isin(self._own, [_code(name) for name in kernels]).any())

    def aligned(self, kernels: Sequence[str]) -> _Alignment:
        """The best alignment that keeps the order of both.

        Needleman-Wunsch with two additions: a library call may have launched several kernels, and
        neither end of the computation costs anything.
        """
        units = _units(kernels)
        n, m = len(units), len(self._records)
        if n * m > _MOST_CELLS:
            return _Alignment(0, [None] * len(kernels))
        cost = _SKIPPED * np.arange(1, m + 1, dtype=np.int32)
        # Before[i]: the best score with the last kernel at instruction i - 1 or earlier.
        before = np.zeros(m + 1, np.int32)
        last = np.full(m, _NEVER, np.int32)
        choices = np.zeros((n, m), np.int8)
        skips = np.zeros((n, m), bool)
        for k, unit in enumerate(units):
            name = kernels[unit.stop - 1]
            starts = before[:-1] + self._score(name)
            also = last + self._also(name)
            options = np.stack([starts, also, last - _LEFT_OUT])
            choices[k] = options.argmax(axis=0)
            last = options.max(axis=0)
            if k == 0:
                choices[k], last = 0, starts
            best = np.maximum.accumulate(last + cost) - cost
            skips[k] = best > last
            before = np.concatenate([np.full(1, -_LEFT_OUT * (k + 1), np.int32), best])
        return self._followed(units, len(kernels), last, choices, skips)

    def _followed(
        self,
        units: Sequence[range],
        count: int,
        last: AlignmentScores,
        choices: npt.NDArray[np.int8],
        skips: npt.NDArray[np.bool_],
    ) -> _Alignment:
        """Traces the best alignment back from its end."""
        records: list[InstructionRecord | None] = [None] * count
        i = int(np.argmax(last))
        score = int(last[i])
        matched = 0
        for k in range(len(units) - 1, -1, -1):
            choice = choices[k, i]
            if choice != 2:
                matched += len(units[k])
                for kernel in units[k]:
                    records[kernel] = self._records[i]
            if choice == 0:
                i -= 1
                while i >= 0 and k > 0 and skips[k - 1, i]:
                    i -= 1
                if i < 0:
                    break
        is_other = matched < _LEAST * count
        return _Alignment(0, [None] * count) if is_other else _Alignment(score, records)

    def _scored(self, kernel: str) -> AlignmentScores:
        """A kernel's score for each instruction."""
        scores = np.full(len(self._records), _NEVER, np.int32)
        if self._is_foreign(kernel):
            scores[self._own == _UNNAMED] = _PERHAPS
            scores[self._calls] = _OF_LIBRARY
            scores += _FAMILY * self._families(kernel)
            if _MEMORY.search(kernel):
                scores[self._moves] = _OF_COPY
            kind = work_by_name(kernel)[1]
            same = [r.collective is not None and r.collective.kind == kind for r in self._records]
            scores[same] = _SAME_NAME
        else:
            scores[self._own == _code(kernel)] = _SAME_CODE
        scores[self._names == kernel] = _SAME_NAME
        return scores

    def _also(self, kernel: str) -> AlignmentScores:
        """Its score for each instruction as a further kernel of it."""
        if not self._is_foreign(kernel):  # a sort's second kernel: sort_3_1
            return np.where(self._names == kernel.rpartition("_")[0], _ALSO, _NEVER)
        of_call = np.where(self._calls, _ALSO + _FAMILY * self._families(kernel), _NEVER)
        return np.where(self._own == _UNNAMED, _PERHAPS_ALSO, of_call)

    def _families(self, kernel: str) -> AlignmentScores:
        """1 for calls of the library that a kernel is from, -1 for other calls, 0 if unknown."""
        for names, calls in _LIBRARIES:
            if re.search(names, kernel):
                own = [bool(re.search(calls, record.shape.target)) for record in self._records]
                return np.where(self._calls, np.where(own, 1, -1), 0).astype(np.int32)
        return np.zeros(len(self._records), np.int32)

    def _is_foreign(self, kernel: str) -> bool:
        """Whether it is no kernel that XLA generated for an instruction."""
        return _code(kernel) not in self._codes


def _units(kernels: Sequence[str]) -> list[range]:
    """Kernels that belong together: clearing a library call's workspace, and the call's kernel."""
    units: list[range] = []
    begin = 0
    for k, name in enumerate(kernels):
        follows = k + 1 < len(kernels) and not _MEMORY.search(kernels[k + 1])
        if _CLEARS.search(name) and follows:
            continue
        units.append(range(begin, k + 1))
        begin = k + 1
    return units


def _code(name: str) -> str:
    """A name without its number: what instructions with the same code have in common."""
    return _SUFFIX.sub("", kernel_name(name))


def _named_by_order(timeline: DeviceTimeline, join: Join) -> DeviceTimeline:
    joined = join.ops(timeline.names)
    is_unknown = np.array([_is_unknown(op) for op in joined], bool)[timeline.ops]
    if not is_unknown.any():
        return timeline
    is_known = np.array([op.record is not None for op in joined], bool)[timeline.ops]
    table, ops = OpTable(timeline.names), timeline.ops.copy()
    seen = {id(op.record) for op in joined if op.record is not None}
    for lane in np.unique(timeline.lanes[is_unknown]).tolist():
        events = np.flatnonzero((timeline.lanes == lane) & (is_known | is_unknown))
        events = events[np.argsort(timeline.starts[events], kind="stable")]
        known = np.flatnonzero(is_known[events])
        for left, right in pairwise(known.tolist()):
            between = events[left + 1 : right]
            ends = (joined[ops[events[left]]], joined[ops[events[right]]])
            for event, name in zip(between, _between(*ends, len(between), seen), strict=False):
                ops[event] = table.number(name)
    return dataclasses.replace(timeline, names=table.names, ops=ops)


def _is_unknown(op: JoinedOp) -> bool:
    return op.name.is_kernel and op.record is None and op.work is DeviceWork.COMPUTE


def _between(left: JoinedOp, right: JoinedOp, count: int, seen: set[int]) -> list[OpName]:
    """`count` names between two ops; none if the program has a different number of them.

    Args:
        left: the op before them.
        right: the op after them.
        count: number of kernels without a name.
        seen: by `id`: instructions with kernels of their own name.
    """
    source, first, last = left.source, left.record, right.record
    if not count or source is None or source is not right.source or not first or not last:
        return []
    if first.computation != last.computation:
        return []
    records = source.computations[first.computation]
    begin, end = records.index(first), records.index(last)
    inner = records[begin + 1 : end] if begin < end else [*records[begin + 1 :], *records[:end]]
    unseen = [record for record in inner if id(record) not in seen and _runs(record)]
    program = left.name.program
    return [OpName(program, r.name) for r in unseen] if len(unseen) == count else []


def _runs(record: InstructionRecord) -> bool:
    """Whether it may be a kernel on the same stream as its neighbours."""
    return not (record.is_control or record.is_async or record.collective or record.started_by)
