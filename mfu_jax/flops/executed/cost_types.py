"""Costs of one run: of a matmul, a collective, an instruction, a computation.

`InstructionCost` is the record that everything built on a compiled program reads: FLOPs, HBM bytes,
the collective, and the computations that the instruction calls.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from mfu_jax.flops.count import NOTHING_BEYOND, Beyond, Unaccounted
from mfu_jax.flops.executed.hlo.module import HloInstruction


@dataclass(frozen=True, kw_only=True)
class Collective:
    """One collective of the program.

    Attributes:
        kind: its opcode, such as ``all-gather``; ``reduce-scatter`` for an all-reduce of which
            each device keeps only a slice.
        bytes: bytes of its whole buffer on one device: the gathered or unreduced side.
        group_size: devices in one group; 0 if the text does not say.
        op_name: JAX's name stack of the operation.
        times: runs per step.
    """

    kind: str
    bytes: int
    group_size: int
    op_name: str = ""
    times: int = 1


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
        beyond: what the hardware runs in addition.
        grid_steps: of a kernel whose body was walked.
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
    beyond: Beyond = NOTHING_BEYOND
    grid_steps: int = 0


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


NOTHING = InstructionCost()
ONLY_CALLS = InstructionCost(is_call=True)


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


def unaccounted(instruction: HloInstruction, name: str, reason: str) -> Unaccounted:
    """Work of one instruction that cannot be counted."""
    return Unaccounted(
        name=name,
        where=instruction.op_name or instruction.name,
        shapes=str(instruction.shape),
        reason=reason,
    )
