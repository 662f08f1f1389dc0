"""A batch so small that most of a step would take as long with a larger one."""

from __future__ import annotations

import math
from collections.abc import Sequence

from mfu_jax.flops.executed.hlo_shapes import dtype_bits
from mfu_jax.flops.executed.instruction_shapes import Array
from mfu_jax.profiling.advice.facts import Facts, milliseconds, record_of, seconds_of
from mfu_jax.profiling.advice.host import idle_time
from mfu_jax.profiling.host_work import HostWork
from mfu_jax.profiling.join import Work
from mfu_jax.profiling.measured import OpTime

_LARGER = 8  # times the batch
_FEW_ROWS = {"cpu": 16, "gpu": 128, "tpu": 128}  # that a matmul needs to be worth its weights
_BELOW = 0.5  # of the peak
_LARGE = 0.01  # of the largest weights: smaller ones may be as large as activations by chance
_MOST = 1 / 3  # of a step, that must not depend on the batch


def small_batch(facts: Facts) -> tuple[float, str] | None:
    """Time that does not grow with the batch: thin matmuls, the optimizer, dispatch.

    An accelerator's optimizer alone may be as much of a step. A CPU's often is in small models.
    """
    thin = [op for op in facts.compute() if _is_thin(facts, op)]
    weights = _weights(facts)
    updates = [op for op in facts.measured.ops if _is_on_weights(op, weights)]
    if not thin and facts.is_cpu:
        return None
    beyond = seconds_of(thin) - _LARGER * sum(map(facts.shortest, thin))
    fixed = max(beyond, 0.0) + seconds_of(updates) + idle_time(facts)[HostWork.DISPATCH]
    if fixed < _MOST * facts.step or not (thin or updates):
        return None
    rows = min(map(_rows, thin), default=0)
    narrow = f"matmuls with {rows} rows take {milliseconds(seconds_of(thin))}, " if thin else ""
    return fixed * (1 - 1 / _LARGER), (
        f"{milliseconds(fixed)} of a step do not depend on the batch: {narrow}what reads or makes "
        f"arrays as large as weights {milliseconds(seconds_of(updates))}; the gain is that of "
        f"{_LARGER} times the batch, per batch of today"
    )


def _weights(facts: Facts) -> set[Array]:
    """The weights and moments, whole and by layer, as arrays of one dimension, and as bytes.

    A TPU copies parts of them to its vector memory, as bytes.
    """
    state = [(a.dtype, d) for a in facts.program.costs.state for d in (a.dims, a.dims[1:])]
    sizes = {(dtype, math.prod(dims)) for dtype, dims in state if _is_matrix(dims)}
    largest = max((size for _, size in sizes), default=0)
    found = {(dtype, size) for dtype, size in sizes if size >= _LARGE * largest}
    found |= {("s8", size * dtype_bits(dtype) // 8) for dtype, size in found}
    return {Array(dtype, (size,)) for dtype, size in found}


def _is_on_weights(op: OpTime, weights: set[Array]) -> bool:
    """Whether it reads, makes or copies arrays like weights, or one layer of them, without matmuls.

    The loop over the layers, whose own time is that of handing its arrays on, is one of them.
    """
    record = op.op.start or op.op.record
    if record is None or op.op.work not in (Work.COMPUTE, Work.CONTROL, Work.TRANSFER):
        return False
    if op.op.work is Work.COMPUTE and not record.is_vector:
        return False
    arrays = (*record.shape.results, *record.shape.operand_arrays)
    return any(Array(array.dtype, (math.prod(array.dims),)) in weights for array in arrays)


def _is_matrix(dims: Sequence[int]) -> bool:
    return sum(dim > 1 for dim in dims) > 1


def _rows(op: OpTime) -> int:
    shape = record_of(op).shape.matmul
    return min(shape.m, shape.n, shape.k) if shape and shape.batch == 1 else 0


def _is_thin(facts: Facts, op: OpTime) -> bool:
    few = 0 < _rows(op) < _FEW_ROWS[facts.measured.platform]
    return few and facts.shortest(op) < _BELOW * op.seconds
