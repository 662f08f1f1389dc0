"""Attention kernels: their time on a TPU, and those that the executed count lacks.

A TPU's kernel multiplies block by block, and its vector units form the softmax of each product, or
its gradient, before the next matmul can begin: the two do not overlap. Each step of its grid costs
some cycles a matmul besides, also where the mask lets it skip the block. The two constants are
fitted to 16 published times of JAX's splash kernel alone on a v6e, forward and backward, with
blocks of 512 to 2048: each within 6% (attention_kernels.json in scripts/results), as are tokamax's
twelve published times backward on a TPU7x, to which they were not fitted. Neither is fitted to a
step.

A device of a v4 or v5p has two TensorCores. Splash kernels split their heads over them forward.
Backward, where they sum over heads, JAX's and tokamax's declare no dimension of their own as
parallel: `vmap` over sequences adds one, and a single sequence is left to one core. MaxText
measured it on v5p (its #4755): with `sa_bwd_dkv_megacore`, which splits heads, steps over 256K and
1M tokens take 26 to 32% less with one sequence on a device, and as much with four.

If a sequence is split over devices, each device skips different blocks, from a table indexed by
its id. A plan assumes half of all query-key pairs: what causal masks keep on average.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from dataclasses import replace
from typing import NamedTuple

from mfu_jax.flops.attention_kernels import OF_VALUE_WIDTH, AttentionKernel, kernels_named
from mfu_jax.flops.executed.kernels.registry import kernel_name
from mfu_jax.flops.executed.records import ArrayShape, InstructionRecord, ProgramCosts
from mfu_jax.hardware.chips import Chip

_FEWEST_DIMS = 3  # heads, positions, width
_QKV = 3
_FUSED_RESULTS = 3  # gradients of queries, keys and values, all from one kernel
_PAIRS_PER_CYCLE = 636  # whose softmax a TensorCore forms
_CYCLES_PER_MATMUL = 367  # of a step of the grid
# Of the softmax, what a constant maximum leaves forward: tokamax's kernel on a TPU7x reached 1.28
# times the FLOP/s with one, backward the same (gpu-tpu-pedia, Hunyuan3-295B).
_CONSTANT_MAXIMUM = 0.48
_WINDOW = 0.49  # of all pairs: a mask that keeps fewer is a window, to which JAX cuts its grid, too
_UNITS_OF_CORE = 4  # matrix units of a TensorCore, of any generation in hardware.yml


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


def without_own_shortage(costs: ProgramCosts, spare: float) -> ProgramCosts:
    """The costs without what XLA recomputes for want of memory that the run's kernel leaves free.

    Args:
        costs: of a program with JAX's kernel.
        spare: bytes that it holds beyond the run's; what is recomputed must fit into them.
    """
    again = [record for record in costs.records.values() if record.phase == "xla_rematerialized"]
    if not again or sum(record.shape.result_bytes for record in again) > spare:
        return costs
    flops = Counter(costs.executed.by_dtype)
    for record in again:
        flops.subtract({dtype: n * record.runs for dtype, n in record.flops_by_dtype.items()})
    names = {record.name for record in again}
    return replace(
        costs,
        records={name: costs.records[name] for name in costs.records if name not in names},
        executed=replace(costs.executed, by_dtype=flops, xla_rematerialized=0),
    )


class RunsKernel(NamedTuple):
    """Where a run's attention kernel on a TPU is another than JAX's, which a plan compiles.

    tokamax's has a step of its grid only for blocks that the mask keeps; its backward kernel does
    so with ``dq_reduction_steps=3`` (its splash_attention_kernel.py, ``return_dynamic_grid``).

    Attributes:
        constant_maximum: it subtracts a constant instead of each row's maximum.
        skips_forward: its forward kernel has no steps for masked blocks.
        skips_backward: the same of its backward kernel.
        splits_backward: its backward kernel splits heads over a device's TensorCores.
    """

    constant_maximum: bool = False
    skips_forward: bool = False
    skips_backward: bool = False
    splits_backward: bool = False


AS_COMPILED = RunsKernel()


class KernelTime(NamedTuple):
    """What bounds an attention kernel on a TPU.

    Attributes:
        matmul_share: of the matrix units' peak that its matmuls reach: heads narrower than a unit
            leave a part of it idle.
        vector_seconds: in which the matrix units wait.
    """

    matmul_share: float
    vector_seconds: float


def time_on_tpu(
    record: InstructionRecord, flops: int, chip: Chip, runs: RunsKernel, block: int = 1
) -> KernelTime | None:
    """The time of one run of an attention kernel; None for other instructions and chips.

    Args:
        record: the kernel's.
        flops: of its matmuls.
        chip: the chip.
        runs: what the run's kernel does otherwise.
        block: positions of its smallest blocks, if they are larger than compiled.
    """
    rows, unit, cycles_per_sec = _rows(record), chip.matrix_unit, core_cycles_per_sec(chip)
    arrays = _queries_keys_values(record)
    if not (rows and arrays and unit and cycles_per_sec):
        return None
    queries, keys, values = arrays
    products = _row(rows, record.shape.results).products
    widths = [
        values.dims[-1] if product in OF_VALUE_WIDTH else queries.dims[-1] for product in products
    ]
    filled = sum(math.ceil(width / unit) * unit for width in widths)
    pairs = flops / (2 * sum(widths))
    heads = math.prod(queries.dims[:-2])
    fewest = heads * math.prod(math.ceil(array.dims[-2] / block) for array in (queries, keys))
    steps: float = min(_grid_steps(record, heads), fewest)
    is_forward = "O" in products
    kept = pairs / (math.prod(queries.dims[:-1]) * keys.dims[-2])
    if (runs.skips_forward if is_forward else runs.skips_backward) and kept > _WINDOW:
        steps *= kept
    if runs.constant_maximum and is_forward:
        pairs *= _CONSTANT_MAXIMUM
    cycles = pairs / _PAIRS_PER_CYCLE + steps * len(products) * _CYCLES_PER_MATMUL
    is_split = is_forward or runs.splits_backward or "splash" not in _name(record)
    busy = 1.0 if is_split else _busy_cores(math.prod(queries.dims[:-3]), _cores(chip))
    return KernelTime(busy * sum(widths) / filled, cycles / cycles_per_sec / busy)


def _busy_cores(sequences: int, cores: int) -> float:
    """The share of a device's cores that work where each takes whole sequences."""
    return sequences / (cores * math.ceil(sequences / cores))


