"""Pallas kernels for GPUs compiled by Mosaic: tensor-core instructions × programs of the mesh."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from mfu_jax.flops.traced.counting import count_model_flops, pallas_kernel_flops
from tests.support import program_kernel_bodies as programs
from tests.support.jax_versions import VERSION

GROUPS, BLOCKS, TILE = 2, 3, 64
ONE = 2 * TILE**3  # one instruction


def kernel(body: Callable[[Any, Any, Any], None]) -> Callable[..., Any]:
    """A kernel of three blocks of two warp groups, in which `body` gets 64 × 64 references."""

    def whole(out_ref: Any) -> None:
        shape = (TILE, TILE)
        pl.run_scoped(
            lambda acc, a, b: body(acc, a, b),
            plgpu.ACC(shape, jnp.float32),
            plgpu.SMEM(shape, jnp.float16),
            plgpu.SMEM(shape, jnp.float16),
            collective_axes="wg",
        )

    options: dict[str, Any] = {"grid": (BLOCKS,), "grid_names": ("block",)}
    options |= {"num_threads": GROUPS, "thread_name": "wg"}
    out = "out_type" if VERSION >= (0, 10) else "out_shape"
    options[out] = jax.ShapeDtypeStruct((TILE, TILE), jnp.float32)
    return plgpu.kernel(whole, **options)  # type: ignore[no-any-return]


def multiply(acc: Any, a: Any, b: Any) -> None:
    plgpu.wgmma(acc, a, b)
    plgpu.wgmma_wait(0)


def test_every_warp_group_of_every_block_multiplies() -> None:
    count = count_model_flops(kernel(multiply))
    assert count.total == BLOCKS * GROUPS * ONE
    assert count.by_dtype == {"f16": count.total}
    assert not count.unaccounted
    assert set(pallas_kernel_flops(kernel(multiply)).values()) == {count.total}


def test_a_slice_is_multiplied_as_far_as_it_goes() -> None:
    half = kernel(lambda acc, a, b: multiply(acc, a.at[:, : TILE // 2], b.at[: TILE // 2]))
    assert count_model_flops(half).total == BLOCKS * GROUPS * ONE // 2


def test_only_the_warp_group_that_a_condition_names_multiplies() -> None:
    def body(acc: Any, a: Any, b: Any) -> None:
        @pl.when(lax.axis_index("wg") == 1)
        def _() -> None:
            multiply(acc, a, b)

    assert count_model_flops(kernel(body)).total == BLOCKS * ONE


def test_a_loop_runs_as_often_as_the_block_says() -> None:
    def body(acc: Any, a: Any, b: Any) -> None:
        def step(_: Any, carry: Any) -> Any:
            multiply(acc, a, b)
            return carry

        lax.fori_loop(0, 2 * lax.axis_index("block") + 1, step, 0)

    count = count_model_flops(kernel(body))
    assert count.total == (1 + 3 + 5) * GROUPS * ONE
    assert not count.unaccounted


@pytest.mark.skipif(VERSION < (0, 10), reason="its signature was another")
def test_jaxs_matmul_for_hopper() -> None:
    function, arguments = programs.KERNELS["h100"]["wgmma"]
    count = count_model_flops(function, *arguments)
    assert count.total == 2 * programs.M * programs.N * programs.K
    assert not count.unaccounted
