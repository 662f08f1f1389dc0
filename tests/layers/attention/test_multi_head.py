"""Queries, keys and values in one product, against three."""

import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from mfu_jax.layers.attention.multi_head import Attention, AttentionSpec
from mfu_jax.layers.building import Inputs

from mfu_jax.errors import UserError
from mfu_jax.trainer.config import pyconfig
from tests.support.floats import assert_close_as_float32
from tests.support.tiny_layers import tiny_builder

THREE = ("query", "key", "value")


def _layer(*, fused: bool) -> Attention:
    build = tiny_builder(8, rngs=nnx.Rngs(params=1))
    return AttentionSpec(heads=4, kv_heads=4, head_dim=4, bias=True, fused=fused).make(build)


@pytest.mark.full
def test_one_product_gives_what_three_give() -> None:
    three, one = _layer(fused=False), _layer(fused=True)
    for part in ("kernel", "bias"):
        joined = [getattr(getattr(three, name), part)[...] for name in THREE]
        setattr(one.qkv, part, nnx.Param(jnp.stack(joined, axis=-3)))
    one.out = three.out
    tokens = jnp.arange(32).reshape(4, 8)
    read = Inputs(tokens=tokens, positions=tokens, segment_ids=jnp.ones_like(tokens))
    x = jax.random.normal(jax.random.key(0), (4, 8, 8))
    assert_close_as_float32(one(x, read), three(x, read), terms=8 * 16)
    products = [
        str(jax.make_jaxpr(lambda x, layer=layer: layer(x, read))(x)).count("dot_general[")
        for layer in (one, three)
    ]
    assert products == [4, 6]  # scores, their sum of values, and the result's


def test_gpt3_has_it_and_other_numbers_of_heads_cannot() -> None:
    """As MaxText's gpt3-175b.yml says."""
    assert pyconfig.load(["model_name=gpt3-175b"]).fused_qkv
    assert not pyconfig.load(["model_name=llama2-7b"]).fused_qkv
    assert pyconfig.load(["model_name=llama2-7b", "fused_qkv=true"]).fused_qkv
    with pytest.raises(UserError, match="expected as many of each"):
        pyconfig.load(["model_name=llama3-8b", "fused_qkv=true"])
