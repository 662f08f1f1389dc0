"""Decoders with multi-head latent attention (MLA), dense or with experts."""

from __future__ import annotations

from typing import Any

from mfu_jax.flops.analytic.huggingface.common import (
    decoder,
    dense_first,
    experts,
    feed_forward_types,
    layer_types,
    needs_trace,
    routed_and_shared,
)
from mfu_jax.flops.analytic.huggingface.fields import Fields
from mfu_jax.flops.analytic.huggingface.registry import model_type
from mfu_jax.flops.analytic.model_configs.layers import INDEXED
from mfu_jax.flops.analytic.model_configs.model import ModelConfig


def latent(c: Fields) -> dict[str, Any]:
    """Heads, ranks and widths of MLA."""
    query_heads = c.size("num_attention_heads")
    nope, rope = c.size("qk_nope_head_dim"), c.size("qk_rope_head_dim")
    if c.has("num_key_value_heads") and query_heads // c.size("num_key_value_heads") != 1:
        c.fail("num_key_value_heads", f"expected num_attention_heads={query_heads}")
    return {
        "attention_type": "mla",
        "num_query_heads": query_heads,
        "num_kv_heads": query_heads,
        "head_dim": nope + rope,
        "q_lora_rank": c.optional_size("q_lora_rank"),
        "kv_lora_rank": c.size("kv_lora_rank"),
        "qk_nope_head_dim": nope,
        "qk_rope_head_dim": rope,
        "v_head_dim": c.size("v_head_dim", c.size("hidden_size") // query_heads),
    }


@model_type("deepseek_v2", "deepseek_v3")
def deepseek(c: Fields) -> ModelConfig:
    """Dense layers first, then experts with shared ones."""
    return decoder(c, **latent(c), **routed_and_shared(c))


@model_type("youtu", "minicpm3")
def youtu(c: Fields) -> ModelConfig:
    """A dense MLP."""
    return decoder(c, **latent(c))


@model_type("glm4_moe_lite")
def glm4_moe_lite(c: Fields) -> ModelConfig:
    """Experts from the second layer on, unless listed."""
    return decoder(c, **latent(c), **_listed_experts(c, 1))


@model_type("axk1")
def axk1(c: Fields) -> ModelConfig:
    """Like deepseek_v3, with a norm after the experts."""
    needs_trace(c, "moe_layer_freq", without=1)
    values = _listed_experts(c, c.size("first_k_dense_replace", 1, zero=True))
    sparse = values["feed_forward_types"].count("moe")
    return decoder(c, **latent(c), **values, further_vectors=sparse * c.size("hidden_size"))


@model_type("deepseek_v32", "glm_moe_dsa")
def deepseek_v32(c: Fields) -> ModelConfig:
    """Like deepseek_v3; an indexer selects each query's keys."""
    values = _listed_experts(c, c.size("first_k_dense_replace", zero=True))
    # transformers does not read mlp_bias.
    return decoder(c, use_bias=False, **latent(c), **values, **_indexer(c))


def _indexer(c: Fields) -> dict[str, Any]:
    """Every layer has its own indexer; one that reuses another layer's needs --trace."""
    needs_trace(c, "index_topk_pattern")
    needs_trace(c, "index_topk_freq", without=1)
    if "shared" in (c.list_of(str, "indexer_types") or []):
        needs_trace(c, "indexer_types")
    return {
        "layer_types": layer_types(c, lambda _: INDEXED),
        "use_indexer": True,
        "indexer_n_heads": c.size("index_n_heads"),
        "indexer_head_dim": c.size("index_head_dim"),
        "indexer_topk": c.size("index_topk"),
    }


def _listed_experts(c: Fields, dense: int) -> dict[str, Any]:
    """Experts where ``mlp_layer_types`` lists them, else after `dense` layers; also shared ones."""
    return {
        "feed_forward_types": feed_forward_types(c, dense_first(dense)),
        "shared_experts": c.optional_size("n_shared_experts"),
        **experts(c, "n_routed_experts"),
    }
