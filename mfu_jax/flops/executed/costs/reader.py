"""Reads the costs of single HLO instructions, and sums them over a computation."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Mapping
from itertools import compress

from mfu_jax.flops.count import Beyond
from mfu_jax.flops.executed.cost_types import (
    NOTHING,
    ONLY_CALLS,
    ComputationCost,
    InstructionCost,
    MatmulCost,
    unaccounted,
)
from mfu_jax.flops.executed.costs.collectives import (
    KINDS,
    is_further_link,
    read_collective,
)
from mfu_jax.flops.executed.costs.custom_calls import CustomCalls, KernelFlops
from mfu_jax.flops.executed.costs.memory_traffic import Traffic
from mfu_jax.flops.executed.formulas.elementwise import elementwise_flops
from mfu_jax.flops.executed.formulas.factorizations import Iterations, fft_flops
from mfu_jax.flops.executed.formulas.matmuls import (
    MATMULS,
    hardware_passes,
    is_masked_sum,
    operand_dtype,
)
from mfu_jax.flops.executed.formulas.tiles import TritonTiles
from mfu_jax.flops.executed.formulas.tpu_factorizations import TpuFactorizations
from mfu_jax.flops.executed.formulas.vector_matmuls import VectorMatmuls
from mfu_jax.flops.executed.hlo.dataflow import Dataflow
from mfu_jax.flops.executed.hlo.module import CALLEE_KEYS, HloComputation, HloInstruction, HloModule
from mfu_jax.flops.executed.hlo.opcodes import ELEMENTWISE, NO_MATMUL, ONLY_ELEMENTWISE, is_free
from mfu_jax.flops.lengths import Lengths

_REDUCER_DEPTH = 16
# What libtpu 0.0.52 names the calls of computations that a SparseCore runs.
_WRAPPER = re.compile(r"TODO\(b/\d+\)")
_SUMS = ("reduce", "reduce-window")  # of products with a vector


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
        lengths: lengths that are data, if the user gave them.
    """

    def __init__(
        self,
        module: HloModule,
        *,
        kernel_flops: KernelFlops | None,
        trip_counts: Mapping[str, int],
        lengths: Lengths,
    ) -> None:
        self.module = module
        self.dataflow = Dataflow(module)
        self.traffic = Traffic(module)
        self.vector_matmuls = VectorMatmuls(self.dataflow)
        self.tpu_factorizations = TpuFactorizations(module)
        self.triton_tiles = TritonTiles(module)
        self.iterations = Iterations(module)
        self.custom_calls = CustomCalls(self.dataflow, kernel_flops, lengths)
        self.trip_counts = trip_counts
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
        block = self.tpu_factorizations.cost(instruction) if has_part else None
        is_iterated = self.iterations.any and self.iterations.contains(instruction)
        if is_iterated and rule not in (None, CostReader._call):
            cost = NOTHING
        elif block is not None:
            cost = block
        elif rule is not None:
            cost = rule(self, computation, instruction)
        else:
            cost = NOTHING if instruction.opcode in NO_MATMUL else _unknown(instruction)
        elementwise = elementwise_flops(computation, instruction, self._reducer)
        traffic = 0 if fused else self.traffic.bytes(computation, instruction)
        part = self.vector_matmuls.cost(computation, instruction)
        if part is not None and not is_iterated:
            return part._replace(hbm_bytes=traffic, vector_xla=elementwise)
        if not (elementwise or traffic):
            return cost
        return InstructionCost(*cost[:5], elementwise, traffic)

    def _matmul(self, computation: HloComputation, instruction: HloInstruction) -> InstructionCost:
        if is_masked_sum(computation, instruction):
            return NOTHING
        flops = MATMULS[instruction.opcode.removesuffix("-start")](computation, instruction)
        dtype = operand_dtype(computation, instruction)
        passes = hardware_passes(computation, instruction)
        is_dot = instruction.opcode in ("dot", "scaled-dot")
        stated = self.triton_tiles.beyond(computation, instruction) if is_dot else 0
        matmul = MatmulCost(
            instruction,
            flops,
            dtype,
            seen_by_xla=flops,
            passes=passes,
            beyond=Beyond(stated=stated),
        )
        return InstructionCost(matmul)

    def _call(self, computation: HloComputation, instruction: HloInstruction) -> InstructionCost:
        if not instruction.callees:
            raise instruction.error(f"{instruction.opcode} without its computation")
        iterated = self.iterations.at(instruction)
        if iterated is None:
            return ONLY_CALLS
        note = (
            f"{iterated.kernel} {instruction.op_name}: iterates until it converges; counted by the "
            "textbook, and its other instructions once"
        )
        return InstructionCost(iterated, is_call=True, note=note)

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

    def _fft(self, computation: HloComputation, instruction: HloInstruction) -> InstructionCost:
        dtype = computation.operand(instruction, 0).shape.dtype
        flops = fft_flops(computation, instruction)
        return InstructionCost(MatmulCost(instruction, flops, dtype, kernel="fft"))

    def _kernel(self, computation: HloComputation, instruction: HloInstruction) -> InstructionCost:
        target = instruction.attribute_string("custom_call_target")
        if instruction.callees and (instruction.runs_on_host or _WRAPPER.fullmatch(target)):
            return ONLY_CALLS
        return self.custom_calls.cost(computation, instruction)

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


_CostRule = Callable[[CostReader, HloComputation, HloInstruction], InstructionCost]
_OF_OPCODES: dict[str, _CostRule] = {
    **dict.fromkeys(MATMULS, CostReader._matmul),
    **dict.fromkeys(CALLEE_KEYS, CostReader._call),
    **dict.fromkeys(KINDS, CostReader._collective),
    "fft": CostReader._fft,
    "custom-call": CostReader._kernel,
}
_RULES = _OF_OPCODES | {f"{opcode}-start": rule for opcode, rule in _OF_OPCODES.items()}


def _unknown(instruction: HloInstruction) -> InstructionCost:
    """The cost of an opcode without a rule; asynchronous work is counted at its start."""
    opcode = instruction.opcode
    if opcode.endswith(("-done", "-update")) or opcode.removesuffix("-start") in NO_MATMUL:
        return NOTHING
    return InstructionCost(unaccounted=unaccounted(instruction, opcode, "an unknown opcode"))
