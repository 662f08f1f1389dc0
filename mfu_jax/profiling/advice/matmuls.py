"""Causes in matmuls: their dtype, their shape, and attention."""

from __future__ import annotations

import math
from collections.abc import Set
from statistics import median
from typing import NamedTuple

from mfu_jax.flops.count import dtype_bits
from mfu_jax.flops.executed.records import InstructionRecord, MatmulShape
from mfu_jax.flops.names import MASKED_PAIRS
from mfu_jax.profiling.advice.stats import (
    ProfileStats,
    largest_names,
    milliseconds,
    record_of,
    seconds_of,
)
from mfu_jax.profiling.attribution.device_times import OpTime

_TILES = {"gpu": 8, "tpu": 128}  # elements: what tensor cores load at once, lanes of an MXU
_WHOLE_TILE, _NEARLY = 128, 1.01  # elements of an output tile; and how much more of one is cheap
_SIZES = ("vocab_size", "emb_dim", "mlp_dim", "moe_mlp_dim", "head_dim", "max_target_length")
_MOST_SIZES = 3
_LARGE = {"cpu": 512, "gpu": 256, "tpu": 256}  # keys beyond which a head's scores leave caches
_WIDEST_HEAD = 256  # elements that attention kernels support
_KERNEL = 0.6  # of the peak: what attention kernels usually reach
# A TPU's two backward kernels (splash attention) recompute scores and their gradient: nine matmuls
# in a forward and backward pass, where autodiff has six.
_TPU_AGAIN = 9 / 6
# Blocks of queries on a CPU: their matmuls are slower, but their scores stay in caches. From gains
# with 512 to 2,048 tokens and heads of 32 to 128: scripts/results/planted_faults.json.
_BLOCK = 128  # queries
_BLOCKED_MATMULS = 0.4  # of what leaving out masked pairs would save
_IN_CACHES = 0.4  # of the time of other ops on the remaining scores
_CACHE_BYTES = 2**20  # per core


def float32(stats: ProfileStats) -> tuple[float, str] | None:
    """Matmuls run in float32 on hardware that is faster in bfloat16."""
    narrow = stats.peaks.by_dtype.get("bf16") if stats.peaks.main.kind == "table" else None
    ops = [op for op in stats.compute() if _is_float32(record_of(op))]
    if narrow is None or not ops:
        return None
    gain = sum(op.seconds - _narrowed(stats, op, narrow) for op in ops)
    gain += _halved_beside(stats, ops)
    rate = min(_rate(stats, record_of(op)) for op in ops)
    return gain, (
        f"matmuls of float32 take {milliseconds(seconds_of(ops))} of a step, {largest_names(ops)}; "
        f"in bfloat16 the peak is {narrow / 1e12:.4g} TFLOP/s, not {rate / 1e12:.4g}, and half the "
        f"bytes are read"
    )


def _rate(stats: ProfileStats, record: InstructionRecord) -> float:
    """FLOP/s at which the hardware multiplies float32: GPUs in TF32, unless precision forbids."""
    if record.shape.is_full_float32 and stats.measured.platform == "gpu" and stats.chip:
        return stats.chip.peak_flops_per_sec("fp32", "highest")
    return stats.peaks.of("f32")


def _halved_beside(stats: ProfileStats, matmuls: list[OpTime]) -> float:
    """Half of the time that other ops spend on float32 activations of the matmuls."""
    state = {array.dims for array in stats.program.costs.state}
    sizes = {size for op in matmuls for size in _float32_sizes(record_of(op), state)}
    gain = 0.0
    for op in stats.compute():
        record = record_of(op)
        wide = [size for size in _float32_sizes(record, state) if size in sizes]
        if wide and not record.flops:
            arrays = (*record.shape.results, *record.shape.operand_arrays)
            bits = sum(math.prod(array.dims) * dtype_bits(array.dtype) for array in arrays)
            gain += op.seconds / 2 * 32 * sum(wide) / bits
    return gain


def _float32_sizes(record: InstructionRecord, state: Set[tuple[int, ...]]) -> list[int]:
    """Elements of each float32 array that an op reads or makes and that is not like a weight."""
    arrays = (*record.shape.results, *record.shape.operand_arrays)
    return [math.prod(a.dims) for a in arrays if a.dtype == "f32" and a.dims not in state]


def _is_float32(record: InstructionRecord) -> bool:
    return 2 * record.flops_by_dtype.get("f32", 0) > record.flops


