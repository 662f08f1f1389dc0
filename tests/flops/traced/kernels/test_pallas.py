"""Pallas kernels: the grid times the body, without the blocks that are skipped."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl
from jax.experimental.pallas.ops.tpu.flash_attention import flash_attention
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as splash
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as masks

from mfu_jax.errors import UserError
from mfu_jax.flops.traced.counting import count_model_flops, pallas_kernel_flops
from tests.support import program_kernel_bodies as programs
from tests.support import program_kernels
from tests.support.small_functions import shape

M, N, K, BLOCK = 64, 32, 48, 16


def matmul(body, x, y):
    def kernel(x_ref, y_ref, o_ref):
        body(x_ref, y_ref, o_ref)

    return pl.pallas_call(
        kernel,
        name="blocked_matmul",
        grid=(M // BLOCK, N // BLOCK, K // BLOCK),
        in_specs=[
            pl.BlockSpec((BLOCK, BLOCK), lambda i, j, k: (i, k)),
            pl.BlockSpec((BLOCK, BLOCK), lambda i, j, k: (k, j)),
        ],
        out_specs=pl.BlockSpec((BLOCK, BLOCK), lambda i, j, k: (i, j)),
        out_shape=jax.ShapeDtypeStruct((M, N), x.dtype),
    )(x, y)


def test_grid_times_body():
    def body(x_ref, y_ref, o_ref):
        o_ref[...] += x_ref[...] @ y_ref[...]

    fn = lambda x, y: matmul(body, x, y)  # noqa: E731
    count = count_model_flops(fn, shape(M, K), shape(K, N))
    assert count.total == 2 * M * N * K
    assert count.by_primitive == {"pallas_call": count.total}
    assert pallas_kernel_flops(fn, shape(M, K), shape(K, N)) == {"blocked_matmul": count.total}


def test_blocks_skipped_by_position_cost_nothing():
    def body(x_ref, y_ref, o_ref):
        @pl.when((pl.program_id(0) + 1) * BLOCK > pl.program_id(2) * BLOCK)
        def _():
            o_ref[...] += x_ref[...] @ y_ref[...]

    count = count_model_flops(lambda x, y: matmul(body, x, y), shape(M, K), shape(K, N))
    blocks = sum(k <= i for i in range(4) for k in range(3)) * 2
    assert count.total == blocks * 2 * BLOCK**3
    assert count.unaccounted == ()


def test_loop_whose_length_depends_on_the_position():
    def body(x_ref, y_ref, o_ref):
        def add(_, total):
            return total + x_ref[...] @ y_ref[...]

        zeros = jnp.zeros((BLOCK, BLOCK))
        o_ref[...] = jax.lax.fori_loop(0, pl.program_id(0), add, zeros)

    count = count_model_flops(lambda x, y: matmul(body, x, y), shape(M, K), shape(K, N))
    assert count.total == (0 + 1 + 2 + 3) * 2 * 3 * 2 * BLOCK**3
    assert count.unaccounted == ()


def test_decisions_in_the_iterations_of_a_kernels_loop():
    """Blocks at or before the program's own, each with as many products as its position."""

    def body(x_ref, y_ref, o_ref):
        def add(_, total):
            return total + x_ref[...] @ y_ref[...]

        def chunk(j, total):
            total = jax.lax.fori_loop(0, j, add, total)
            return jax.lax.cond(j % 2 == 1, lambda t: add(0, t), lambda t: t, total)

        zeros = jnp.zeros((BLOCK, BLOCK))
        o_ref[...] = jax.lax.fori_loop(0, pl.program_id(0) + 1, chunk, zeros)

    count = count_model_flops(lambda x, y: matmul(body, x, y), shape(M, K), shape(K, N))
    products = sum(j + j % 2 for i in range(4) for j in range(i + 1))
    assert count.total == products * 2 * 3 * 2 * BLOCK**3
    assert count.unaccounted == ()


def test_condition_on_data_is_listed():
    def body(x_ref, y_ref, o_ref):
        @pl.when(x_ref[0, 0] > 0)
        def _():
            o_ref[...] += x_ref[...] @ y_ref[...]

    count = count_model_flops(lambda x, y: matmul(body, x, y), shape(M, K), shape(K, N))
    assert count.total == 2 * M * N * K
    (item,) = count.unaccounted
    assert "blocked_matmul" in item.reason


