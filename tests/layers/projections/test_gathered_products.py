"""Weights that are gathered before their products: when, in which dtype, and the same numbers."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from mfu_jax.layers.projections.gathered_products import gathered_product

from mfu_jax.errors import UserError
from mfu_jax.trainer.config import pyconfig
from mfu_jax.trainer.planned import planned_step
from tests.campaigns.meshes import (
    KINDS,
    MESHES,
    STEPS_OF_A_TEST,
    TOKENS,
    extra,
    one_device,
    trained,
)
from tests.support.floats import assert_close_as_float32
from tests.support.platforms import resolved_on

SIZES = "emb_dim=64 mlp_dim=128 num_decoder_layers=2 attention=dot_product dtype=bfloat16".split()


def lowered(*keys: str, devices: int = 8) -> str:
    words = [*SIZES, "per_device_batch_size=1", *keys]
    text: str = planned_step.lower(words, jax.devices()[:devices]).as_text()
    return text


@pytest.mark.full
@pytest.mark.parametrize(
    ("policy", "gathers"),
    [
        ("full", 3 * 2),  # forward, again, and for the input's gradient; two matrices of this shape
        ("none", 2 * 2),
    ],
)
def test_products_read_whole_weights_and_gradients_are_split(policy: str, gathers: int) -> None:
    text = lowered("weight_gathers=first", "fsdp=8", f"remat_policy={policy}")
    lines = [line.strip() for line in text.splitlines()]
    kernels = [line for line in lines if line.endswith("tensor<64x128xbf16>")]
    whole = [line for line in kernels if '<@mesh, [{}, {"tensor"}]>' in line]
    axes = '{"fsdp", "fsdp_transpose", "context", "expert"}'
    split = [line for line in kernels if f"<@mesh, [{axes}" in line]
    assert len(split) == 2
    assert len(whole) == gathers
    products = [line for line in lines if "dot_general" in line]
    for name in (line.split(" = ")[0] for line in whole):
        assert any(f", {name}, contracting_dims" in product for product in products)


@pytest.mark.full
@pytest.mark.parametrize("mesh", [[], ["data=8"], ["data=2", "tensor=2", "pipeline=2"]])
def test_without_split_weights_the_program_is_the_same(mesh: list[str]) -> None:
    devices = 8 if mesh else 1
    texts = [lowered(f"weight_gathers={how}", *mesh, devices=devices) for how in ("first", "xla")]
    assert texts[0] == texts[1]


@pytest.mark.full
def test_the_backward_pass_keeps_the_part_of_a_weight() -> None:
    axes = ("fsdp", "fsdp_transpose", "context", "expert")
    mesh = jax.make_mesh((8, 1, 1, 1), axes, axis_types=(jax.sharding.AxisType.Auto,) * 4)
    stored = NamedSharding(mesh, P(axes, None))
    weight = jax.device_put(jnp.ones((64, 24)), stored)
    x = jax.device_put(jnp.ones((8, 64), jnp.bfloat16), NamedSharding(mesh, P("fsdp")))

    def product(x: jax.Array, weight: jax.Array) -> jax.Array:
        return gathered_product(
            jnp.matmul, x, weight, "first", axes=("embed", "norm"), dtype=jnp.dtype("bfloat16")
        )

    with jax.set_mesh(mesh):
        _, pull = jax.vjp(product, x, weight)
        kept = [leaf for leaf in jax.tree.leaves(pull) if leaf.shape == weight.shape]
        _, gradient = pull(jnp.ones((8, 24), jnp.bfloat16))
    assert kept
    assert all(leaf.sharding.shard_shape(leaf.shape) == (8, 24) for leaf in kept)
    assert gradient.sharding.shard_shape(gradient.shape) == (8, 24)
    assert gradient.dtype == weight.dtype
    np.testing.assert_array_equal(gradient, np.full((64, 24), 8.0))


@pytest.mark.full
@pytest.mark.parametrize(
    ("kind", "axes"),
    [
        ("dense", "fsdp"),
        ("dense", "context"),
        ("dense", "fsdp-context-tensor"),
        ("dense", "pipeline-fsdp-tensor"),
        ("experts", "data-fsdp-expert"),
    ],
)
def test_a_mesh_with_gathered_weights_trains_as_one_device(kind: str, axes: str) -> None:
    losses, flops = trained({**KINDS[kind], **MESHES[axes], "weight_gathers": "first"}, 8)
    expected, of_one = one_device(kind)
    assert_close_as_float32(losses, expected, terms=STEPS_OF_A_TEST * TOKENS)
    more = sum(extra(kind, axes).values())
    assert flops.executed.total * 8 == of_one.executed.total + more
    assert flops.ledger.residual == 0


@pytest.mark.full
@pytest.mark.parametrize("keys", [{"remat_policy": "full"}, {"lora_rank": 4}], ids=str)
def test_gathers_change_no_loss_and_no_flop(keys: dict[str, Any]) -> None:
    ways = [trained({"fsdp": 8, **keys, "weight_gathers": how}, 8) for how in ("first", "xla")]
    (first, flops), (xla, of_xla) = ways
    assert_close_as_float32(first, xla, terms=STEPS_OF_A_TEST * TOKENS)
    assert flops.executed.total == of_xla.executed.total
    assert flops.executed.rematerialized == of_xla.executed.rematerialized
    assert flops.ledger.residual == 0


@pytest.mark.parametrize(
    ("platform", "keys", "how"),
    [
        ("tpu", {"remat_policy": "full"}, "first"),
        ("tpu", {"remat_policy": "save_out_proj"}, "first"),
        ("tpu", {"remat_policy": "custom", "context": "device"}, "first"),
        ("tpu", {"remat_policy": "custom", "mlpwi_0": "offload"}, "xla"),
        ("tpu", {"remat_policy": "names", "remat_save_names": ["mlpwi_0"]}, "xla"),
        ("tpu", {"remat_policy": "minimal"}, "xla"),
        ("tpu", {"remat_policy": "minimal_offloaded"}, "xla"),
        ("tpu", {"remat_policy": "none"}, "xla"),
        ("tpu", {"remat_policy": "none", "weight_gathers": "first"}, "first"),
        ("tpu", {"remat_policy": "full", "weight_gathers": "xla"}, "xla"),
        ("tpu", {"remat_policy": "full", "pipeline": 2}, "xla"),
        ("cuda", {"remat_policy": "full"}, "xla"),
        ("cpu", {"remat_policy": "full"}, "xla"),
    ],
    ids=str,
)
def test_auto_gathers_first_where_it_pays(platform: str, keys: dict[str, Any], how: str) -> None:
    assert resolved_on(platform, {"num_decoder_layers": 2, **keys}).weight_gathers == how


def test_another_word_is_an_error() -> None:
    with pytest.raises(UserError, match="weight_gathers"):
        pyconfig.from_mapping({}, overrides={"weight_gathers": "never"})