def _narrowed(stats: ProfileStats, op: OpTime, peak: float) -> float:
    """An op's time in bfloat16, at the same share of its roof: of the peak, or of the bandwidth."""
    record = record_of(op)
    passes = record.shape.passes  # bfloat16 passes, on parts of a float32
    rate = _rate(stats, record) if passes == 1 else peak / passes
    faster = op.seconds * min(1.0, rate / peak)
    moving = stats.moving(op)
    least, halved = op.runs * sum(record.flops_by_dtype.values()) / rate, op.seconds / 2
    is_moving = moving is not None and moving > least
    return halved if is_moving else max(faster, min(halved, (moving or 0.0) / 2))


def odd_shapes(stats: ProfileStats) -> tuple[float, str] | None:
    """Matmuls that do not fill the hardware's tiles and are slower than those that do."""
    tile, slow, usual = _odd_matmuls(stats)
    if not slow:
        return None
    shapes = ", ".join(sorted({_text(_shape(op)) for op in slow})[:3])
    return sum(_odd_gain(stats, op, usual, tile) for op in slow), (
        f"matmuls of {shapes} take {milliseconds(seconds_of(slow))} of a step at "
        f"{sum(map(stats.shortest, slow)) / seconds_of(slow):.0%} of the peak, even shapes reach "
        f"{usual:.0%}; the hardware multiplies tiles of {tile}"
    )


