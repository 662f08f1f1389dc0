"""Pallas kernels for GPUs compiled by Mosaic: tensor-core instructions × programs of the mesh."""

from __future__ import annotations

import pytest

from mfu_jax.flops.traced.counting import count_model_flops, pallas_kernel_flops
from tests.support import program_kernel_bodies as programs
from tests.support.jax_versions import VERSION
from tests.support.tensor_core_kernels import BODIES, ONE, TILE, kernel, multiply


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
