"""What one computation of a program costs by itself, and what it calls."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from mfu_jax.flops.count import Unaccounted
from mfu_jax.flops.executed.collectives import KINDS, Collective, is_further_link, read_collective
from mfu_jax.flops.executed.dataflow import UnknownValueError, follow, frame_of
from mfu_jax.flops.executed.elementwise import elementwise_flops
from mfu_jax.flops.executed.hbm import hbm_bytes
from mfu_jax.flops.executed.hlo import HloComputation, HloInstruction, HloModule
from mfu_jax.flops.executed.kernels.registry import (
    KernelCall,
    KernelCost,
    UnknownCost,
    kernel_cost,
)
from mfu_jax.flops.executed.loops import trip_count
from mfu_jax.flops.executed.matmuls import MATMULS, operand_dtype
from mfu_jax.flops.kernels import is_attention

KernelFlops = Mapping[str, int] | Callable[[KernelCall], int | None]

_CALLS = {"fusion": "calls", "call": "to_apply", "async": "calls"}
# Library routines of their own, which multiply matrices inside or instead of it.
_NO_MATMULS = {
    "fft": "an FFT is no matmul; 5·n·log2(n) is the usual estimate",
    "cholesky": "runs as a library routine of about n³/3",
    "triangular-solve": "runs as a library routine of about n²·m",
}
# Instructions that neither compute nor move anything, which are most of a program.
_NOTHING = frozenset("parameter constant get-tuple-element tuple bitcast".split())
# In a fusion these do not, either.
_NOTHING_IN_FUSIONS = _NOTHING | frozenset(
    "broadcast copy transpose reshape slice pad iota".split()
)
_REDUCER_DEPTH = 16


@dataclass(frozen=True, slots=True)
class Matmul:
    """FLOPs of one instruction. `kernel` names the custom kernel that does them, if one does."""

    instruction: HloInstruction
    flops: int
    dtype: str
    rematerialized: int = 0
    kernel: str = ""
    seen_by_xla: int = 0
    attention: bool = False


@dataclass(frozen=True, slots=True)
class Call:
    """An instruction that runs other computations: all of them, or (alternatives) one of them."""

    instruction: HloInstruction
    callees: tuple[tuple[str, int], ...]  # name, times for each run of the caller
    alternatives: bool = False


@dataclass(slots=True)
class LocalCost:
    """What one run of a computation costs without what it calls."""

    matmuls: list[Matmul] = field(default_factory=list)
    calls: list[Call] = field(default_factory=list)
    unaccounted: list[Unaccounted] = field(default_factory=list)
    collectives: list[Collective] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    elementwise: int = 0
    hbm_bytes: int = 0


class CostReader:
    """Reads the local cost of computations, with the user's knowledge about kernels and loops."""

    def __init__(
        self,
        module: HloModule,
        *,
        kernel_flops: KernelFlops | None,
        trip_counts: Mapping[str, int],
        constants: Callable[[], HloModule | None],
    ) -> None:
        self.module = module
        self.kernel_flops = kernel_flops
        self.trip_counts = trip_counts
        self.constants = constants  # the same program with its large constants written out
        self.reducers: dict[str, int] = {}

    def read(self, computation: HloComputation, *, fused: bool) -> LocalCost:
        """The local cost of a computation; a fused one has no HBM traffic of its own."""
        local = LocalCost()
        nothing = _NOTHING_IN_FUSIONS if fused else _NOTHING
        for instruction in computation.instructions.values():
            opcode = instruction.opcode
            if opcode in nothing:
                continue
            base = opcode.removesuffix("-start")
            if base in MATMULS:
                flops = MATMULS[base](computation, instruction)
                dtype = operand_dtype(computation, instruction)
                local.matmuls.append(Matmul(instruction, flops, dtype, seen_by_xla=flops))
            elif base in _CALLS:
                names = instruction.computations(_CALLS[base])
                local.calls.append(_call(instruction, names))
            elif opcode == "while":
                local.calls.append(self._while(computation, instruction, local))
            elif opcode == "conditional":
                local.calls.append(_call(instruction, instruction.callees, alternatives=True))
            elif base == "custom-call":
                self._kernel(computation, instruction, local)
            elif base in KINDS and not is_further_link(computation, instruction):
                collective = read_collective(
                    self.module, computation, instruction, instruction.op_name
                )
                local.collectives.append(collective)
            elif opcode in _NO_MATMULS:
                local.unaccounted.append(_unaccounted(instruction, opcode, _NO_MATMULS[opcode]))
            local.elementwise += elementwise_flops(computation, instruction, self._reducer)
            if not fused:
                local.hbm_bytes += hbm_bytes(self.module, computation, instruction)
        return local

    def _while(
        self, computation: HloComputation, instruction: HloInstruction, local: LocalCost
    ) -> Call:
        bodies = instruction.computations("body")
        conditions = instruction.computations("condition")
        if len(bodies) != 1 or len(conditions) != 1:
            raise instruction.error("while without body or condition")
        times = self._given_trip_count(instruction)
        if times is None:
            times = trip_count(self.module, computation, instruction)
        if times is None:
            reason = "its trip count depends on data; its body is counted once; give trip_counts"
            local.unaccounted.append(_unaccounted(instruction, "while", reason))
            times = 1
        return Call(instruction, ((bodies[0], times), (conditions[0], times + 1)))

    def _given_trip_count(self, instruction: HloInstruction) -> int | None:
        for name, times in self.trip_counts.items():
            if name in (instruction.name, instruction.op_name):
                return times
        return None

    def _kernel(
        self, computation: HloComputation, instruction: HloInstruction, local: LocalCost
    ) -> None:
        call = KernelCall(
            computation, instruction, lambda index: self._literal(computation, instruction, index)
        )
        cost = kernel_cost(call)
        if isinstance(cost, UnknownCost):
            cost = self._told(call, cost)
        if isinstance(cost, UnknownCost):
            reason = f"{cost.reason}; give its cost with @register_kernel or kernel_flops="
            local.unaccounted.append(_unaccounted(instruction, call.target or call.name, reason))
            return
        if cost.note:
            local.notes.append(cost.note)
        if cost.flops or cost.seen_by_xla:
            dtype = cost.dtype or call.dtype
            kernel = "" if cost.seen_by_xla == cost.flops else call.name
            local.matmuls.append(
                Matmul(
                    instruction,
                    cost.flops,
                    dtype,
                    cost.rematerialized,
                    kernel,
                    cost.seen_by_xla,
                    is_attention(call.target) or is_attention(call.name),
                )
            )

    def _told(self, call: KernelCall, cost: UnknownCost) -> KernelCost | UnknownCost:
        """The cost that the caller knows from elsewhere, else its author's estimate."""
        if callable(self.kernel_flops):
            flops = self.kernel_flops(call)
        else:
            told = self.kernel_flops or {}
            flops = told.get(call.name, told.get(call.target))
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

    def _literal(
        self, computation: HloComputation, instruction: HloInstruction, index: int
    ) -> str | None:
        """The text of an operand that is a constant, also where the program leaves it out."""
        frame = frame_of(self.module, computation)
        operand = computation.operand(instruction, index)
        try:
            frame, source, path = follow(self.module, frame, operand)
        except UnknownValueError:
            return None
        if source.opcode != "constant" or path:
            return None
        if "..." not in source.operand_text:
            return source.operand_text
        full = self.constants()
        if full is None or frame.computation.name not in full.computations:
            return None
        written = full[frame.computation.name].instructions.get(source.name)
        return written.operand_text if written and "..." not in written.operand_text else None

    def _reducer(self, name: str, depth: int = 0) -> int:
        """Elementwise FLOPs of one application of a reducer or scatter computation."""
        if name not in self.reducers:
            self.reducers[name] = 0
            computation = self.module[name]
            if depth < _REDUCER_DEPTH:
                self.reducers[name] = sum(
                    elementwise_flops(computation, i, lambda n: self._reducer(n, depth + 1))
                    for i in computation.instructions.values()
                )
        return self.reducers[name]


def _call(
    instruction: HloInstruction, names: tuple[str, ...], *, alternatives: bool = False
) -> Call:
    if not names:
        raise instruction.error(f"{instruction.opcode} without its computation")
    return Call(instruction, tuple((name, 1) for name in names), alternatives)


def _unaccounted(instruction: HloInstruction, name: str, reason: str) -> Unaccounted:
    return Unaccounted(
        name=name,
        where=instruction.op_name or instruction.name,
        shapes=str(instruction.shape),
        reason=reason,
    )
