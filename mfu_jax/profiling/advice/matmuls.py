"""Causes in matmuls: their dtype, their shape, and attention."""

from __future__ import annotations

from statistics import median

from mfu_jax.flops.executed.instruction_costs import InstructionRecord
from mfu_jax.flops.executed.instruction_shapes import MatmulShape
from mfu_jax.profiling.advice.facts import (
    Facts,
    largest_names,
    milliseconds,
    record_of,
    seconds_of,
)
from mfu_jax.profiling.measured import OpTime

_TILES = {"gpu": 8, "tpu": 128}  # elements: what tensor cores load at once, lanes of an MXU
_LARGE = 256  # keys and queries from which on scores are worth a kernel
_KERNEL = 0.6  # of the peak, that attention kernels usually reach
_MASKED = "masked pairs"


def float32(facts: Facts) -> tuple[float, str] | None:
    """Matmuls of float32 where the hardware is faster in bfloat16."""
    narrow = facts.peaks.bfloat16
    ops = [op for op in facts.compute() if _is_float32(record_of(op))]
    if narrow is None or not ops:
        return None
    gain = sum(op.seconds - _narrowed(facts, op, narrow) for op in ops)
    return gain, (
        f"matmuls of float32 take {milliseconds(seconds_of(ops))} of a step, {largest_names(ops)}; "
        f"in bfloat16 the peak is {narrow / 1e12:.4g} TFLOP/s instead of "
        f"{facts.peaks.of('f32') / 1e12:.4g}, and half the bytes are read; cast the operands, or "
        f"look for what promotes them"
    )


def _is_float32(record: InstructionRecord) -> bool:
    return 2 * record.flops_by_dtype.get("f32", 0) > record.flops


def _narrowed(facts: Facts, op: OpTime, peak: float) -> float:
    """The time with the same share of the other roof: of the peak, or of the bandwidth."""
    faster = op.seconds * min(1.0, facts.peaks.of("f32") / peak)
    moving = facts.moving(op)
    least, halved = facts.shortest(op), op.seconds / 2
    is_moving = moving is not None and moving > least
    return halved if is_moving else max(faster, min(halved, (moving or 0.0) / 2))


def odd_shapes(facts: Facts) -> tuple[float, str] | None:
    """Matmuls that do not fill the hardware's tiles, and are slower than those that do."""
    tile = _TILES.get(facts.measured.platform)
    if tile is None:
        return None
    matmuls = [op for op in facts.compute() if record_of(op).shape.matmul and op.seconds]
    odd = [op for op in matmuls if _is_odd(_shape(op), tile)]
    even = [facts.shortest(op) / op.seconds for op in matmuls if not _is_odd(_shape(op), tile)]
    usual = median(even) if even else 0.0
    gains = {id(op): _odd_gain(facts, op, usual, tile) for op in odd}
    slow = [op for op in odd if gains[id(op)] > 0]
    if not slow:
        return None
    shapes = ", ".join(sorted({_text(_shape(op)) for op in slow})[:3])
    return sum(gains.values()), (
        f"matmuls of {shapes} take {milliseconds(seconds_of(slow))} of a step at "
        f"{sum(map(facts.shortest, slow)) / seconds_of(slow):.0%} of the peak, those of even "
        f"shapes reach {usual:.0%}; round the odd dimension, usually the vocabulary, up to a "
        f"multiple of {tile}"
    )


def _shape(op: OpTime) -> MatmulShape:
    shape = record_of(op).shape.matmul
    assert shape is not None
    return shape


def _is_odd(shape: MatmulShape, tile: int) -> bool:
    return any(dim > tile and dim % tile for dim in shape[1:])


def _odd_gain(facts: Facts, op: OpTime, usual: float, tile: int) -> float:
    """Against the share of the peak that even shapes reach, with the tiles filled up."""
    if not usual:
        return 0.0
    filled = 1.0
    for dim in _shape(op)[1:]:
        filled *= -(-dim // tile) * tile / dim if dim > tile else 1.0
    return max(0.0, op.seconds - filled * facts.shortest(op) / usual)


def _text(shape: MatmulShape) -> str:
    batch = f"{shape.batch} × " if shape.batch > 1 else ""
    return f"{batch}[{shape.m}, {shape.k}] @ [{shape.k}, {shape.n}]"


def attention(facts: Facts) -> tuple[float, str] | None:
    """Scores of all pairs are computed and kept, masked ones included."""
    dots = [op for op in facts.compute() if _scores(record_of(op))]
    sizes = {_scores(record_of(op)) for op in dots}
    if not dots or facts.program.costs.executed.attention_kernels:
        return None
    beside = [
        op for op in facts.compute() if not record_of(op).flops and _touches(record_of(op), sizes)
    ]
    all_dots = dots + [
        op for op in facts.compute() if op not in dots and _reads_scores(record_of(op), sizes)
    ]
    masked = _masked_share(facts, all_dots)
    kernel = (1 - masked) * sum(map(facts.shortest, all_dots)) / _KERNEL
    return seconds_of(all_dots) + seconds_of(beside) - kernel, (
        f"attention runs as matmuls over all pairs, {milliseconds(seconds_of(all_dots))} of a step "
        f"({masked:.0%} of the pairs are masked), and its scores go through memory, "
        f"{milliseconds(seconds_of(beside))}: {largest_names(all_dots + beside)}; an attention "
        f"kernel, or blocks that skip masked pairs, does neither"
    )


def _scores(record: InstructionRecord) -> tuple[int, int] | None:
    """Queries and keys, if the matmul makes a square of scores for every head."""
    shape = record.shape.matmul
    if shape is None or shape.batch == 1 or shape.m != shape.n or shape.m < _LARGE:
        return None
    return (shape.m, shape.n) if shape.k < shape.m else None


def _reads_scores(record: InstructionRecord, sizes: set[tuple[int, int] | None]) -> bool:
    shape = record.shape.matmul
    return shape is not None and shape.batch > 1 and (shape.k, shape.k) in sizes


def _touches(record: InstructionRecord, sizes: set[tuple[int, int] | None]) -> bool:
    arrays = (*record.shape.results, *record.shape.operand_arrays)
    return any(len(array.dims) > 2 and array.dims[-2:] in sizes for array in arrays)


def _masked_share(facts: Facts, dots: list[OpTime]) -> float:
    ledger = facts.program.ledger
    masked = sum(line.flops for line in ledger.lines if line.label == _MASKED)
    total = sum(op.runs * record_of(op).flops for op in dots)
    return min(1.0, max(0.0, masked / total)) if total else 0.0
