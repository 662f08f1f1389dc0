"""Kernels of grouped rows take the time of the tiles that they go through."""

from __future__ import annotations

from dataclasses import replace

import pytest

from mfu_jax.flops.executed.records import (
    ArrayShape,
    InstructionRecord,
    InstructionShape,
    ProgramCosts,
)
from mfu_jax.flops.executed.result import ExecutedCount
from mfu_jax.planning.step_time.durations import Durations, Efficiencies
from mfu_jax.planning.step_time.grouped_matmuls import visited_share, without_skipped_rows
from mfu_jax.planning.targets import parse_target

ROWS, K, N, GROUPS, TILE = 4096, 512, 1024, 8, 128
STEPS = ROWS // TILE + GROUPS - 1  # each border between groups may cut one tile
FLOPS = 2 * ROWS * K * N


def kernel(*lists: int) -> InstructionRecord:
    """With lists of so many integers before its rows and matrices, as libtpu's ragged_dot."""
    integers = tuple(ArrayShape("s32", (size,)) for size in lists)
    matrices = (ArrayShape("bf16", (ROWS, K)), ArrayShape("bf16", (GROUPS, K, N)))
    return InstructionRecord(
        name="ragged-dot-none.3",
        module="m",
        computation="main",
        opcode="custom-call",
        op_name="jit(f)/moe/experts/wi_0/ragged_dot_general/ragged-dot-none",
        runs=1,
        flops_by_dtype={"bf16": FLOPS},
        shape=InstructionShape(operand_arrays=(*integers, *matrices)),
    )


def test_a_tile_that_two_groups_share_is_multiplied_twice() -> None:
    record = kernel(1, GROUPS + 1, STEPS, STEPS, 1)
    assert visited_share(record) == STEPS / (ROWS // TILE)
    target = parse_target(topology="v5p:2x2x1")  # 459e12 FLOP/s in bf16, by its data sheet
    shares = Efficiencies(grouped_matmul=0.8, kernel=0.1)
    durations = Durations(target=target, efficiencies=shares)
    (duration,) = durations.of(record)
    assert duration.cause == "kernel"
    assert duration.seconds == pytest.approx(FLOPS * STEPS / (ROWS // TILE) / 459e12 / 0.8)


def test_rows_of_other_devices_experts_are_skipped() -> None:
    record = replace(kernel(1, GROUPS + 1, STEPS, STEPS, 1), runs=3)
    other = replace(kernel(), name="fusion.1")
    count = ExecutedCount(by_dtype={"bf16": 3 * FLOPS + FLOPS})
    costs = ProgramCosts(
        name="m",
        devices=8,
        state=frozenset(),
        results=(),
        records={record.name: record, other.name: other},
        executed=count,
    )
    quarter = without_skipped_rows(costs, 1 / 4)
    assert quarter.records[record.name].flops == FLOPS // 4
    assert quarter.records[other.name].flops == FLOPS
    assert quarter.executed.by_dtype == {"bf16": 3 * FLOPS // 4 + FLOPS}
    assert without_skipped_rows(costs, 1.0) == costs


def test_other_kernels_have_no_tiles() -> None:
    assert visited_share(kernel(GROUPS + 1, STEPS, STEPS - 1)) is None  # no pair of lists
    assert visited_share(kernel()) is None
