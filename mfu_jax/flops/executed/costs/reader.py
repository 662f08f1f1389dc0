"""Costs of single HLO instructions, and their sum over a computation.

`InstructionCost` is the record that everything built on a compiled program reads: FLOPs, HBM bytes,
the collective, and the computations that the instruction calls.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping
from itertools import compress
from typing import NamedTuple

from mfu_jax.flops.attention_kernels import BESIDE_KERNELS, is_attention
from mfu_jax.flops.count import Unaccounted
from mfu_jax.flops.executed.costs.collectives import (
    KINDS,
    Collective,
    is_further_link,
    read_collective,
)
from mfu_jax.flops.executed.costs.device_means import device_mean
from mfu_jax.flops.executed.costs.hbm import Traffic
from mfu_jax.flops.executed.costs.literals import Literals
from mfu_jax.flops.executed.formulas.elementwise import elementwise_flops
from mfu_jax.flops.executed.formulas.factorizations import FACTORIZATIONS
from mfu_jax.flops.executed.formulas.iterations import Iterations
from mfu_jax.flops.executed.formulas.matmuls import MATMULS, hardware_passes, operand_dtype
from mfu_jax.flops.executed.formulas.tpu_factorizations import Expansions, Part
from mfu_jax.flops.executed.formulas.vector_matmuls import VectorMatmuls
from mfu_jax.flops.executed.hlo.dataflow import Dataflow
from mfu_jax.flops.executed.hlo.module import CALLEE_KEYS, HloComputation, HloInstruction, HloModule
from mfu_jax.flops.executed.hlo.opcodes import ELEMENTWISE, NO_MATMUL, ONLY_ELEMENTWISE, is_free
from mfu_jax.flops.executed.hlo.text import ELIDED
from mfu_jax.flops.executed.kernels import KernelCall, KernelCost, UnknownCost, kernel_cost
from mfu_jax.flops.lengths import Lengths

KernelFlops = Mapping[str, int] | Callable[[KernelCall], int | None]

_REDUCER_DEPTH = 16
_SUMS = ("reduce", "reduce-window")  # of products with a vector


class MatmulCost(NamedTuple):
    """Matmul FLOPs of one instruction.

    Attributes:
        instruction: the instruction.
        flops: 2·m·n·k of every contraction in it.
        dtype: the operands' dtype, the wider one if they differ.
        rematerialized: the part that recomputes forward results.
        kernel: name of the custom kernel that runs them; empty for XLA's own matmuls.
        seen_by_xla: FLOPs that XLA's cost analysis reports for the instruction.
        is_attention: whether an attention kernel runs it, or JAX does so beside the kernel.
        is_vector: whether it is a multiplication and a sum, for vector units.
        passes: the lower-precision passes that it runs as, such as ``bf16_x6``.
        padding: the part spent on rows of a kernel's tiles whose results are cut off.
    """

    instruction: HloInstruction
    flops: int
    dtype: str
    rematerialized: int = 0
    kernel: str = ""
    seen_by_xla: int = 0
    is_attention: bool = False
    is_vector: bool = False
    passes: str = ""
    padding: int = 0

    @property
    def spent(self) -> tuple[HloInstruction, int, int]:
        """What `padding.wasted` needs."""
        return self.instruction, self.flops, self.padding


class InstructionCost(NamedTuple):
    """Cost of one run of one HLO instruction, without the computations that it calls.

    Attributes:
        matmul: its matmul FLOPs.
        is_call: whether it runs other computations: a fusion, call, ``while`` or ``conditional``.
        collective: the collective that it starts.
        unaccounted: work whose FLOPs are unknown.
        note: a choice that the reader of the count should know about.
        elementwise: FLOPs of everything else, by the rules of XLA's cost analysis.
        hbm_bytes: bytes read from and written to HBM; 0 inside a fusion.
        vector_xla: what XLA reports for an instruction that is part of a matmul on vector units.
    """

    matmul: MatmulCost | None = None
    is_call: bool = False
    collective: Collective | None = None
    unaccounted: Unaccounted | None = None
    note: str = ""
    elementwise: int = 0
    hbm_bytes: int = 0
    vector_xla: int = 0


_NOTHING = InstructionCost()
_ONLY_CALLS = InstructionCost(is_call=True)


class ComputationCost(NamedTuple):
    """Sum of the `InstructionCost`s of one computation, for one run; `calls` run others."""

    matmuls: tuple[MatmulCost, ...]
    calls: tuple[HloInstruction, ...]
    unaccounted: tuple[Unaccounted, ...]
    collectives: tuple[Collective, ...]
    notes: tuple[str, ...]
    elementwise: int
    hbm_bytes: int
    vector_xla: int


@functools.lru_cache(maxsize=1024)
def _only_elementwise(flops: int) -> ComputationCost:
    """The cost of most fused computations."""
    return ComputationCost((), (), (), (), (), flops, 0, 0)


def _sum(
    instructions: list[HloInstruction], costs: list[InstructionCost], elementwise: int
) -> ComputationCost:
    """The sum of `costs`, and of `elementwise` FLOPs of instructions without a record."""
    if not costs:
        return _only_elementwise(elementwise)
    matmuls, is_call, collectives, unknown, notes, flops, traffic, vector_xla = zip(
        *costs, strict=True
    )
    return ComputationCost(
        matmuls=tuple(filter(None, matmuls)),
        calls=tuple(compress(instructions, is_call)),
        unaccounted=tuple(filter(None, unknown)),
        collectives=tuple(filter(None, collectives)),
        notes=tuple(filter(None, notes)),
        elementwise=elementwise + sum(flops),
        hbm_bytes=sum(traffic),
        vector_xla=sum(vector_xla),
    )


class CostReader:
    """Reads the costs of a program, with what the user knows about kernels and loops.

    Args:
        module: the program.
        kernel_flops: FLOPs of custom kernels, as `executed_flops` takes them.
        trip_counts: iterations of loops, by the name or op_name of the ``while``.
        constants: returns the same program with its large constants written out, or None.
        lengths: lengths that are data, if the user gave them.
    """

    def __init__(
        self,
        module: HloModule,
        *,
        kernel_flops: KernelFlops | None,
        trip_counts: Mapping[str, int],
        constants: Callable[[], HloModule | None],
        lengths: Lengths,
    ) -> None:
        self.module = module
        self.dataflow = Dataflow(module)
        self.traffic = Traffic(module)
        self.vector_matmuls = VectorMatmuls(self.dataflow)
        self.expansions = Expansions(module)
        self.iterations = Iterations(module)
        self.kernel_flops = kernel_flops
        self.trip_counts = trip_counts
        self.constants = constants
        self.literals = Literals(self.dataflow, constants)
        self.lengths = lengths
        self.reducers: dict[str, int] = {}

    def computation_cost(self, computation: HloComputation, *, fused: bool) -> ComputationCost:
        """Cost of one run of a computation, without the computations that it calls.

        Args:
            computation: the computation.
            fused: whether it is inside a fusion, and so has no HBM traffic.
        """
        if fused and computation.elementwise is not None:
            return _only_elementwise(computation.elementwise)
        instructions = list(computation.instructions.values())
        elementwise = 0
        if fused and not self.vector_matmuls.parts(computation):
            simple = [i for i in instructions if i.opcode in ELEMENTWISE]
            elementwise = sum([i.shape.size for i in simple])
            instructions = [i for i in instructions if i.opcode not in ONLY_ELEMENTWISE]
        else:
            instructions = [i for i in instructions if not is_free(i.opcode)]
        costs = [self.instruction_cost(computation, i, fused=fused) for i in instructions]
        return _sum(instructions, costs, elementwise)

    def instruction_cost(
        self, computation: HloComputation, instruction: HloInstruction, *, fused: bool
    ) -> InstructionCost:
        """Cost of one run of an instruction of `computation`; `fused` as in `computation_cost`."""
        rule = _RULES.get(instruction.opcode)
        has_part = rule or instruction.opcode in _SUMS
        expansion = self.expansions.part(instruction) if has_part else None
        is_iterated = self.iterations.any and self.iterations.contains(instruction)
        if is_iterated and rule not in (None, CostReader._call):
            cost = _NOTHING
        elif expansion is not None:
            cost = self._expansion(computation, instruction, expansion)
        elif rule is not None:
            cost = rule(self, computation, instruction)
        else:
            cost = _NOTHING if instruction.opcode in NO_MATMUL else _unknown(instruction)
        elementwise = elementwise_flops(computation, instruction, self._reducer)
        traffic = 0 if fused else self.traffic.bytes(computation, instruction)
        part = self.vector_matmuls.part(computation, instruction)
        if part is None or is_iterated:
            if not (elementwise or traffic):
                return cost
            return InstructionCost(*cost[:5], elementwise, traffic)
        beside = BESIDE_KERNELS in instruction.op_name
        matmul = MatmulCost(
            instruction,
            part.flops,
            part.dtype,
            is_attention=beside,
            is_vector=True,
            passes=part.passes,
        )
        return InstructionCost(
            matmul=matmul if part.flops else None, hbm_bytes=traffic, vector_xla=elementwise
        )

    def _matmul(self, computation: HloComputation, instruction: HloInstruction) -> InstructionCost:
        flops = MATMULS[instruction.opcode.removesuffix("-start")](computation, instruction)
        dtype = operand_dtype(computation, instruction)
        passes = hardware_passes(computation, instruction)
        matmul = MatmulCost(instruction, flops, dtype, seen_by_xla=flops, passes=passes)
        return InstructionCost(matmul)

    def _call(self, computation: HloComputation, instruction: HloInstruction) -> InstructionCost:
        if not instruction.callees:
            raise instruction.error(f"{instruction.opcode} without its computation")
        iterated = self.iterations.at(instruction)
        if iterated is None:
            return _ONLY_CALLS
        name, flops, dtype = iterated
        note = (
            f"{name} {instruction.op_name}: iterates until it converges; counted by the textbook, "
            "and its other instructions once"
        )
        return InstructionCost(
            MatmulCost(instruction, flops, dtype, kernel=name), is_call=True, note=note
        )

    def given_trip_count(self, instruction: HloInstruction) -> int | None:
        """Iterations that the user gave for a ``while``, if any."""
        for name, times in self.trip_counts.items():
            if name in (instruction.name, instruction.op_name):
                return times
        return None

    def _collective(
        self, computation: HloComputation, instruction: HloInstruction
    ) -> InstructionCost:
        if is_further_link(computation, instruction):
            return InstructionCost()
        op_name = instruction.op_name
        collective = read_collective(self.module, computation, instruction, op_name)
        return InstructionCost(collective=collective)

    def _factorization(
        self, computation: HloComputation, instruction: HloInstruction
    ) -> InstructionCost:
        flops = FACTORIZATIONS[instruction.opcode.removesuffix("-start")](computation, instruction)
        dtype = computation.operand(instruction, 0).shape.dtype
        return InstructionCost(MatmulCost(instruction, flops, dtype, kernel=instruction.opcode))

    def _expansion(
        self, computation: HloComputation, instruction: HloInstruction, part: Part
    ) -> InstructionCost:
        if part.flops is None:
            reason = "the sizes of its blocks do not say the matrix's"
            return InstructionCost(unaccounted=unaccounted(instruction, part.name, reason))
        if not part.flops:
            return _NOTHING
        return InstructionCost(
            MatmulCost(
                instruction,
                part.flops,
                computation.operand(instruction, 0).shape.dtype,
                kernel=part.name,
                seen_by_xla=part.seen_by_xla,
            )
        )

    def _kernel(self, computation: HloComputation, instruction: HloInstruction) -> InstructionCost:
        if instruction.runs_on_host and instruction.callees:
            return _ONLY_CALLS
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
        if not (cost.flops or cost.seen_by_xla):
            return InstructionCost(note=cost.note)
        matmul = MatmulCost(
            instruction=instruction,
            flops=cost.flops,
            dtype=cost.dtype or call.dtype,
            rematerialized=cost.rematerialized,
            kernel="" if cost.seen_by_xla == cost.flops else call.name,
            seen_by_xla=cost.seen_by_xla,
            is_attention=is_attention(call.target) or is_attention(call.name),
            padding=cost.padding,
        )
        return InstructionCost(matmul, note=cost.note)

    def _cost_by_devices(self, call: KernelCall) -> KernelCost | UnknownCost:
        """The cost of a kernel; the mean over all devices if their tables differ."""
        self.literals.choose(0)
        cost = kernel_cost(call)
        differing = sorted(self.literals.by_device)
        if not differing or isinstance(cost, UnknownCost):
            return cost
        devices = self.module.header_int("num_partitions")
        return device_mean(call, differing, devices, self.literals.choose)

    def _given_cost(self, call: KernelCall, cost: UnknownCost) -> KernelCost | UnknownCost:
        """The cost that the caller gave as `kernel_flops`, else the kernel author's estimate."""
        if callable(self.kernel_flops):
            flops = self.kernel_flops(call)
        else:
            given = self.kernel_flops or {}
            flops = given.get(call.name, given.get(call.target))
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

    def _reducer(self, name: str, depth: int = 0) -> int:
        """Elementwise FLOPs of one application of a reducer or scatter computation."""
        if name not in self.reducers:
            computation = self.module[name]
            self.reducers[name] = computation.elementwise or 0
            if computation.elementwise is None and depth < _REDUCER_DEPTH:
                self.reducers[name] = sum(
                    elementwise_flops(computation, i, lambda n: self._reducer(n, depth + 1))
                    for i in computation.instructions.values()
                )
        return self.reducers[name]


