"""Pallas kernels for GPUs compiled by Mosaic: tensor-core instructions × programs of the mesh."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import pytest
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from mfu_jax.flops.traced.counting import count_model_flops, pallas_kernel_flops
from mfu_jax.flops.traced.kernels import mosaic_gpu
from tests.support import program_kernel_bodies as programs
from tests.support.jax_versions import VERSION
from tests.support.small_functions import shape
from tests.support.tensor_core_kernels import BLOCKS, BODIES, ONE, TILE, kernel, multiply


@pytest.mark.parametrize("name", BODIES)
def test_every_warp_group_that_gets_there_multiplies(name: str) -> None:
    body, products = BODIES[name]
    count = count_model_flops(kernel(body))
    assert count.total == products * ONE
    assert count.by_dtype == {"f16": count.total}
    assert not count.unaccounted
    assert set(pallas_kernel_flops(kernel(body)).values()) == {count.total}


def test_a_slice_is_multiplied_as_far_as_it_goes() -> None:
    half = kernel(lambda acc, a, b: multiply(acc, a.at[:, : TILE // 2], b.at[: TILE // 2]))
    assert count_model_flops(half).total == BODIES["multiply"][1] * ONE // 2


@pytest.mark.skipif(VERSION < (0, 10), reason="its signature was another")
def test_jaxs_matmul_for_hopper() -> None:
    function, arguments = programs.KERNELS["h100"]["wgmma"]
    count = count_model_flops(function, *arguments)
    assert count.total == 2 * programs.M * programs.N * programs.K
    assert not count.unaccounted


def of_blocks(acc: Any, a: Any, b: Any, x: Any, *_: Any) -> None:
    """Each block copies its own rows of an array, and multiplies them."""

    def copy(barrier: Any) -> None:
        rows = pl.ds(jax.lax.axis_index("block") * TILE, TILE)
        plgpu.copy_gmem_to_smem(x.at[rows], a, barrier)
        plgpu.barrier_wait(barrier)
        multiply(acc, a, b)

    pl.run_scoped(copy, plgpu.Barrier(), collective_axes="wg")


@pytest.mark.skipif(VERSION < (0, 10), reason="kernels on a mesh had no operands")
@pytest.mark.parametrize("beyond", [0, 10])
def test_rows_copied_from_beyond_an_array_are_counted_and_said(beyond: int) -> None:
    function = kernel(of_blocks, ((TILE, TILE),))
    rows = shape(BLOCKS * TILE - beyond, TILE, dtype=jnp.float16)
    count = count_model_flops(function, rows)
    assert count.total == BODIES["multiply"][1] * ONE
    assert ["overhang" in item.reason for item in count.unaccounted] == [True] * bool(beyond)


QUERIES, KEYS, HEADS, WIDTH = 192, 128, 2, 64


def attention_backward(q: jax.Array, k: jax.Array, v: jax.Array) -> Any:
    """Two kernels without names, inside the name of tokamax's backward pass."""
    body, _ = BODIES["by_block"]
    with jax.named_scope("tokamax:PallasMosaicGpuFlashAttentionVjp"):
        return (
            kernel(body, ((QUERIES, HEADS, WIDTH),))(q, k, v),
            kernel(body, ((KEYS, HEADS, WIDTH),) * 2)(q, k, v),
        )


@pytest.mark.skipif(VERSION < (0, 10), reason="kernels on a mesh had no operands")
def test_tokamaxs_attention_needs_each_gradient_once_whatever_its_blocks_run() -> None:
    keys = shape(KEYS, HEADS, WIDTH, dtype=jnp.float16)
    arguments = shape(QUERIES, HEADS, WIDTH, dtype=jnp.float16), keys, keys
    count = count_model_flops(attention_backward, *arguments)
    product = 2 * HEADS * QUERIES * KEYS * WIDTH
    assert count.total == 4 * product  # dP and dQ, dV and dK; the scores twice and dP are not
    assert count.by_dtype == {"f16": count.total}
    ran = pallas_kernel_flops(attention_backward, *arguments)
    assert set(ran.values()) == {BODIES["by_block"][1] * ONE}


