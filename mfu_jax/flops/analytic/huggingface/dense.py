"""Decoders with a dense MLP in every layer."""

from __future__ import annotations

from mfu_jax.flops.analytic.huggingface.common import (
    PLAIN_MLP,
    decoder,
    equal_heads,
    every,
    heads,
    layer_types,
    refuse,
)
from mfu_jax.flops.analytic.huggingface.fields import Fields
from mfu_jax.flops.analytic.huggingface.registry import model_type
from mfu_jax.flops.analytic.model_configs.layers import FULL, SLIDING
from mfu_jax.flops.analytic.model_configs.model import ModelConfig


@model_type("llama", "granite", "mistral", "phi3", "gemma")
def llama(c: Fields) -> ModelConfig:
    """RMSNorm, rotary positions, gated MLP; a window in every layer if the config has one."""
    return decoder(c, bidirectional=c.get("use_bidirectional_attention") is True)


@model_type("arcee")
def arcee(c: Fields) -> ModelConfig:
    """A plain MLP with squared ReLU."""
    return decoder(c, mlp_activations=PLAIN_MLP)


@model_type("glm")
def glm(c: Fields) -> ModelConfig:
    """The output projection has no bias."""
    return decoder(c, attention_output_bias=False)


@model_type("helium")
def helium(c: Fields) -> ModelConfig:
    """As glm; the output projection is square."""
    sizes = heads(c)
    if sizes["num_query_heads"] * sizes["head_dim"] != c.size("hidden_size"):
        c.fail("head_dim", "expected hidden_size / num_attention_heads")
    return decoder(c, attention_output_bias=False, **sizes)


@model_type("seed_oss")
def seed_oss(c: Fields) -> ModelConfig:
    """The output projection's bias has its own field."""
    return decoder(c, attention_output_bias=c.flag("attention_out_bias"))


@model_type("ernie4_5")
def ernie4_5(c: Fields) -> ModelConfig:
    """One switch for every bias."""
    bias = c.flag("use_bias")
    return decoder(c, attention_bias=bias, use_bias=bias)


@model_type("glm4")
def glm4(c: Fields) -> ModelConfig:
    """Norms before and after attention and MLP."""
    return decoder(c, attention_output_bias=False, norms_per_layer=4)


@model_type("olmo")
def olmo(c: Fields) -> ModelConfig:
    """Norms without weights."""
    return decoder(c, normalization="none")


@model_type("olmo2")
def olmo2(c: Fields) -> ModelConfig:
    """Norms over all heads' queries and keys."""
    return decoder(c, qk_norm="all_heads")


@model_type("olmo3")
def olmo3(c: Fields) -> ModelConfig:
    """As olmo2; three layers with a window, then a full one."""
    return decoder(c, qk_norm="all_heads", layer_types=layer_types(c, every(4, FULL, SLIDING)))


@model_type("qwen2")
def qwen2(c: Fields) -> ModelConfig:
    """A bias on q, k and v only; windows, if used, in the layers from max_window_layers."""
    return decoder(
        c, attention_bias=True, attention_output_bias=False, layer_types=_qwen_layer_types(c)
    )


@model_type("qwen3")
def qwen3(c: Fields) -> ModelConfig:
    """Norms on queries and keys."""
    return decoder(c, qk_norm="head", layer_types=_qwen_layer_types(c))


def _qwen_layer_types(c: Fields) -> list[str]:
    windowed = c.flag("use_sliding_window") and c.optional_size("sliding_window")
    first = c.size("max_window_layers", zero=True) if windowed else c.size("num_hidden_layers")
    return layer_types(c, lambda i: SLIDING if i >= first else FULL)


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
    # Where layers are listed, the pattern is not read: some files spell it "LLLG".
    windowed = c.optional_size("sliding_window") and not c.has("layer_types")
    interval = c.size("sliding_window_pattern", 0, zero=True) if windowed else 0
    kinds = layer_types(c, every(interval, FULL, SLIDING) if interval else lambda _: FULL)
    return decoder(c, qk_norm="head", layer_types=kinds)


@model_type("apertus")
def apertus(c: Fields) -> ModelConfig:
    """A plain MLP whose activation (xIELU) has two learned scalars."""
    return decoder(c, mlp_activations=PLAIN_MLP, qk_norm="head", activation_weights=2)


@model_type("cohere")
def cohere(c: Fields) -> ModelConfig:
    """Attention and MLP in parallel after one norm."""
    qk_norm = "all_heads" if c.flag("use_qk_norm") else ""
    return decoder(c, norms_per_layer=1, qk_norm=qk_norm)


@model_type("cohere2")
def cohere2(c: Fields) -> ModelConfig:
    """As cohere; three layers with a window, then a full one."""
    interval = c.size("sliding_window_pattern", 4)
    kinds = layer_types(c, every(interval, FULL, SLIDING))
    return decoder(c, norms_per_layer=1, layer_types=kinds)


@model_type("gpt2")
def gpt2(c: Fields) -> ModelConfig:
    """LayerNorm, learned positions, a bias everywhere except in the head, plain MLP."""
    refuse(c, "add_cross_attention")
    return _layer_norm_decoder(
        c,
        position_embedding="learned",
        trainable_position_size=c.size("n_positions"),
        mlp_dim=c.size("n_inner", 4 * c.size("hidden_size")),
        **equal_heads(c),
    )


