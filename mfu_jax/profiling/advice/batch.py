"""A batch so small that most of a step would take as long with a larger one."""

from __future__ import annotations

import math
from collections.abc import Sequence

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
    """Time that does not grow with the batch: thin matmuls, the optimizer, dispatch."""
    thin = [op for op in facts.compute() if _is_thin(facts, op)]
    dims = [d for a in facts.program.costs.state for d in (a.dims, a.dims[1:]) if _is_matrix(d)]
    sizes = set(map(math.prod, dims))
    weights = {size for size in sizes if size >= _LARGE * max(sizes)}
    updates = [op for op in facts.measured.ops if _is_on_weights(op, weights)]
    if not thin:
        return None
    beyond = seconds_of(thin) - _LARGER * sum(map(facts.shortest, thin))
    fixed = max(beyond, 0.0) + seconds_of(updates) + idle_time(facts)[HostWork.DISPATCH]
    if fixed < _MOST * facts.step:
        return None
    rows = min(_rows(op) for op in thin)
    return fixed * (1 - 1 / _LARGER), (
        f"{milliseconds(fixed)} of a step do not depend on the batch: matmuls with {rows} rows "
        f"take {milliseconds(seconds_of(thin))}, what reads or makes arrays as large as weights "
        f"{milliseconds(seconds_of(updates))}; the gain is that of {_LARGER} times the batch, per "
        f"batch of today"
    )


def _is_on_weights(op: OpTime, sizes: set[int]) -> bool:
    """Whether it reads or makes arrays as large as weights, or one layer of them, without matmuls.

    The loop over the layers, whose own time is that of handing its arrays on, is one of them.
    """
    record = op.op.record
    if record is None or not (record.is_vector or op.op.work is Work.CONTROL):
        return False
    arrays = (*record.shape.results, *record.shape.operand_arrays)
    return any(_is_matrix(array.dims) and math.prod(array.dims) in sizes for array in arrays)


def _is_matrix(dims: Sequence[int]) -> bool:
    return sum(dim > 1 for dim in dims) > 1


def _rows(op: OpTime) -> int:
    shape = record_of(op).shape.matmul
    return min(shape.m, shape.n, shape.k) if shape and shape.batch == 1 else 0


def _is_thin(facts: Facts, op: OpTime) -> bool:
    few = 0 < _rows(op) < _FEW_ROWS[facts.measured.platform]
    return few and facts.shortest(op) < _BELOW * op.seconds
