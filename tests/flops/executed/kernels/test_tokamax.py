"""Kernels of tokamax, from their bodies: attention and grouped matmuls."""

from __future__ import annotations

import pytest

from mfu_jax.flops.executed.counting import executed_flops
from tests.support import program_tokamax as programs
from tests.support.jax_versions import (
    reads_recorded_kernels,
    reads_recorded_tensor_cores,
    reads_recorded_triton,
)
from tests.support.recorded import count, text_of

SIZES = [(128, 128, 128, 128), (100, 200, 0, 212), (1, 1, 1, 509), (7, 0, 0, 0)]


@reads_recorded_triton
def test_tokamaxs_attention_recomputes_scores_in_its_backward() -> None:
    batch, length, heads, width = programs.TRITON_SHAPE
    matmul = 2 * batch * heads * length**2 * width
    executed = count("h100_tokamax")
    # Blocks of 64 by 64 on and below the diagonal: 36 of 64. Backward runs seven products.
    assert executed.forward == 2 * matmul * 36 // 64
    backward = executed.kernels["pallas_flash_attention_vjp"]
    assert backward == 7 * matmul * 36 // 64
    assert (executed.backward, executed.rematerialized) == (backward * 4 // 7, backward * 3 // 7)
    assert executed.unaccounted == ()


@reads_recorded_kernels
def test_splash_attention_on_tpu_runs_the_blocks_that_its_grid_lists() -> None:
    # The grid of the forward pass has the blocks that a constant mask keeps, and no others:
    # 128 queries by 128 keys, 1 + 2 + 3 of 9.
    blocks = programs.BATCH * programs.HEADS * (1 + 2 + 3)
    product = 2 * 128 * 128 * programs.WIDTH * blocks
    executed = count("v6e_tokamax_splash")
    assert executed.forward == 2 * product
    assert (executed.backward, executed.rematerialized) == (4 * product, product)
    assert (executed.unaccounted, executed.flags) == ((), ())


ROW = 2 * programs.IN * programs.OUT


def visited_rows(sizes: tuple[int, ...], tile: int) -> int:
    """Rows of whole tiles, once for each of their groups."""
    ends = [sum(sizes[: n + 1]) for n in range(len(sizes))]
    tiles = [
        {row // tile for row in range(end - size, end)}
        for size, end in zip(sizes, ends, strict=True)
    ]
    return sum(map(len, tiles)) * tile


@reads_recorded_kernels
@pytest.mark.parametrize("sizes", SIZES)
def test_a_grouped_matmul_on_tpu_visits_the_tiles_of_given_groups(sizes: tuple[int, ...]) -> None:
    rows = visited_rows(sizes, programs.TILE)
    executed = executed_flops(text_of("v6e_tokamax_gmm"), group_sizes=sizes)
    assert (executed.forward, executed.backward) == (rows * ROW, 2 * rows * ROW)
    assert executed.padding == 3 * (rows - sum(sizes)) * ROW
    assert (executed.unaccounted, executed.flags) == ((), ())


@reads_recorded_tensor_cores
@pytest.mark.parametrize("sizes", SIZES)
def test_a_grouped_matmul_on_tensor_cores_does_too(sizes: tuple[int, ...]) -> None:
    rows = visited_rows(sizes, 64)
    # The gradient of the matrices takes 128 rows at a time, also for a group of no rows within.
    ends = [sum(sizes[: n + 1]) for n in range(len(sizes))]
    of_matrices = 128 * sum(
        -(-end // 128) - (end - size) // 128 for size, end in zip(sizes, ends, strict=True)
    )
    executed = executed_flops(text_of("h100_tokamax_gmm"), group_sizes=sizes)
    assert (executed.forward, executed.backward) == (rows * ROW, (rows + of_matrices) * ROW)
    assert executed.padding == (2 * rows + of_matrices - 3 * sum(sizes)) * ROW
    assert (executed.unaccounted, executed.flags) == ((), ())


@reads_recorded_tensor_cores
def test_a_grouped_matmul_on_tensor_cores_without_sizes_is_an_upper_bound_and_says_so() -> None:
    executed = count("h100_tokamax_gmm")
    # Each of the groups but the first may begin within a tile, which is then visited twice.
    rows, of_matrices = 512 + 3 * 64, 512 + 3 * 128
    assert executed.total == (2 * rows + of_matrices) * ROW
    assert len(executed.flags) == 3
    assert all("an upper bound; give group_sizes=" in flag.text for flag in executed.flags)
    others = executed_flops(text_of("h100_tokamax_gmm"), group_sizes=(256, 256))
    assert (others.total, len(others.unaccounted)) == (0, 3)
    assert all("the kernel has 4 groups" in item.reason for item in others.unaccounted)


@reads_recorded_triton
@pytest.mark.parametrize("sizes", [*SIZES, ()])
def test_a_grouped_matmul_by_triton_begins_its_tiles_with_each_group(
    sizes: tuple[int, ...],
) -> None:
    executed = executed_flops(text_of("h100_tokamax_gmm_triton"), group_sizes=sizes)
    groups = sizes or (1, 1, 1, programs.ROWS - 3)  # most tiles: an upper bound
    rows = sum(-(-size // programs.TILE) for size in groups) * programs.TILE
    # The gradient of the matrices multiplies one tile for a group without rows, too.
    of_matrices = sum(max(1, -(-size // programs.TRITON_ROWS)) for size in groups)
    of_matrices *= programs.TRITON_ROWS
    assert (executed.forward, executed.backward) == (rows * ROW, (rows + of_matrices) * ROW)
    assert executed.padding == (2 * rows + of_matrices - 3 * sum(groups)) * ROW
    assert executed.unaccounted == ()
    assert len(executed.flags) == (0 if sizes else 3)


@reads_recorded_kernels
def test_a_grouped_matmul_on_tpu_without_sizes_is_an_estimate_and_says_so() -> None:
    executed = count("v6e_tokamax_gmm")
    assert executed.total == 3 * programs.ROWS * ROW
    assert len(executed.flags) == 3
    assert all("give group_sizes=" in flag.text for flag in executed.flags)


@pytest.mark.full
@reads_recorded_tensor_cores
def test_attention_on_tensor_cores_recomputes_in_both_backward_kernels() -> None:
    # A warp group's 64 queries see 128 keys at a time, in the backward pass 128 queries 64 keys.
    length, block = programs.LENGTH, 64 * 128
    forward = sum(-(-end // 128) for end in range(64, length + 1, 64)) * block
    backward = sum(end // 64 for end in range(128, length + 1, 128)) * block
    pair = 2 * programs.BATCH * programs.HEADS * programs.WIDTH
    executed = count("h100_tokamax_wgmma")
    assert executed.forward == 2 * pair * forward
    # dQ: S, dP, dQ; dK and dV: S, dP, dV, dK.
    assert executed.rematerialized == 3 * pair * backward
    assert executed.backward == 4 * pair * backward
    assert (executed.unaccounted, set(executed.by_dtype)) == ((), {"bf16"})
