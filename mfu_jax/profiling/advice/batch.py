"""Batches so small that most of a step would take just as long with a larger one."""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Sequence
from statistics import median

from mfu_jax.flops.count import dtype_bits
from mfu_jax.flops.executed.records import ArrayShape
from mfu_jax.host_work import HostWork
from mfu_jax.profiling.advice.stats import (
    FULL,
    ProfileStats,
    milliseconds,
    record_of,
    seconds_of,
)
from mfu_jax.profiling.attribution.device_times import OpTime
from mfu_jax.profiling.join.ops import DeviceWork

_LARGER = 8  # times the batch
_FEW_ROWS = {"cpu": 16, "gpu": 128, "tpu": 128}  # rows that make a matmul worth its weights
_BELOW = 0.5  # of the peak
_LARGE = 0.01  # of the largest weights: smaller ones may be as large as activations by chance
_LITTLE = 0.1  # of a kernel's time, for its bytes: the rest is what every kernel takes
_SHORT = 5e-6  # seconds
_MOST = 1 / 3  # share of a step that must be independent of the batch


def small_batch(stats: ProfileStats) -> tuple[float, str] | None:
    """Time that does not grow with the batch: thin matmuls, the optimizer, dispatch.

    An accelerator's optimizer alone may be enough. A CPU's often takes this much in small models.
    """
    weights = _weights(stats)
    thin = [op for op in stats.compute() if _is_thin(stats, op, weights)]
    updates = [op for op in stats.measured.ops if _is_on_weights(op, weights)]
    if not thin and stats.is_cpu:
        return None
    fixed = _fixed_seconds(stats, updates)
    shared = seconds_of(updates) + stats.idle_time[HostWork.DISPATCH] + fixed
    gain = shared * (1 - 1 / _LARGER) + sum(_thin_gain(stats, op) for op in thin)
    if gain < _MOST * (1 - 1 / _LARGER) * stats.step or not (thin or updates):
        return None
    rows = min(map(_rows, thin), default=0)
    least = milliseconds(sum(map(stats.shortest, thin)))
    took = milliseconds(seconds_of(thin))
    narrow = f"matmuls as thin as {rows} take {took}, at the peak {least}; " if thin else ""
    launches = f"starting kernels takes another {milliseconds(fixed)}; " if fixed else ""
    return gain, (
        f"{narrow}{launches}what reads or makes arrays as large as weights takes "
        f"{milliseconds(seconds_of(updates))}, whatever the batch; the gain is that of "
        f"{_LARGER} times the batch, per batch of today"
    )