B, H, S, D = 2, 4, 1024, 128
PAIRS = 2 * B * H * S * S * D  # one product over all pairs


def gradient(attention):
    def loss(q, k, v):
        return attention(q, k, v).astype(jnp.float32).sum()

    return jax.value_and_grad(loss, (0, 1, 2))


@pytest.mark.parametrize("causal", [True, False])
def test_flash_attention_on_tpu(causal):
    fn = gradient(lambda q, k, v: flash_attention(q, k, v, causal=causal))
    arguments = [shape(B, H, S, D, dtype=jnp.bfloat16)] * 3
    count = count_model_flops(fn, *arguments)
    assert (count.forward, count.backward) == (2 * PAIRS, 4 * PAIRS)
    assert count.unaccounted == ()
    # Blocks of 128: of 8·8, a causal kernel runs the 8·9/2 on and below the diagonal. Its backward
    # computes the scores and dP twice: 4 products for dK and dV, 3 for dQ.
    blocks = 36 if causal else 64
    executed = pallas_kernel_flops(fn, *arguments)
    assert sorted(executed.values()) == [n * PAIRS * blocks // 64 for n in (2, 3, 4)]


@pytest.mark.parametrize("fused", [True, False])
def test_splash_attention(fused):
    mask = masks.MultiHeadMask([masks.CausalMask((S, S)) for _ in range(H)])
    sizes = splash.BlockSizes(
        block_q=256,
        block_kv=256,
        block_kv_compute=128,
        block_q_dkv=256,
        block_kv_dkv=256,
        block_kv_dkv_compute=128,
        block_q_dq=None if fused else 256,
        block_kv_dq=None if fused else 256,
        use_fused_bwd_kernel=fused,
    )
    kernel = splash.make_splash_mha(mask, block_sizes=sizes, head_shards=1, q_seq_shards=1)
    fn = gradient(jax.vmap(kernel))
    arguments = [shape(B, H, S, D, dtype=jnp.bfloat16)] * 3
    count = count_model_flops(fn, *arguments)
    assert count.forward == 2 * PAIRS
    rows = 2 * B * H * S * D  # Σ o·do of every row, written as an einsum beside the kernels
    assert count.backward == 4 * PAIRS + rows
    # Blocks of 256: 10 of 16 are on or below the diagonal.
    executed = pallas_kernel_flops(fn, *arguments)
    products = (2, 5) if fused else (2, 3, 4)
    assert sorted(executed.values()) == [n * PAIRS * 10 // 16 for n in products]


def test_devices_that_share_a_sequence_skip_their_own_blocks():
    fn, arguments = program_kernels.splash_in_context(jax.devices())
    count = count_model_flops(fn, *arguments)
    # Forward and backward multiply six times; 28 of 8·8 blocks are above the diagonal.
    assert count.skipped["exact"] == 6 * PAIRS * 28 // 64
    assert not count.unaccounted


def test_the_tables_of_splash_attentions_mask_are_no_weights():
    mask = masks.MultiHeadMask([masks.CausalMask((S, S)) for _ in range(H)])
    kernel = splash.make_splash_mha(mask, head_shards=1, q_seq_shards=1)

    def fn(x, w):
        projected = x @ w
        return jax.vmap(kernel)(projected, projected, projected)

    count = count_model_flops(fn, shape(B, H, S, D), shape(D, D))
    assert (count.weights, count.activations) == (2 * B * H * S * D * D, 2 * PAIRS)


@pytest.mark.full
def test_a_kernels_queries_are_no_weights_where_they_are_arguments():
    """A benchmark of attention alone: its masked pairs were the whole of it, and then removed."""
    mask = masks.MultiHeadMask([masks.CausalMask((S, S)) for _ in range(H)])
    kernel = splash.make_splash_mha(mask, head_shards=1, q_seq_shards=1)
    count = count_model_flops(gradient(jax.vmap(kernel)), *[shape(B, H, S, D)] * 3)
    beside = 2 * B * H * S * D  # the sum of o · do
    assert (count.weights, count.activations) == (0, 6 * PAIRS + beside)


@pytest.mark.filterwarnings("ignore:.*pallas.ops.gpu.attention is deprecated:DeprecationWarning")
def test_flash_attention_on_gpu():
    from jax.experimental.pallas.ops.gpu import attention as gpu_attention

    fn = gradient(lambda q, k, v: gpu_attention.mha(q, k, v, segment_ids=None, causal=True))
    arguments = [shape(B, S, H, D, dtype=jnp.bfloat16)] * 3
    count = count_model_flops(fn, *arguments)
    assert (count.forward, count.backward) == (2 * PAIRS, 4 * PAIRS)


def test_a_grid_that_depends_on_data_is_counted_by_the_cost_estimate():
    """Megablox's author counts every row once, as `ragged_dot` is counted."""
    function, arguments = programs.KERNELS["v6e"]["megablox"]
    count = count_model_flops(function, *arguments)
    rows = 2 * programs.ROWS * programs.WIDTH * programs.HIDDEN
    assert (count.forward, count.backward) == (rows, 2 * rows)
    assert count.by_dtype == {"bf16": 3 * rows}
    assert not [item for item in count.unaccounted if item.name == "pallas_call"]
    assert pallas_kernel_flops(function, *arguments) == {}  # what runs depends on the groups


def test_given_group_sizes_leave_out_the_rows_of_no_group():
    function, arguments = programs.KERNELS["v6e"]["megablox"]
    count = count_model_flops(function, *arguments, group_sizes=(100, 200, 0, 2))
    rows = 2 * (100 + 200 + 2) * programs.WIDTH * programs.HIDDEN
    assert (count.forward, count.backward) == (rows, 2 * rows)
    assert not [item for item in count.unaccounted if item.name == "pallas_call"]
    count = count_model_flops(function, *arguments, group_sizes=(100, 200))
    assert count.total == 3 * 2 * programs.ROWS * programs.WIDTH * programs.HIDDEN
    reasons = [item.reason for item in count.unaccounted if item.name == "pallas_call"]
    assert len(reasons) == 3
    assert all("this product has 4 groups of 512 rows" in reason for reason in reasons)


def test_sizes_that_the_function_takes_itself_are_its_own():
    def loss(x, group_sizes):
        return (x @ x)[: group_sizes.shape[0]].sum()

    sizes = shape(3, dtype=jnp.int32)
    assert count_model_flops(loss, shape(8, 8), group_sizes=sizes).total == 2 * 8**3
    taken = lambda x, **sizes: loss(x, **sizes)  # noqa: E731
    assert count_model_flops(taken, shape(8, 8), group_sizes=sizes).total == 2 * 8**3
    with pytest.raises(UserError, match="group_sizes=7: expected the rows per group"):
        count_model_flops(lambda x: x @ x, shape(8, 8), group_sizes=7)


# Scores and values of the queries that share keys, with 64 keys at once.
BLOCK_OF_64_KEYS = 2 * 2 * (programs.QUERY_HEADS // programs.KEY_HEADS) * 64 * 2 * programs.HEAD_DIM


def test_lengths_that_are_constants_of_the_function_bound_a_kernels_loops():
    function, (q, k, v, _, pages) = programs.KERNELS["v5e"]["paged"]
    lengths = np.array([64, 65, 1, 128], np.int32)
    decode = lambda q, k, v, pages: function(q, k, v, lengths, pages)  # noqa: E731
    count = count_model_flops(decode, q, k, v, pages)
    # 64 keys at once: 1 + 2 + 1 + 2 blocks for each head of keys, which four heads of queries read.
    assert count.total == programs.KEY_HEADS * 6 * (2 * 2 * 4 * 64 * 2 * programs.HEAD_DIM)


def test_paged_attention_counts_given_lengths_else_an_upper_bound():
    function, arguments = programs.KERNELS["v5e"]["paged"]
    count = count_model_flops(function, *arguments, sequence_lengths=(64, 65, 1, 128))
    assert count.total == programs.KEY_HEADS * (1 + 2 + 1 + 2) * BLOCK_OF_64_KEYS
    assert count.unaccounted == ()
    bound = count_model_flops(function, *arguments)
    assert bound.total == programs.KEY_HEADS * programs.SEQUENCES * 2 * BLOCK_OF_64_KEYS
    (item,) = bound.unaccounted
    assert "an upper bound; give sequence_lengths=" in item.reason
    wrong = count_model_flops(function, *arguments, sequence_lengths=(64,))
    assert any("the kernel has 4 sequences" in item.reason for item in wrong.unaccounted)