@pytest.fixture
def attention_of_jax(monkeypatch: pytest.MonkeyPatch) -> Any:
    """`attention_mgpu`, which asks for the version of CUDA."""
    from jax.experimental.pallas.ops.gpu import attention_mgpu

    cuda = SimpleNamespace(cuda_runtime_get_version=lambda: 13000)
    monkeypatch.setattr(attention_mgpu, "cuda_versions", cuda)
    return attention_mgpu


@pytest.mark.skipif(VERSION < (0, 10), reason="kernels on a mesh had no operands")
def test_jaxs_attention_for_hopper_needs_each_gradient_once(attention_of_jax: Any) -> None:
    blocks = dict.fromkeys(
        ("block_q", "block_kv", "block_q_dkv", "block_kv_dkv", "block_q_dq", "block_kv_dq"), 64
    )
    config = attention_of_jax.TuningConfig(**blocks, max_concurrent_steps=2, compute_wgs_bwd=2)
    q, k = (shape(2, 256, heads, WIDTH, dtype=jnp.float16) for heads in (4, 2))

    def loss(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        return attention_of_jax.attention(q, k, v, config).astype(jnp.float32).sum()

    count = count_model_flops(jax.grad(loss, (0, 1, 2)), q, k, k)
    product = 2 * 2 * 4 * 256**2 * WIDTH
    rows = 2 * 2 * 4 * 256 * WIDTH  # o · do of every row, beside the kernels
    assert (count.forward, count.backward) == (2 * product, 4 * product + rows)
    causal = dataclasses.replace(config, causal=True)
    count = count_model_flops(lambda q, k, v: attention_of_jax.attention(q, k, v, causal), q, k, k)
    assert count.total == 2 * product  # 1 + 2 + 3 + 4 of 4 · 4 blocks run
    assert count.skipped["exact"] == 2 * product * 6 // 16


GROUPS, ROWS, VISITS = 4, 512, 11  # visits of eight tiles of 64 rows, at most


def of_visits(acc: Any, a: Any, b: Any, first: Any, *_: Any) -> None:
    """Multiplies in blocks whose entry of the first table is not 0."""
    pl.when(first[jax.lax.axis_index("block")] > 0)(lambda: multiply(acc, a, b))


def of_loops(acc: Any, a: Any, b: Any, first: Any, *_: Any) -> None:
    """Multiplies as often as the first table says."""
    jax.lax.fori_loop(0, first[0], lambda _, carry: [multiply(acc, a, b), carry][1], 0)


def integers(*dims: int) -> jax.ShapeDtypeStruct:
    return shape(*dims, dtype=jnp.int32)


@pytest.mark.skipif(VERSION < (0, 10), reason="kernels on a mesh had no operands")
@pytest.mark.parametrize(
    ("body", "operands", "result"),
    [
        (
            of_visits,
            [*[integers(VISITS)] * 7, shape(ROWS, WIDTH), shape(GROUPS, WIDTH, KEYS)],
            (ROWS, KEYS),
        ),
        (
            of_loops,
            [*[integers(GROUPS)] * 2, shape(WIDTH, ROWS), shape(ROWS, KEYS)],
            (GROUPS, WIDTH, KEYS),
        ),
    ],
)
def test_tokamaxs_grouped_matmul_counts_the_rows_in_a_group_once(
    body: Any, operands: list[jax.ShapeDtypeStruct], result: tuple[int, ...]
) -> None:
    row = 2 * WIDTH * KEYS
    grouped = lambda *arrays: kernel(body, (result,))(*arrays)  # noqa: E731
    count = count_model_flops(grouped, *operands)
    assert (count.total, count.unaccounted) == (ROWS * row, ())
    count = count_model_flops(grouped, *operands, group_sizes=(100, 200, 0, 7))
    assert (count.total, count.unaccounted) == (307 * row, ())
    assert pallas_kernel_flops(grouped, *operands) == {}
    # With other operands it is another kernel, whose work depends on data.
    assert count_model_flops(grouped, *operands[1:]).unaccounted


def test_an_operand_in_shared_bytes_multiplies_in_its_own_dtype() -> None:
    class Part(NamedTuple):
        dtype: Any

    parts = Part(jnp.dtype(jnp.bfloat16)), object()
    assert mosaic_gpu.read_dtype(jnp.dtype(jnp.int8), parts) == jnp.bfloat16
    assert mosaic_gpu.read_dtype(jnp.dtype(jnp.int8), ()) == jnp.int8