def larger_batch(stats: ProfileStats, _: float) -> str:
    """The batch that the memory allows, of which only the activations grow; eight times at most."""
    used, limit = stats.memory_used, stats.memory_limit
    growing, times = (stats.program.dump.memory or {}).get("temp_size_in_bytes", 0), 2.0
    if used and limit and growing:
        times = min(_LARGER, 1 + (FULL * limit - used) // growing)
    if times < 2:
        return "a larger batch, for which remat_policy=full may make room: twice does not fit"
    now = stats.settings.get("per_device_batch_size", "")
    if not now.replace(".", "", 1).isdecimal():
        return f"a batch {times:g} times as large ({times:g} × per_device_batch_size)"
    return f"per_device_batch_size={float(now) * times:g}, {times:g} times as large"


def _fixed_seconds(stats: ProfileStats, counted: Sequence[OpTime]) -> float:
    """What other kernels of a GPU take before they do anything: the time of the smallest ones."""
    if stats.measured.platform != "gpu":
        return 0.0
    ops = [op for op in stats.compute() if op.runs]
    idle = [op for op in ops if not record_of(op).flops and _moves_little(stats, op)]
    if not idle:
        return 0.0
    each = median(op.seconds / op.runs for op in idle)
    already = {id(op) for op in counted}
    return sum(op.runs * min(each, op.seconds / op.runs) for op in ops if id(op) not in already)


def _moves_little(stats: ProfileStats, op: OpTime) -> bool:
    moving = stats.moving(op)
    return moving is not None and moving < _LITTLE * op.seconds and op.seconds < _SHORT * op.runs


def _thin_gain(stats: ProfileStats, op: OpTime) -> float:
    """What a weight-bound matmul saves per batch if its weights are read once for several batches.

    That takes as long as today, or as the matmuls of all batches at the peak, if that is longer.
    """
    return op.seconds - max(op.seconds / _LARGER, stats.shortest(op))


Weights = dict[tuple[str, int], set[tuple[int, ...]]]
"""The dimensions of weights and moments by dtype and number of elements; empty for bytes."""


def _weights(stats: ProfileStats) -> Weights:
    """The weights and moments, whole, by layer, and as bytes.

    A TPU copies parts of them to its vector memory as bytes.
    """
    found: Weights = {}
    for array in stats.program.costs.state:
        for dims in map(_without_ones, (array.dims, array.dims[1:])):
            if len(dims) > 1:
                found.setdefault((array.dtype, math.prod(dims)), set()).add(dims)
    largest = max((size for _, size in found), default=0)
    found = {key: dims for key, dims in found.items() if key[1] >= _LARGE * largest}
    as_bytes = {("s8", size * dtype_bits(dtype) // 8) for dtype, size in found}
    return {key: set() for key in as_bytes} | found


def _is_like(array: ArrayShape, weights: Weights) -> bool:
    """Whether an array may be a weight, possibly transposed or with split or merged dimensions.

    An activation may have as many elements by chance: [64, 256] is not a [128, 128] weight.
    """
    forms = weights.get((array.dtype, math.prod(array.dims)))
    if forms is None:
        return False
    dims = _without_ones(array.dims)
    return not forms or any(_is_form(dims, form) for form in forms)


def _is_form(dims: Sequence[int], form: Sequence[int]) -> bool:
    bounds = _bounds(dims)
    orders = itertools.permutations(form)
    return any(of <= bounds or bounds <= of for of in map(_bounds, orders))


def _bounds(dims: Sequence[int]) -> set[int]:
    """Cumulative products of dimensions: splitting a dimension adds some, merging removes some."""
    return set(itertools.accumulate(dims, operator.mul))


def _without_ones(dims: Sequence[int]) -> tuple[int, ...]:
    return tuple(dim for dim in dims if dim > 1)


def _is_on_weights(op: OpTime, weights: Weights) -> bool:
    """Whether an op reads, makes or copies weight-like arrays, or one layer's, without matmuls.

    This includes the loop over the layers, whose own time goes to passing its arrays on.
    """
    record = op.op.start or op.op.record
    if record is None or op.op.work not in (
        DeviceWork.COMPUTE,
        DeviceWork.CONTROL,
        DeviceWork.TRANSFER,
    ):
        return False
    if op.op.work is DeviceWork.COMPUTE and not record.is_vector:
        return False
    arrays = (*record.shape.results, *record.shape.operand_arrays)
    return any(_is_like(array, weights) for array in arrays)


def _rows(op: OpTime) -> int:
    shape = record_of(op).shape.matmul
    return min(shape.m, shape.n, shape.k) if shape and shape.batch == 1 else 0


def _is_thin(stats: ProfileStats, op: OpTime, weights: Weights) -> bool:
    few = 0 < _rows(op) < _FEW_ROWS[stats.measured.platform]
    is_slow = stats.shortest(op) < _BELOW * op.seconds
    return few and is_slow and not _is_narrow(stats, op, weights)


def _is_narrow(stats: ProfileStats, op: OpTime, weights: Weights) -> bool:
    """Whether the weight itself has few rows or columns, as in a critic or a low-rank adapter."""
    shape = record_of(op).shape.matmul
    assert shape is not None
    few, *others = sorted((shape.m, shape.n, shape.k))
    if any(size == math.prod(others) for _, size in weights):
        return False
    state = {array.dims[-2:] for array in stats.program.costs.state if len(array.dims) > 1}
    return any({few, other} == set(dims) for dims in state for other in others)
