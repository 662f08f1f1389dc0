"""The gain of an attention kernel, on numbers written by hand."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from mfu_jax.flops.executed.records import MatmulShape
from mfu_jax.profiling.advice.matmuls import attention

HEADS, LENGTH, WIDTH = 8, 2048, 128
SHORTEST = 0.003  # seconds of a matmul at the peak
SECONDS = 0.02  # that it takes


def op(phase: str, length: int) -> Any:
    shape = SimpleNamespace(
        matmul=MatmulShape(HEADS, length, length, WIDTH), results=(), operand_arrays=()
    )
    record = SimpleNamespace(name="qk", scope="", phase=phase, flops=1, shape=shape)
    return SimpleNamespace(op=SimpleNamespace(record=record), seconds=SECONDS, runs=1)


def softmax(seconds: float, length: int) -> Any:
    scores = SimpleNamespace(dims=(HEADS, length, length))
    shape = SimpleNamespace(matmul=None, results=(scores,), operand_arrays=())
    record = SimpleNamespace(name="exp", scope="", phase="forward", flops=0, shape=shape)
    return SimpleNamespace(op=SimpleNamespace(record=record), seconds=seconds, runs=1)


def gain(
    platform: str,
    *phases: str,
    length: int = LENGTH,
    beside: float = 0.0,
    kernels: int = 0,
    masked: int = 0,
    unit: int | None = None,
) -> float | None:
    """Of scores that are computed once, with one FLOP, in each of these phases.

    Args:
        platform: of the device.
        *phases: forward or backward.
        length: of the sequences.
        beside: seconds of another op on the scores.
        kernels: attention kernels in the program.
        masked: FLOPs on masked pairs.
        unit: rows and columns of the chip's matrix unit.
    """
    ops = [*(op(phase, length) for phase in phases), softmax(beside, length)]
    stats: Any = SimpleNamespace(
        is_cpu=platform == "cpu",
        chip=SimpleNamespace(matrix_unit=unit),
        measured=SimpleNamespace(platform=platform),
        compute=lambda: ops,
        shortest=lambda op: SHORTEST,
        program=SimpleNamespace(
            costs=SimpleNamespace(executed=SimpleNamespace(attention_kernels=kernels)),
            ledger=SimpleNamespace(lines=[SimpleNamespace(label="masked pairs", flops=masked)]),
        ),
    )
    found = attention(stats)
    return found[0] if found else None


@pytest.mark.parametrize(
    ("platform", "phases", "matmuls"),
    [
        ("gpu", ("forward", "backward"), 2),
        ("tpu", ("forward",), 1),
        ("tpu", ("forward", "backward"), 2 * 9 / 6),  # its backward kernels make scores again
    ],
)
def test_the_kernels_matmuls_run_at_six_tenths_of_the_peak(
    platform: str, phases: tuple[str, ...], matmuls: float
) -> None:
    dense = len(phases) * SECONDS
    assert gain(platform, *phases) == pytest.approx(dense - matmuls * SHORTEST / 0.6)


def test_a_head_of_128_fills_half_of_a_matrix_unit_of_256() -> None:
    assert gain("tpu", "forward", unit=256) == pytest.approx(SECONDS - SHORTEST / 0.5)
    assert gain("tpu", "forward", unit=128) == pytest.approx(SECONDS - SHORTEST / 0.6)


def test_the_kernel_leaves_masked_pairs_out() -> None:
    half = gain("gpu", "forward", "backward", masked=1)
    assert half == pytest.approx(2 * SECONDS - 2 * SHORTEST / 0.6 / 2)


@pytest.mark.parametrize(
    ("length", "skipped", "in_caches"),
    [
        (2048, 120 / 256, 0.4),  # of 16 × 16 blocks, 120 are above the diagonal
        (512, 6 / 16, 1.0),  # a head's 512 × 512 scores, 1 MiB, stay in caches as they are
    ],
)
def test_cpus_have_no_kernel_but_blocks_that_leave_masked_pairs_out(
    length: int, skipped: float, in_caches: float
) -> None:
    """Half of the pairs are masked; blocks' matmuls save 40% of what they skip."""
    matmuls = 0.4 * 2 * SECONDS * skipped
    passes = "forward", "backward"
    found = gain("cpu", *passes, masked=1, length=length)
    assert found == pytest.approx(matmuls)
    found = gain("cpu", *passes, masked=1, length=length, beside=1.0)
    assert found == pytest.approx(matmuls + 1 - (1 - skipped) * in_caches)


def test_without_masked_pairs_blocks_on_cpus_leave_nothing_out() -> None:
    assert gain("cpu", "forward", "backward", beside=1.0) == 0


def test_short_sequences_and_kernels_get_no_advice() -> None:
    assert gain("tpu", "forward", length=256) is not None
    assert gain("tpu", "forward", length=255) is None
    assert gain("tpu", "forward", kernels=1) is None
