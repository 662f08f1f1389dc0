"""Decoders with a dense MLP in every layer."""

from __future__ import annotations

from mfu_jax.flops.analytic.huggingface.common import (
    decoder,
    every,
    heads,
    layer_types,
    model_type,
)
from mfu_jax.flops.analytic.huggingface.fields import Fields
from mfu_jax.flops.analytic.model_configs.layers import FULL, SLIDING
from mfu_jax.flops.analytic.model_configs.model import ModelConfig


@model_type("ministral")
def ministral(c: Fields) -> ModelConfig:
    """Each layer states whether it has the window."""
    windowed = SLIDING if c.optional_size("sliding_window") else FULL
    return decoder(c, layer_types=layer_types(c, lambda _: windowed))


@model_type("bitnet")
def bitnet(c: Fields) -> ModelConfig:
    """A norm before each output projection, in attention and MLP."""
    widths = c.size("hidden_size") + c.size("intermediate_size")
    return decoder(c, further_vectors=c.size("num_hidden_layers") * widths)


@model_type("diffllama")
def diffllama(c: Fields) -> ModelConfig:
    """Differential attention."""
    sizes = heads(c)
    if sizes["num_kv_heads"] % 2:
        c.fail("num_key_value_heads", "expected an even number")
    return decoder(c, differential=True, **sizes)


@model_type("helium")
def helium(c: Fields) -> ModelConfig:
    """Like glm; the output projection is square."""
    sizes = heads(c)
    if sizes["num_query_heads"] * sizes["head_dim"] != c.size("hidden_size"):
        c.fail("head_dim", "expected hidden_size / num_attention_heads")
    return decoder(c, attention_output_bias=False, **sizes)


@model_type("smollm3")
def smollm3(c: Fields) -> ModelConfig:
    """Layers without rotary positions may have a window."""
    windowed = c.flag("use_sliding_window") and c.optional_size("sliding_window")
    interval = c.size("no_rope_layer_interval", 4)
    rotary = c.list_of(int, "no_rope_layers")

    def kind(i: int) -> str:
        has_rope = rotary[i] if rotary and i < len(rotary) else (i + 1) % interval != 0
        return SLIDING if windowed and not has_rope else FULL

    return decoder(c, layer_types=layer_types(c, kind))


@model_type("exaone4")
def exaone4(c: Fields) -> ModelConfig:
    """Norms on queries and keys; windows except in every n-th layer; no bias."""
    # If layers are listed, the pattern is not read: some files spell it "LLLG".
    windowed = c.optional_size("sliding_window") and not c.has("layer_types")
    interval = c.size("sliding_window_pattern", 0, zero=True) if windowed else 0
    kinds = layer_types(c, every(interval, FULL, SLIDING) if interval else lambda _: FULL)
    return decoder(c, qk_norm="head", layer_types=kinds)


@model_type("stablelm")
def stablelm(c: Fields) -> ModelConfig:
    """LayerNorm, gated MLP; norms on queries and keys have one scale per head."""
    return decoder(
        c,
        normalization="layernorm",
        attention_bias=c.flag("use_qkv_bias"),
        attention_output_bias=False,
        norms_per_layer=1 if c.flag("use_parallel_residual") else 2,
        qk_norm="all_heads" if c.flag("qk_layernorm") else "",
        **heads(c, derived=True),
    )
