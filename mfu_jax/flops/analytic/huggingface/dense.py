"""Decoders with a dense MLP in every layer."""

from __future__ import annotations

from mfu_jax.flops.analytic.huggingface.common import (
    PLAIN_MLP,
    decoder,
    equal_heads,
    every,
    first_of,
    heads,
    layer_types,
)
from mfu_jax.flops.analytic.huggingface.fields import Fields
from mfu_jax.flops.analytic.huggingface.registry import model_type
from mfu_jax.flops.analytic.model_configs.layers import FULL, SLIDING
from mfu_jax.flops.analytic.model_configs.model import ModelConfig


@model_type(
    "llama", "granite", "mistral", "ministral3", "phi3", "gemma", "internlm3", "iquestcoder"
)
def llama(c: Fields) -> ModelConfig:
    """RMSNorm, rotary positions, gated MLP; a window in every layer if the config has one."""
    return decoder(c, bidirectional=c.get("use_bidirectional_attention") is True)


@model_type("ministral")
def ministral(c: Fields) -> ModelConfig:
    """Each layer states whether it has the window."""
    windowed = SLIDING if c.optional_size("sliding_window") else FULL
    return decoder(c, layer_types=layer_types(c, lambda _: windowed))


@model_type("cwm")
def cwm(c: Fields) -> ModelConfig:
    """A full-attention layer, then three with a window."""
    return decoder(c, layer_types=layer_types(c, first_of(4, FULL, SLIDING)))


@model_type("granite_swa")
def granite_swa(c: Fields) -> ModelConfig:
    """Like cwm, with one sink per head."""
    kinds = layer_types(c, first_of(4, FULL, SLIDING))
    return decoder(c, attention_sinks=True, layer_types=kinds)


@model_type("bitnet")
def bitnet(c: Fields) -> ModelConfig:
    """A norm before each output projection, in attention and MLP."""
    widths = c.size("hidden_size") + c.size("intermediate_size")
    return decoder(c, further_vectors=c.size("num_hidden_layers") * widths)


@model_type("hyperclovax")
def hyperclovax(c: Fields) -> ModelConfig:
    """Norms also after attention and MLP, if the config says so."""
    return decoder(c, norms_per_layer=4 if c.flag("use_post_norm") else 2)


@model_type("hunyuan_v1_dense")
def hunyuan_v1_dense(c: Fields) -> ModelConfig:
    """Norms on queries and keys, after the rotary embedding."""
    return decoder(c, qk_norm="head")


@model_type("diffllama")
def diffllama(c: Fields) -> ModelConfig:
    """Differential attention."""
    sizes = heads(c)
    if sizes["num_kv_heads"] % 2:
        c.fail("num_key_value_heads", "expected an even number")
    return decoder(c, differential=True, **sizes)


@model_type("nanochat")
def nanochat(c: Fields) -> ModelConfig:
    """A plain MLP; norms have no weights."""
    return decoder(c, mlp_activations=PLAIN_MLP, normalization="none")


@model_type("nemotron", "jais2")
def nemotron(c: Fields) -> ModelConfig:
    """LayerNorm, a plain MLP; biases if the config says so."""
    return decoder(c, mlp_activations=PLAIN_MLP, normalization="layernorm")


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
    """Like glm; the output projection is square."""
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
    """Norms over all query and key heads."""
    return decoder(c, qk_norm="all_heads")


@model_type("olmo3")
def olmo3(c: Fields) -> ModelConfig:
    """Like olmo2; three layers with a window, then a full-attention one."""
    return decoder(c, qk_norm="all_heads", layer_types=layer_types(c, every(4, FULL, SLIDING)))


@model_type("qwen2")
def qwen2(c: Fields) -> ModelConfig:
    """A bias on q, k and v only; windows, if used, from layer max_window_layers on."""
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
    # If layers are listed, the pattern is not read: some files spell it "LLLG".
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
    """Like cohere; three layers with a window, then a full-attention one."""
    interval = c.size("sliding_window_pattern", 4)
    kinds = layer_types(c, every(interval, FULL, SLIDING))
    return decoder(c, norms_per_layer=1, layer_types=kinds)


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
