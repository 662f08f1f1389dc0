"""What counts as work that a larger batch would share, on numbers written by hand."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from mfu_jax.flops.executed.records import ArrayShape, MatmulShape
from mfu_jax.host_work import HostWork
from mfu_jax.profiling.advice.batch import small_batch
from mfu_jax.profiling.join.ops import DeviceWork
from tests.support.written_profiles import BF16

STATE = frozenset(
    {ArrayShape("f32", (128, 128)), ArrayShape("f32", (128, 1)), ArrayShape("f32", (1024, 16))}
)


def gain(
    *, matmul: MatmulShape | None = None, array: tuple[int, ...] = (), peak: float = BF16
) -> float | None:
    """Of a step of 100 ms in which one op, with this matmul or on this array, takes 80 ms."""
    shape = SimpleNamespace(matmul=matmul, results=(ArrayShape("f32", array),), operand_arrays=())
    record = SimpleNamespace(shape=shape, is_vector=matmul is None, flops=0)
    op = SimpleNamespace(
        op=SimpleNamespace(work=DeviceWork.COMPUTE, record=record, start=None), seconds=0.08, runs=1
    )
    work = 2 * matmul.m * matmul.n * matmul.k if matmul else 0
    stats: Any = SimpleNamespace(
        is_cpu=False,
        step=0.1,
        compute=lambda: [op] if matmul else [],
        shortest=lambda op: work / peak,
        idle_time={HostWork.DISPATCH: 0.0},
        measured=SimpleNamespace(ops=[op], platform="tpu"),
        program=SimpleNamespace(costs=SimpleNamespace(state=STATE)),
    )
    found = small_batch(stats)
    return found[0] if found else None


SEVEN_EIGHTHS = pytest.approx(0.08 * 7 / 8, rel=1e-3)


@pytest.mark.parametrize(
    ("m", "k", "n", "expected"),
    [
        (1, 128, 128, SEVEN_EIGHTHS),  # one row by a weight
        (128, 1, 128, SEVEN_EIGHTHS),  # the gradient of that weight
        (8, 512, 512, SEVEN_EIGHTHS),  # by a weight that is gathered: no state is as large
        (16384, 128, 1, None),  # a critic: its weight has one column, the batch many rows
        (128, 16384, 1, None),  # its gradient
        (16384, 1024, 16, None),  # a low-rank adapter
    ],
)
def test_matmuls_with_few_rows_of_the_batch(m: int, k: int, n: int, expected: Any) -> None:
    assert gain(matmul=MatmulShape(1, m, n, k)) == expected


@pytest.mark.parametrize(
    ("dims", "expected"),
    [
        ((128, 128), SEVEN_EIGHTHS),
        ((16, 8, 128), SEVEN_EIGHTHS),  # in tiles
        ((128 * 128,), SEVEN_EIGHTHS),
        ((16, 1024), SEVEN_EIGHTHS),  # transposed
        ((64, 256), None),  # 64 steps of 256 environments, as many as a weight's elements
    ],
)
def test_arrays_like_weights(dims: tuple[int, ...], expected: Any) -> None:
    assert gain(array=dims) == expected


@pytest.mark.parametrize(
    ("share", "expected"),
    [
        (1 / 16, 0.07),  # eight batches take as long as one
        (1 / 4, 0.06),  # eight take 8 × 20 ms at the peak, one of them 20 instead of 80
        (0.45, 0.044),
        (0.55, None),  # bound by the peak as much as by the weights
    ],
)
def test_a_matmul_gains_until_it_is_at_the_peak(share: float, expected: float | None) -> None:
    """Of 80 ms that a matmul of eight rows takes, this share would be needed at the peak."""
    shape = MatmulShape(1, 8, 128, 128)
    peak = 2 * 8 * 128 * 128 / (0.08 * share)
    found = gain(matmul=shape, peak=peak)
    assert found == (None if expected is None else pytest.approx(expected))