@model_type("gptj")
def gptj(c: Fields) -> ModelConfig:
    """Attention (without bias) and MLP in parallel after one norm; the head has a bias."""
    return _layer_norm_decoder(
        c,
        attention_bias=False,
        norms_per_layer=1,
        head_bias=True,
        mlp_dim=c.size("n_inner", 4 * c.size("hidden_size")),
        **equal_heads(c),
    )


@model_type("gpt_neox")
def gpt_neox(c: Fields) -> ModelConfig:
    """LayerNorm, rotary positions, two norms even where attention and MLP are parallel."""
    bias = c.flag("attention_bias", default=True)
    return _layer_norm_decoder(c, attention_bias=bias, **equal_heads(c))


@model_type("opt")
def opt(c: Fields) -> ModelConfig:
    """Learned positions (two rows more than their number); the table may be narrower."""
    bias = c.flag("enable_bias", default=True)
    final = c.flag("do_layer_norm_before", default=True) and not c.flag("_remove_final_layer_norm")
    affine = c.flag("layer_norm_elementwise_affine", default=True)
    return _layer_norm_decoder(
        c,
        attention_bias=bias,
        use_bias=bias,
        normalization="layernorm" if affine else "none",
        final_norm=final,
        position_embedding="learned",
        trainable_position_size=c.size("max_position_embeddings") + 2,
        token_width=c.size("word_embed_proj_dim", c.size("hidden_size")),
        mlp_dim=c.size("ffn_dim"),
        **equal_heads(c),
    )


@model_type("xglm")
def xglm(c: Fields) -> ModelConfig:
    """Sinusoidal positions, which have no weights."""
    refuse(c, "add_cross_attention")
    return _layer_norm_decoder(c, mlp_dim=c.size("ffn_dim"), **equal_heads(c))


@model_type("bloom")
def bloom(c: Fields) -> ModelConfig:
    """ALiBi positions, a norm after the embedding, an MLP four times as wide."""
    if c.has("n_embed"):
        c = c.with_values(hidden_size=c.size("n_embed"))
    width = c.size("hidden_size")
    return _layer_norm_decoder(c, embedding_norm=True, mlp_dim=4 * width, **equal_heads(c))


@model_type("mpt")
def mpt(c: Fields) -> ModelConfig:
    """ALiBi positions, norms and projections without bias, an MLP four times as wide."""
    return decoder(
        c,
        mlp_activations=PLAIN_MLP,
        attention_bias=False,
        mlp_dim=4 * c.size("hidden_size"),
        **equal_heads(c),
    )


@model_type("phi")
def phi(c: Fields) -> ModelConfig:
    """Attention and MLP in parallel after one norm; a bias everywhere, in the head too."""
    qk_norm = c.flag("qk_layernorm")
    return _layer_norm_decoder(
        c,
        norms_per_layer=1,
        head_bias=True,
        qk_norm="head" if qk_norm else "",
        qk_norm_bias=qk_norm,
        **heads(c),
    )


@model_type("persimmon")
def persimmon(c: Fields) -> ModelConfig:
    """LayerNorm on queries and keys, a bias everywhere but in the head."""
    qk_norm = c.flag("qk_layernorm", default=True)
    return _layer_norm_decoder(
        c, qk_norm="head" if qk_norm else "", qk_norm_bias=qk_norm, **equal_heads(c)
    )


@model_type("falcon")
def falcon(c: Fields) -> ModelConfig:
    """One key/value head, several, or as many as queries; norms by the kind of block."""
    if c.has("n_embed"):
        c = c.with_values(hidden_size=c.size("n_embed"))
    sizes = equal_heads(c)
    grouped = c.flag("new_decoder_architecture")
    if grouped:
        sizes["num_kv_heads"] = c.size("num_kv_heads", sizes["num_query_heads"])
        if sizes["num_query_heads"] % sizes["num_kv_heads"]:
            c.fail("num_kv_heads", "expected a divisor of num_attention_heads")
    elif c.flag("multi_query", default=True):
        sizes["num_kv_heads"] = 1
    parallel = c.flag("parallel_attn", default=True)
    in_parallel = c.size("num_ln_in_parallel_attn", 2 if grouped else 1)
    bias = c.flag("bias")
    return _layer_norm_decoder(
        c,
        attention_bias=bias,
        use_bias=bias,
        norms_per_layer=2 if not parallel or in_parallel == 2 else 1,
        mlp_dim=c.size("ffn_hidden_size", 4 * c.size("hidden_size")),
        **sizes,
    )


@model_type("starcoder2")
def starcoder2(c: Fields) -> ModelConfig:
    """One switch for every bias; a plain MLP."""
    bias = c.flag("use_bias", default=True)
    return _layer_norm_decoder(c, attention_bias=bias, use_bias=bias, **heads(c))


@model_type("stablelm")
def stablelm(c: Fields) -> ModelConfig:
    """LayerNorm, gated MLP; norms on queries and keys have a scale for each head."""
    return decoder(
        c,
        normalization="layernorm",
        attention_bias=c.flag("use_qkv_bias"),
        attention_output_bias=False,
        norms_per_layer=1 if c.flag("use_parallel_residual") else 2,
        qk_norm="all_heads" if c.flag("qk_layernorm") else "",
        **heads(c, derived=True),
    )


def _layer_norm_decoder(c: Fields, **changes: object) -> ModelConfig:
    """LayerNorm, a plain MLP, a bias everywhere but in the head."""
    values = {
        "normalization": "layernorm",
        "mlp_activations": PLAIN_MLP,
        "attention_bias": True,
        "use_bias": True,
        **changes,
    }
    return decoder(c, **values)
