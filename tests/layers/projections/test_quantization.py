"""Quantised matmuls against qwix's own quantised training, and against arithmetic."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P
from mfu_jax.layers.projections.grouped_matmuls import (
    gradient_of_matrices,
    gradient_of_rows,
    grouped_product,
)
from mfu_jax.layers.projections.quantization import (
    RECIPES,
    Quantization,
    Shard,
    quantized_dot,
    quantized_ragged_dot,
    shards_of,
)

from tests.support.floats import assert_close_as_float32

pytest.importorskip("qwix")


def recipe(name: str, spread: str = "absmax") -> Quantization:
    operands, gradients = RECIPES[name]
    return Quantization(
        operands=operands, gradients=gradients, activation_range=spread, weight_range=spread
    )


def normal(seed: int, *shape: int) -> jax.Array:
    return jax.random.normal(jax.random.key(seed), shape).astype(jnp.bfloat16)


def assert_same(ours: tuple[Any, Any], theirs: tuple[Any, Any], dy: jax.Array) -> None:
    """Results and gradients, bit by bit."""
    (y, back), (want, want_back) = ours, theirs
    for got, wanted in zip((y, *back(dy)), (want, *want_back(dy)), strict=True):
        assert got.dtype == wanted.dtype
        assert (got == wanted).all()


@pytest.mark.full(
    keep=[
        "fixed,-2,2-fp8",
        "fixed,-2,2-fp8_e5m2",
        "fixed,-2,2-nanoo_fp8",
        "fixed,-2,2-fp8_full",
        "absmax-fp8_full",
        "absmax-nanoo_fp8",
        "absmax-fp8_e5m2",
    ]
)
@pytest.mark.parametrize("name", RECIPES)
@pytest.mark.parametrize("spread", ["absmax", "fixed,-2,2"])
def test_a_projection_is_qwixs_to_the_bit(name: str, spread: str) -> None:
    from qwix._src.core.dot_general_qt import DotGeneralQtConfig, dot_general_qt

    x, kernel, dy = normal(0, 2, 5, 3, 8), normal(1, 3, 8, 4, 6), normal(2, 2, 5, 4, 6)
    operands, gradients = map(jnp.dtype, RECIPES[name])
    config = DotGeneralQtConfig(
        lhs_qtype=operands,
        rhs_qtype=operands,
        lhs_calibration_method=spread,
        rhs_calibration_method=spread,
        dlhs_grad_qtype=gradients,
        drhs_grad_qtype=gradients,
    )
    numbers = (((2, 3), (0, 1)), ((), ()))
    theirs = jax.vjp(lambda x, k: dot_general_qt(x, k, numbers, config), x, kernel)
    ours = jax.vjp(lambda x, k: quantized_dot(x, k, 2, recipe(name, spread)), x, kernel)
    assert_same(ours, theirs, dy)


@pytest.mark.full(keep=["fp8_full", "fp8_e5m2", "nanoo_fp8"])
@pytest.mark.parametrize("name", RECIPES)
def test_experts_are_qwixs_to_the_bit(name: str) -> None:
    from qwix._src.core.ragged_dot_qt import RaggedDotQtConfig, ragged_dot_qt

    rows, kernels, dy = normal(0, 10, 8), normal(1, 3, 8, 6), normal(2, 10, 6)
    sizes = jnp.array([3, 0, 7])
    operands, gradients = map(jnp.dtype, RECIPES[name])
    config = RaggedDotQtConfig(
        lhs_qtype=operands,
        rhs_qtype=operands,
        dlhs_grad_qtype=gradients,
        drhs_grad_qtype=gradients,
    )
    theirs = jax.vjp(lambda x, k: ragged_dot_qt(x, k, sizes, config), rows, kernels)
    ours = jax.vjp(lambda x, k: quantized_ragged_dot(x, k, sizes, recipe(name)), rows, kernels)
    assert_same(ours, theirs, dy)


@pytest.mark.full
@pytest.mark.parametrize("name", ["int8", "fp8_full"])
def test_experts_on_tpus_multiply_the_same_rounded_values(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for kernel in (gradient_of_matrices, gradient_of_rows, grouped_product):
        name_in = f"mfu_jax.layers.projections.quantization.{kernel.__name__}"
        monkeypatch.setattr(name_in, functools.partial(kernel, interpret=True))
    rows, kernels, dy = normal(0, 128, 8), normal(1, 3, 8, 6), normal(2, 128, 6)
    sizes = jnp.array([40, 0, 80])
    results = []
    for on_tpu in (False, True):
        y, back = jax.vjp(
            functools.partial(
                quantized_ragged_dot, sizes=sizes, recipe=recipe(name), on_tpu=on_tpu
            ),
            rows.astype(jnp.float32),
            kernels.astype(jnp.float32),
        )
        results.append((y[:120], *back(dy.astype(jnp.float32).at[120:].set(0))))
    for got, want in zip(results[1], results[0], strict=True):
        assert_close_as_float32(got, want, terms=128)


@pytest.mark.parametrize(("name", "loads"), [("nanoo_fp8", "bf16"), ("fp8_full", "f8E4M3FN")])
def test_kernels_on_tpus_load_no_types_of_amd(name: str, loads: str) -> None:
    def loss(rows: jax.Array, kernels: jax.Array) -> jax.Array:
        sizes = jnp.array([64, 64])
        return quantized_ragged_dot(rows, kernels, sizes, recipe(name), on_tpu=True).sum()

    shapes = (jax.ShapeDtypeStruct(shape, "bfloat16") for shape in ((128, 128), (2, 128, 128)))
    text = jax.jit(jax.grad(loss, (0, 1))).trace(*shapes).lower(lowering_platforms=("tpu",))
    calls = [line for line in text.as_text().splitlines() if "@tpu_custom_call" in line]
    assert len(calls) == 2
    for call in calls:
        assert loads in call
        assert "FNUZ" not in call


def test_kernels_on_tpus_scale_their_sums_themselves() -> None:
    """As MaxText's do: no pass over the products comes after them."""

    def product(rows: jax.Array, kernels: jax.Array) -> jax.Array:
        return quantized_ragged_dot(rows, kernels, jnp.array([64, 64]), recipe("fp8_full"), True)

    shapes = (jax.ShapeDtypeStruct(shape, "bfloat16") for shape in ((128, 256), (2, 256, 384)))
    text = jax.jit(product).trace(*shapes).lower(lowering_platforms=("tpu",)).as_text()
    made = [line for line in text.splitlines() if line.rstrip().endswith("tensor<128x384xbf16>")]
    assert len(made) == 2  # the kernel's result, which is returned
    assert "@tpu_custom_call" in made[0]
    assert "return" in made[1]