def even_sizes(stats: ProfileStats, _: float) -> str:
    """The next even size of each odd one, by the trainer's key where it has that value."""
    tile, slow, _usual = _odd_matmuls(stats)
    slow.sort(key=lambda op: -op.seconds)
    odd = [dim for op in slow for dim in _shape(op)[1:] if dim > tile and dim % tile]
    widest = (stats.logits or (0,))[-1]  # the vocabulary's, as far as a trace can tell
    keys = {str(widest): _SIZES[0]}
    keys |= {size: key for key in _SIZES if (size := stats.settings.get(key))}
    changed = []
    for dim in [*dict.fromkeys(odd)][:_MOST_SIZES]:
        wide = -(-dim // _WHOLE_TILE) * _WHOLE_TILE  # whole tiles of any library, if nearly free
        even = wide if wide <= _NEARLY * dim else -(-dim // tile) * tile
        key = keys.get(str(dim))
        changed.append(f"{key}={even}" if key else f"a size of {even} in place of {dim}")
    return ", ".join(changed)


def _odd_matmuls(stats: ProfileStats) -> tuple[int, list[OpTime], float]:
    """The tile, the matmuls that would gain by filling it, and what even shapes reach."""
    tile = _TILES.get(stats.measured.platform)
    if tile is None:
        return 0, [], 0.0
    matmuls = [op for op in stats.compute() if record_of(op).shape.matmul and op.seconds]
    odd = [op for op in matmuls if _is_odd(_shape(op), tile)]
    even = [stats.shortest(op) / op.seconds for op in matmuls if not _is_odd(_shape(op), tile)]
    usual = median(even) if even else 0.0
    return tile, [op for op in odd if _odd_gain(stats, op, usual, tile) > 0], usual


def _shape(op: OpTime) -> MatmulShape:
    shape = record_of(op).shape.matmul
    assert shape is not None
    return shape


def _is_odd(shape: MatmulShape, tile: int) -> bool:
    return any(dim > tile and dim % tile for dim in shape[1:])


def _odd_gain(stats: ProfileStats, op: OpTime, usual: float, tile: int) -> float:
    """The gain of filling the tiles and reaching even shapes' share of the peak."""
    if not usual:
        return 0.0
    filled = 1.0
    for dim in _shape(op)[1:]:
        filled *= -(-dim // tile) * tile / dim if dim > tile else 1.0
    return max(0.0, op.seconds - filled * stats.shortest(op) / usual)


def _text(shape: MatmulShape) -> str:
    batch = f"{shape.batch} × " if shape.batch > 1 else ""
    return f"{batch}[{shape.m}, {shape.k}] @ [{shape.k}, {shape.n}]"


class _AttentionScores(NamedTuple):
    """Scores of all query-key pairs, for heads or for groups of heads that share their keys.

    Attributes:
        heads: number of such matrices.
        long: queries of a group, or keys if the matmul is transposed.
        short: the other side; a divisor of `long`.
    """

    heads: int
    long: int
    short: int


def attention(stats: ProfileStats) -> tuple[float, str] | None:
    """Scores of all pairs, masked ones included, are computed and stored."""
    matmuls = {id(op): op for op in stats.compute() if record_of(op).shape.matmul}
    least = _LARGE[stats.measured.platform]
    made = {key: found for key, op in matmuls.items() if (found := _scores(_shape(op), least))}
    scores = set(made.values())
    if not scores or stats.program.costs.executed.attention_kernels:
        return None
    dots = [op for key, op in matmuls.items() if key in made or _reads(_shape(op), scores)]
    beside = [
        op for op in stats.compute() if not record_of(op).flops and _touches(record_of(op), scores)
    ]
    masked = _masked_share(stats, dots)
    width = max(_shape(matmuls[key]).k for key in made)
    largest = max(found.long * found.short for found in scores)
    if stats.is_cpu:
        skipped = masked * (1 - min(1.0, _BLOCK / max(found.short for found in scores)))
        gain = _in_blocks(dots, beside, skipped, largest)
        remedy = "blocks of queries can leave out the keys after them"
    else:
        gain = _in_kernel(stats, dots, beside, masked, width)
        remedy = "an attention kernel, or blocks that skip masked pairs, does neither"
    return gain, (
        f"attention runs as matmuls over all pairs, {milliseconds(seconds_of(dots))} of a step "
        f"({masked:.0%} of the pairs are masked), and its scores go through memory, "
        f"{milliseconds(seconds_of(beside))}: {largest_names(dots + beside)}; {remedy}"
    )


def _in_blocks(dots: list[OpTime], beside: list[OpTime], skipped: float, largest: int) -> float:
    """The gain of blocks that skip masked pairs, on CPUs, which have no attention kernel.

    Args:
        dots: matmuls that make or read scores.
        beside: other ops on scores.
        skipped: the share of pairs in blocks that are masked as a whole.
        largest: the largest number of scores of a head.
    """
    left = (1 - skipped) * (_IN_CACHES if skipped and 4 * largest > _CACHE_BYTES else 1.0)
    return _BLOCKED_MATMULS * skipped * seconds_of(dots) + (1 - left) * seconds_of(beside)


def _in_kernel(
    stats: ProfileStats, dots: list[OpTime], beside: list[OpTime], masked: float, width: int
) -> float:
    """The gain of an attention kernel, for heads of this width."""
    seconds = seconds_of(dots) + seconds_of(beside)
    has_backward = any(record_of(op).phase == "backward" for op in dots)
    again = _TPU_AGAIN if stats.measured.platform == "tpu" and has_backward else 1.0
    kernel = again * (1 - masked) * sum(map(stats.shortest, dots)) / _kernel_share(stats, width)
    return seconds - kernel


def _kernel_share(stats: ProfileStats, width: int) -> float:
    """Share of the peak: heads narrower than a TPU's matrix unit leave part of it idle."""
    unit = stats.chip.matrix_unit if stats.chip else None
    return min(_KERNEL, width / unit) if unit else _KERNEL


def _scores(shape: MatmulShape, least: int) -> _AttentionScores | None:
    """The scores that a matmul computes, of a head or of heads that share keys; else None."""
    short, long = sorted((shape.m, shape.n))
    if shape.batch == 1 or short < least or shape.k >= short or long % short:
        return None
    if long > short and shape.k > _WIDEST_HEAD:  # probably a layer of experts
        return None
    return _AttentionScores(shape.batch, long, short)


def _reads(shape: MatmulShape, scores: set[_AttentionScores]) -> bool:
    """Whether a matmul sums over scores' queries or keys, as for values and gradients."""
    width = min(shape.m, shape.n)
    return any(
        shape.batch == found.heads
        and shape.k in (found.long, found.short)
        and (width <= _WIDEST_HEAD or found.long == found.short)
        for found in scores
    )


def _touches(record: InstructionRecord, scores: set[_AttentionScores]) -> bool:
    """Whether an op reads or writes an array of scores."""
    arrays = (*record.shape.results, *record.shape.operand_arrays)
    return any(_is_of(array.dims, found) for array in arrays for found in scores)


def _is_of(dims: tuple[int, ...], scores: _AttentionScores) -> bool:
    sides = {scores.long, scores.short}
    is_whole = math.prod(dims) == scores.heads * scores.long * scores.short
    return len(dims) > 2 and is_whole and set(dims[-2:]) <= sides


def _masked_share(stats: ProfileStats, dots: list[OpTime]) -> float:
    ledger = stats.program.ledger
    masked = sum(line.flops for line in ledger.lines if line.label == MASKED_PAIRS)
    total = sum(op.runs * record_of(op).flops for op in dots)
    return min(1.0, max(0.0, masked / total)) if total else 0.0