_Rule = Callable[[CostReader, HloComputation, HloInstruction], InstructionCost]
_OF_OPCODES: dict[str, _Rule] = {
    **dict.fromkeys(MATMULS, CostReader._matmul),
    **dict.fromkeys(CALLEE_KEYS, CostReader._call),
    **dict.fromkeys(KINDS, CostReader._collective),
    **dict.fromkeys(FACTORIZATIONS, CostReader._factorization),
    "custom-call": CostReader._kernel,
}
_RULES = _OF_OPCODES | {f"{opcode}-start": rule for opcode, rule in _OF_OPCODES.items()}


def _unknown(instruction: HloInstruction) -> InstructionCost:
    """The cost of an opcode without a rule; asynchronous work is counted at its start."""
    opcode = instruction.opcode
    if opcode.endswith(("-done", "-update")) or opcode.removesuffix("-start") in NO_MATMUL:
        return _NOTHING
    return InstructionCost(unaccounted=unaccounted(instruction, opcode, "an unknown opcode"))


def unaccounted(instruction: HloInstruction, name: str, reason: str) -> Unaccounted:
    """Work of one instruction that cannot be counted."""
    return Unaccounted(
        name=name,
        where=instruction.op_name or instruction.name,
        shapes=str(instruction.shape),
        reason=reason,
    )
