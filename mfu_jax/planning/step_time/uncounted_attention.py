"""Attention kernels missing from the executed count: those whose blocks depend on the device.

If a sequence is split over devices, each device skips different blocks, from a table indexed by
its id. A plan assumes half of all query-key pairs: what causal masks keep on average.
"""

from __future__ import annotations

import math
from collections import Counter

from mfu_jax.flops.attention_kernels import OF_VALUE_WIDTH, AttentionKernel, kernels_named
from mfu_jax.flops.executed.kernels.registry import kernel_name
from mfu_jax.flops.executed.records import ArrayShape, InstructionRecord, ProgramCosts

_FEWEST_DIMS = 3  # heads, positions, width
_QKV = 3
_FUSED_RESULTS = 3  # gradients of queries, keys and values, all from one kernel


def executed_by_dtype(costs: ProgramCosts) -> Counter[str]:
    """Executed FLOPs of a step by dtype, including these kernels."""
    flops = Counter(costs.executed.by_dtype)
    for record in costs.records.values():
        for dtype, guessed in half_of_all_pairs(record).items():
            flops[dtype] += guessed * record.runs
    return flops


def half_of_all_pairs(record: InstructionRecord) -> dict[str, int]:
    """FLOPs by dtype of an uncounted attention kernel; empty for other instructions."""
    rows = _rows(record) if record.unaccounted else ()
    arrays = _queries_keys_values(record)
    if not rows or not arrays:
        return {}
    queries, keys, values = arrays
    pairs = math.prod(queries.dims[:-1]) * keys.dims[-2]
    widths = {True: values.dims[-1], False: queries.dims[-1]}
    products = _row(rows, record.shape.results).products
    flops = sum(2 * pairs * widths[product in OF_VALUE_WIDTH] for product in products) // 2
    return {queries.dtype: flops}


def head_width(record: InstructionRecord) -> int | None:
    """Head width of an attention kernel's values; None for other instructions."""
    arrays = _queries_keys_values(record) if _rows(record) else ()
    return arrays[2].dims[-1] if arrays else None


def _rows(record: InstructionRecord) -> tuple[AttentionKernel, ...]:
    return kernels_named(kernel_name(record.op_name, record.name))


def _queries_keys_values(record: InstructionRecord) -> tuple[ArrayShape, ...]:
    """The first three operands that may be queries, keys, values; empty if there are fewer."""
    arrays = [a for a in record.shape.operand_arrays if len(a.dims) >= _FEWEST_DIMS]
    floats = tuple(a for a in arrays if a.dtype.startswith(("bf", "f")))
    return floats[:3] if len(floats) >= _QKV else ()


def _row(rows: tuple[AttentionKernel, ...], results: tuple[ArrayShape, ...]) -> AttentionKernel:
    """The kernel of a shared name: only the fused one returns the gradients of all three."""
    gradients = [array for array in results if len(array.dims) >= _FEWEST_DIMS]
    fused = [row for row in rows if "dQ" in row.products] if len(rows) > 1 else []
    if fused and len(gradients) >= _FUSED_RESULTS:
        return fused[0]
    return next((row for row in rows if row not in fused), rows[0])