def core_cycles_per_sec(chip: Chip) -> float:
    """Cycles per second of all TensorCores of a TPU; 0 if its clock or its units are not known."""
    return (chip.clock_ghz or 0.0) * 1e9 * _cores(chip)


def _cores(chip: Chip) -> int:
    """TensorCores of one device; 0 if its clock or its units are not known."""
    unit, clock = chip.matrix_unit, (chip.clock_ghz or 0.0) * 1e9
    if not (unit and clock):
        return 0
    peak = chip.peak_flops_per_sec("bf16")
    return round(peak / (2 * unit * unit * _UNITS_OF_CORE * clock)) or 1


def _grid_steps(record: InstructionRecord, heads: int) -> int:
    """Steps of a splash kernel; the model was not fitted to others.

    If its body was not walked: its first operands are tables [heads, blocks, blocks] of them.
    """
    if record.grid_steps and "splash" in _name(record):
        return record.grid_steps
    tables = itertools.takewhile(
        lambda array: array.dtype.startswith(("s", "u")), record.shape.operand_arrays
    )
    sizes = (math.prod(table.dims[-2:]) for table in tables if len(table.dims) == _FEWEST_DIMS)
    return heads * max(sizes, default=0)


def _rows(record: InstructionRecord) -> tuple[AttentionKernel, ...]:
    return kernels_named(_name(record))


def _name(record: InstructionRecord) -> str:
    return kernel_name(record.op_name, record.name)


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
