"""Products by group against a loop over the groups; the TPU's kernel runs interpreted."""

from __future__ import annotations

import re
from functools import partial
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from mfu_jax.layers.projections.grouped_matmuls import (
    gradient_of_matrices,
    gradient_of_rows,
    grouped_dot,
)

from mfu_jax.trainer.step.state import resolve_attention
from tests.support.tiny_models import gradient, sized

ONE_DEVICE = {"context": 1}
ROWS, IN, OUT = 256, 8, 16
SIZES = (100, 0, 60)  # 96 rows belong to no group
RANDOM = np.random.default_rng(0)
X, K, DY = (
    RANDOM.normal(size=shape).astype(np.float32)
    for shape in ((ROWS, IN), (len(SIZES), IN, OUT), (ROWS, OUT))
)


@pytest.mark.parametrize("on_tpu", [False, True])
def test_product_and_gradients_are_those_of_a_loop_over_the_groups(on_tpu: bool) -> None:
    def multiply(rows: jax.Array, kernels: jax.Array) -> jax.Array:
        return grouped_dot(rows, kernels, jnp.array(SIZES), on_tpu=on_tpu, interpret=True)

    @jax.jit  # as one program
    def product_and_gradients(rows: jax.Array, kernels: jax.Array, dy: jax.Array) -> tuple:
        y, backward = jax.vjp(multiply, rows, kernels)
        return y, *backward(dy)

    y, drows, dkernels = map(np.asarray, product_and_gradients(X, K, DY))
    want_y, want_rows = np.zeros((ROWS, OUT)), np.zeros((ROWS, IN))
    first = 0
    for group, size in enumerate(SIZES):
        its = slice(first, first + size)
        want_y[its] = X[its] @ K[group]
        want_rows[its] = DY[its] @ K[group].T
        np.testing.assert_allclose(dkernels[group], X[its].T @ DY[its], atol=1e-4)
        first += size
    np.testing.assert_allclose(y[:first], want_y[:first], atol=1e-4)
    np.testing.assert_allclose(drows, want_rows, atol=1e-4)


