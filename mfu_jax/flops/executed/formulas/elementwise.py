"""FLOPs of instructions other than matmuls, by the rules of XLA's HloCostAnalysis.

One FLOP per element of an elementwise result, none for transcendental functions (XLA counts those
separately), and one per element that a reduction removes. Used to explain XLA's own report.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from mfu_jax.flops.executed.formulas.windows import parse_window
from mfu_jax.flops.executed.hlo.module import HloComputation, HloInstruction
from mfu_jax.flops.executed.hlo.opcodes import ELEMENTWISE


def elementwise_flops(
    computation: HloComputation,
    instruction: HloInstruction,
    cost_of: Callable[[str], int],
) -> int:
    """FLOPs of one instruction; 0 for matmuls and for calls of computations other than reducers.

    Args:
        computation: the computation that it is in.
        instruction: any instruction.
        cost_of: FLOPs of one application of a named computation, such as a reducer.
    """
    opcode = instruction.opcode
    if opcode in ELEMENTWISE:
        return instruction.shape.size
    rule = _RULES.get(opcode)
    return rule(computation, instruction, cost_of) if rule else 0


_Cost = Callable[[str], int]


def _applied(instruction: HloInstruction, cost_of: _Cost) -> int:
    return sum(cost_of(name) for name in instruction.computations("to_apply"))


def _reduce(computation: HloComputation, instruction: HloInstruction, cost_of: _Cost) -> int:
    source = computation.operand(instruction, 0).shape.size
    result = next(instruction.shape.leaves()).size
    return max(0, source - result) * _applied(instruction, cost_of)


def _reduce_window(computation: HloComputation, instruction: HloInstruction, cost_of: _Cost) -> int:
    dimensions = parse_window(instruction)
    result = next(instruction.shape.leaves()).size
    source = computation.operand(instruction, 0).shape
    if any(w.size >= n > 1 for w, n in zip(dimensions, source.dims, strict=False)):
        # A cumulative sum, or a reduction that is broadcast back: each element is read once.
        return source.size * _applied(instruction, cost_of)
    window = math.prod(max(0, dimension.size) for dimension in dimensions)
    return max(0, window - 1) * result * _applied(instruction, cost_of)


def _select_and_scatter(
    computation: HloComputation, instruction: HloInstruction, cost_of: _Cost
) -> int:
    window = math.prod(max(0, dimension.size) for dimension in parse_window(instruction))
    select = sum(cost_of(name) for name in instruction.computations("select"))
    scatter = sum(cost_of(name) for name in instruction.computations("scatter"))
    source = computation.operand(instruction, 1).shape.size
    return source * (max(0, window - 1) * select + scatter)


def _map(computation: HloComputation, instruction: HloInstruction, cost_of: _Cost) -> int:
    return instruction.shape.size * _applied(instruction, cost_of)


def _scatter(computation: HloComputation, instruction: HloInstruction, cost_of: _Cost) -> int:
    updates = computation.operand(instruction, 2).shape.size
    return updates * _applied(instruction, cost_of)


def _sort(computation: HloComputation, instruction: HloInstruction, cost_of: _Cost) -> int:
    elements = computation.operand(instruction, 0).shape.size
    return elements * max(0, elements - 1).bit_length()


def _all_reduce(computation: HloComputation, instruction: HloInstruction, cost_of: _Cost) -> int:
    return sum(shape.size for shape in instruction.shape.leaves())


_RULES: dict[str, Callable[[HloComputation, HloInstruction, _Cost], int]] = {
    "reduce": _reduce,
    "reduce-window": _reduce_window,
    "select-and-scatter": _select_and_scatter,
    "map": _map,
    "scatter": _scatter,
    "sort": _sort,
    "all-reduce": _all_reduce,
}
_RULES |= {f"{opcode}-start": rule for opcode, rule in _RULES.items()}