def test_whole_experts_are_gathered_last() -> None:
    split = P(("expert", "fsdp", "context"), ("tensor", "fsdp_transpose"), None)
    assert shards_of(split) == (Shard(1, ("fsdp_transpose",)), Shard(0, ("fsdp", "context")))
    assert shards_of(P("expert", None, "tensor")) == ()


@pytest.mark.full
def test_int8_rounds_to_127_steps_of_the_largest_value() -> None:
    x, kernel = jnp.array([[127.5, 3.4]]), jnp.array([[127.5], [127.5]])
    # Scales are 1 (the range is ±127.5), so that 127.5 → 127 and 3.4 → 3.
    assert quantized_dot(x, kernel, 1, recipe("int8")).tolist() == [[(127 + 3) * 127.0]]


@pytest.mark.full
def test_a_fixed_range_clips_and_passes_no_gradient_beyond_it() -> None:
    of = recipe("fp8", "fixed,-2,2")
    x, kernel = jnp.array([[1.0, 5.0]]), jnp.ones((2, 1))
    y, back = jax.vjp(lambda x: quantized_dot(x, kernel, 1, of), x)
    assert y.item() == pytest.approx(1 + 2)
    assert back(jnp.ones((1, 1)))[0][0].tolist() == pytest.approx([1.0, 0.0])
