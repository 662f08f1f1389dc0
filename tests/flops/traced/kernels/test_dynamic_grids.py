"""Pallas kernels for TPU whose grid or loop is as long as an operand says, like tokamax's."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from mfu_jax.flops.traced.counting import count_model_flops, pallas_kernel_flops
from tests.support.small_functions import shape

HEADS, LENGTH, WIDTH, BLOCK = 2, 64, 32, 16
PAIRS = HEADS * LENGTH**2 * WIDTH
ROWS = np.array([i for i in range(4) for j in range(i + 1)])  # the blocks that a causal mask keeps
COLUMNS = np.array([j for i in range(4) for j in range(i + 1)])


def _kernel(rows, columns, q_ref, k_ref, v_ref, out_ref, *, products):
    scores = jnp.dot(q_ref[...].T, k_ref[...].T)
    for _ in range(products - 2):
        scores += jnp.dot(q_ref[...].T, v_ref[...].T)
    out_ref[...] = jnp.dot(scores, v_ref[...])


def attention(q, k, v, blocks, name="splash_mha_fwd", products=2):
    """Q is [heads, width, positions]; K and V are [heads, positions, width]."""
    block = pl.BlockSpec((None, BLOCK, WIDTH), lambda h, n, rows, columns: (h, columns[n], 0))
    grid = pltpu.PrefetchScalarGridSpec(
        num_scalar_prefetch=2,
        grid=(HEADS, blocks),
        in_specs=[
            pl.BlockSpec((None, WIDTH, BLOCK), lambda h, n, rows, columns: (h, 0, rows[n])),
            block,
            block,
        ],
        out_specs=pl.BlockSpec((None, BLOCK, WIDTH), lambda h, n, rows, columns: (h, rows[n], 0)),
    )
    out = jax.ShapeDtypeStruct((HEADS, LENGTH, WIDTH), q.dtype)
    cost = pl.CostEstimate(flops=1, transcendentals=0, bytes_accessed=0)
    body = functools.partial(_kernel, products=products)
    call = pl.pallas_call(body, grid_spec=grid, out_shape=out, name=name, cost_estimate=cost)
    return call(jnp.array(ROWS), jnp.array(COLUMNS), q, k, v)


ARGUMENTS = (shape(HEADS, WIDTH, LENGTH), *(shape(HEADS, LENGTH, WIDTH),) * 2)


def test_a_grid_of_a_masks_blocks_skips_the_others():
    def fn(q, k, v):
        return jax.jit(lambda blocks: attention(q, k, v, blocks[0]))(np.array([len(ROWS)]))

    count = count_model_flops(fn, *ARGUMENTS)
    assert count.total == 2 * 2 * PAIRS  # scores and values of all pairs, whatever runs
    assert count.skipped["exact"] == 2 * 2 * PAIRS * (16 - 10) // 16
    assert count.unaccounted == ()
    assert pallas_kernel_flops(fn, *ARGUMENTS) == {"splash_mha_fwd": 2 * 2 * PAIRS * 10 // 16}


def test_a_grid_of_a_mask_that_is_data_still_has_all_pairs():
    arguments = (*ARGUMENTS, shape(dtype=jnp.int32))
    count = count_model_flops(attention, *arguments)
    assert (count.total, count.skipped) == (2 * 2 * PAIRS, {})
    assert count.unaccounted == ()


@jax.custom_vjp
def differentiable(q, k, v):
    return attention(q, k, v, len(ROWS))


def _forward(*arrays):
    return differentiable(*arrays), arrays


def _backward(arrays, gradient):
    q, k, v = arrays
    dq = attention(q, k, v, len(ROWS), "splash_mha_dq", products=3)
    return dq.swapaxes(1, 2), k, v


differentiable.defvjp(_forward, _backward)


def test_a_backward_pass_that_is_written_elsewhere_skips_its_masks_blocks_too():
    step = jax.value_and_grad(lambda *arrays: differentiable(*arrays).sum(), (0, 1, 2))
    count = count_model_flops(step, *ARGUMENTS)
    assert (count.forward, count.backward) == (2 * 2 * PAIRS, 2 * 2 * PAIRS)  # dP and dQ
    assert count.skipped["exact"] == (2 + 2) * 2 * PAIRS * (16 - 10) // 16


GROUPS, TILE, IN, OUT = 2, 16, 32, 48
TILES = 4


def _visits(count, firsts, groups, tiles, offset, x_ref, w_ref, out_ref):
    def visit(n, carry):
        x = x_ref[pl.ds(tiles[n] * TILE, TILE), :]
        out_ref[pl.ds(tiles[n] * TILE, TILE), :] += jnp.dot(x, w_ref[groups[n]])
        return carry

    jax.lax.fori_loop(0, count[0], visit, 0)


def grouped(x, w, count, firsts, groups, tiles):
    scalars = pl.BlockSpec(memory_space=pltpu.SMEM)
    return pl.pallas_call(
        _visits,
        in_specs=[scalars] * 5 + [pl.BlockSpec()] * 2,
        out_shape=jax.ShapeDtypeStruct((TILES * TILE, OUT), x.dtype),
        cost_estimate=pl.CostEstimate(
            flops=2 * TILES * TILE * IN * OUT, transcendentals=0, bytes_accessed=0
        ),
    )(count, firsts, groups, tiles, jnp.array([0]), x, w)


def test_a_grouped_matmul_with_a_loop_counts_the_rows_in_a_group_once():
    integers = [shape(n, dtype=jnp.int32) for n in (1, GROUPS + 1, *(TILES + GROUPS - 1,) * 2)]
    arguments = shape(TILES * TILE, IN), shape(GROUPS, IN, OUT), *integers
    row = 2 * IN * OUT
    count = count_model_flops(grouped, *arguments)
    assert (count.total, count.unaccounted) == (TILES * TILE * row, ())
    assert pallas_kernel_flops(grouped, *arguments) == {}  # what runs depends on the groups
    count = count_model_flops(grouped, *arguments, group_sizes=(20, 13))
    assert (count.total, count.unaccounted) == (33 * row, ())


def _group(x_ref, w_ref, low, high, out_ref):
    first = low[pl.program_id(1)] + pl.program_id(0) * TILE

    @pl.when(first < high[pl.program_id(1)])
    def _():
        out_ref[pl.ds(first, TILE), :] = jnp.dot(x_ref[pl.ds(first, TILE), :], w_ref[...])


def grouped_by_bounds(x, w, low, high):
    """As tokamax's by Triton: a step for each tile of rows and each group."""
    return pl.pallas_call(
        _group,
        grid=(TILES, GROUPS),
        in_specs=[
            pl.BlockSpec(),
            pl.BlockSpec((None, IN, OUT), lambda i, g: (g, 0, 0)),
            pl.BlockSpec(),
            pl.BlockSpec(),
        ],
        out_shape=jax.ShapeDtypeStruct((TILES * TILE, OUT), x.dtype),
    )(x, w, low, high)


def test_a_grouped_matmul_with_bounds_counts_the_rows_in_a_group_once():
    bounds = shape(GROUPS, dtype=jnp.int32)
    arguments = shape(TILES * TILE, IN), shape(GROUPS, IN, OUT), bounds, bounds
    row = 2 * IN * OUT
    count = count_model_flops(grouped_by_bounds, *arguments)
    assert (count.total, count.unaccounted) == (TILES * TILE * row, ())
    count = count_model_flops(grouped_by_bounds, *arguments, group_sizes=(20, 13))
    assert (count.total, count.unaccounted) == (33 * row, ())