def test_the_kernels_read_nothing_past_the_last_group() -> None:
    """On a device of several, those rows come from products that did not write them."""
    last = sum(SIZES)
    rows, dy = X.copy(), DY.copy()
    rows[last:] = dy[last:] = np.nan
    multiply = partial(grouped_dot, sizes=jnp.array(SIZES), on_tpu=True, interpret=True)

    @jax.jit  # as one program
    def gradients(rows: jax.Array, dy: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        y, backward = jax.vjp(multiply, rows, K)
        return y, *backward(dy)

    y, drows, dkernels = gradients(rows, dy)
    assert np.isfinite(y[:last]).all()
    assert np.isfinite(dkernels).all()
    assert (np.asarray(drows)[last:] == 0).all()


@pytest.mark.parametrize(
    ("dtype", "out"), [("int8", 1024), ("float8_e4m3fn", 640), ("bfloat16", 96)]
)
def test_the_gradient_of_rows_is_exact_in_narrow_types_and_tiles_that_end_within(dtype, out):
    """Tiles of 512: two, one and a quarter, and a part of one; small integers are exact."""
    dy = RANDOM.integers(-4, 5, size=(ROWS, out)).astype(np.float32)
    matrices = RANDOM.integers(-4, 5, size=(len(SIZES), 200, out)).astype(np.float32)

    @jax.jit  # as one program
    def gradient(dy: jax.Array, matrices: jax.Array) -> jax.Array:
        narrow = dy.astype(dtype), matrices.astype(dtype)
        return gradient_of_rows(*narrow, jnp.array(SIZES), jnp.dtype("float32"), interpret=True)

    got = gradient(dy, matrices)
    want = np.zeros((ROWS, 200), np.float32)
    want[:100], want[100:160] = dy[:100] @ matrices[0].T, dy[100:160] @ matrices[2].T
    np.testing.assert_array_equal(got, want)


def test_xla_has_no_grouped_matmul_left_to_expand_on_tpus() -> None:
    """On TPU7x, it multiplies every row by every matrix from libtpu 0.0.45 on."""
    product = partial(grouped_dot, on_tpu=True)
    shapes = [jax.ShapeDtypeStruct(s, jnp.bfloat16) for s in ((256, 128), (2, 128, 384))]
    traced = jax.jit(product).trace(*shapes, jax.ShapeDtypeStruct((2,), jnp.int32))
    text = traced.lower(lowering_platforms=("tpu",)).as_text()
    assert "ragged_dot" not in text
    assert text.count("@tpu_custom_call") == 1


def test_no_gradient_on_tpus_transposes_the_matrices() -> None:
    def loss(rows: jax.Array, kernels: jax.Array) -> jax.Array:
        return grouped_dot(rows, kernels, jnp.array([256]), on_tpu=True).sum()

    traced = jax.jit(jax.grad(loss)).trace(jnp.ones((256, 128)), jnp.ones((1, 128, 384)))
    text = traced.lower(lowering_platforms=("tpu",)).as_text()
    assert "stablehlo.transpose" not in text
    assert text.count("@tpu_custom_call") == 1


@pytest.mark.parametrize(("rows", "kernels"), [(256, 1), (100, 0)])
def test_a_tpu_program_has_the_kernel_where_it_can_split_the_rows(rows: int, kernels: int) -> None:
    def loss(k: jax.Array) -> jax.Array:
        return grouped_dot(jnp.ones((rows, 128)), k, jnp.array([rows]), on_tpu=True).sum()

    traced = jax.jit(jax.grad(loss)).trace(jnp.ones((1, 128, 128)))
    text = traced.lower(lowering_platforms=("tpu",)).as_text()
    assert text.count("@tpu_custom_call") == kernels


@pytest.mark.parametrize(
    ("rows", "contracted", "tile"),
    [
        (8192, 4096, (256, 4096)),
        (8192, 14336, (256, 3584)),
        (4096, 14336, (128, 3584)),  # 512 rows for each of 8 groups
        (8192, 8200, (256, 512)),  # no part of it is whole lanes
    ],
)
def test_a_contraction_is_cut_into_equal_tiles(rows: int, contracted: int, tile: tuple[int, int]):
    def product(x: jax.Array, k: jax.Array) -> jax.Array:
        return grouped_dot(x, k, jnp.full(8, rows // 8), on_tpu=True)

    shapes = [
        jax.ShapeDtypeStruct(s, jnp.bfloat16) for s in ((rows, contracted), (8, contracted, 1024))
    ]
    text = str(jax.make_jaxpr(product)(*shapes))
    found = re.search(
        r"block_shape=\(Blocked\(block_size=(\d+)\), Blocked\(block_size=(\d+)\)", text
    )
    assert tuple(map(int, found.groups())) == tile


def test_columns_that_tiles_do_not_divide_are_in_as_few_tiles_as_others() -> None:
    """Each tile reads all rows again: DeepSeek-V2-Lite's 1,408 columns in 3 tiles, not 11."""
    shapes = [jax.ShapeDtypeStruct(s, jnp.bfloat16) for s in ((8192, 2048), (8, 2048, 1408))]
    product = partial(grouped_dot, sizes=jnp.full(8, 1024), on_tpu=True)
    text = str(jax.make_jaxpr(product)(*shapes))
    assert re.search(r"grid=\((\d+),", text)[1] == "3"


@pytest.mark.parametrize(("groups", "tile"), [(1, 512), (4, 256), (16, 128), (64, 128)])
def test_short_groups_have_small_tiles(groups: int, tile: int) -> None:
    """Of 4096 rows; four tiles a group, where that leaves 128 rows a tile."""

    def gradient(rows: jax.Array) -> jax.Array:
        return gradient_of_matrices(rows, rows, jnp.zeros(groups, jnp.int32), rows.dtype)

    text = str(jax.make_jaxpr(gradient)(jnp.zeros((4096, 512), jnp.bfloat16)))
    assert re.search(r"block_shape=\(Blocked\(block_size=(\d+)\)", text)[1] == str(tile)


@pytest.mark.full
def test_stages_of_a_pipeline_are_multiplied_one_by_one() -> None:
    """A TPU's grouped kernels take no dimension of a batch."""

    def loss(rows: jax.Array, kernels: jax.Array, interpret: bool = True) -> jax.Array:
        grouped = partial(grouped_dot, on_tpu=True, interpret=interpret)
        return (jax.vmap(grouped)(rows, kernels, sizes) ** 2).sum()

    sizes = jnp.array([SIZES, SIZES[::-1]])
    rows, kernels = jnp.stack([X, 2 * X]), jnp.stack([K, K + 1])
    got = jax.jit(jax.grad(loss, argnums=(0, 1)))(rows, kernels)
    alone = jax.jit(jax.grad(lambda *of: (jax.lax.ragged_dot(*of) ** 2).sum(), argnums=(0, 1)))
    for stage in range(2):
        want = alone(rows[stage], kernels[stage], sizes[stage])
        for mine, theirs in zip(got, want, strict=True):
            np.testing.assert_allclose(mine[stage], theirs, rtol=1e-4, atol=1e-3)
    traced = jax.jit(partial(loss, interpret=False)).trace(rows, kernels)
    text = traced.lower(lowering_platforms=("tpu",)).as_text()
    calls = [line for line in text.split("\n") if "@tpu_custom_call" in line]
    assert calls
    assert all(f"-> tensor<{ROWS}x{OUT}xf32>" in call for call in calls)


@pytest.mark.full
@pytest.mark.parametrize(("asked", "has_kernel"), [("auto", True), ("xla", False)])
def test_experts_beside_any_attention_take_the_kernel_on_tpus(asked: str, has_kernel: bool) -> None:
    chip = SimpleNamespace(devices=np.array([SimpleNamespace(platform="tpu")]), shape=ONE_DEVICE)
    c = resolve_attention(sized("mixtral-8x7b", grouped_matmul=asked), chip)
    assert c.attention == "dot_product"
    train, arguments = gradient(c)
    text = jax.jit(train).trace(*arguments).lower(lowering_platforms=("tpu",)).as_text()
    assert ("@tpu_custom_call" in text) == has_kernel
