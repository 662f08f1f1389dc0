"""Decoders with a dense MLP in every layer: in the style of Llama, then of GPT."""

from __future__ import annotations

from mfu_jax.flops.analytic.huggingface.common import (
    GPT_STYLE,
    checked_length,
    decoder,
    equal_heads,
    every,
    heads,
    layer_types,
    model_type,
    refuse,
)
from mfu_jax.flops.analytic.huggingface.fields import Fields
from mfu_jax.flops.analytic.model_configs.layers import FULL, SLIDING
from mfu_jax.flops.analytic.model_configs.model import ModelConfig


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


@model_type("dory")
def dory(c: Fields) -> ModelConfig:
    """Layers in the middle run several times; weightless norms, gates, learned scales (nGPT)."""
    # A released file lists attention and MLP as separate layers.
    kinds = c.list_of(str, "layer_types") or []
    blocks = 2 if "mlp" in kinds else 1
    layers = c.size("num_hidden_layers") // blocks
    inner = c.with_values(num_hidden_layers=layers, layer_types=kinds[::blocks] or None)
    first, last = (c.size(f"n_{part}_layers", zero=True) // blocks for part in ("input", "output"))
    if (looped := layers - first - last) < 1:
        c.fail("n_input_layers", f"expected fewer than num_hidden_layers={layers} around the loop")
    sizes = heads(c)
    scales = 2 * (sizes["num_query_heads"] * sizes["head_dim"] + c.size("hidden_size"))
    return decoder(
        inner,
        normalization="none",
        attention_gate_width=sizes["head_dim"],
        layer_types=layer_types(inner, every(4, FULL, SLIDING)),
        layer_passes=(1,) * first + (c.size("n_recurrent_loops"),) * looped + (1,) * last,
        further_vectors=layers * (scales + 2 * c.size("intermediate_size")) + c.size("vocab_size"),
        **sizes,
    )


@model_type("hrm_text")
def hrm_text(c: Fields) -> ModelConfig:
    """Two stacks in nested cycles: H times L runs of one, H of the other; weightless norms.

    A gradient flows through the last `L_bp_cycles` of the L runs of each cycle: backward is less
    than twice forward.
    """
    high, low = c.size("H_cycles"), c.size("L_cycles")
    stack = c.size("num_layers_per_stack", c.size("num_hidden_layers"))
    given = c.list_of(int, "L_bp_cycles") or [2]
    graded = ([1] * max(0, high - len(given)) + given)[:high]
    inner = c.with_values(num_hidden_layers=2 * stack)
    sizes = heads(c)
    return decoder(
        inner,
        normalization="none",
        attention_gate_width=sizes["head_dim"],
        layer_passes=(high * low,) * stack + (high,) * stack,
        graded_passes=(sum(min(g, low) for g in graded),) * stack + (high,) * stack,
        further_vectors=c.size("hidden_size"),
        **sizes,
    )


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


def _layer_norm_decoder(c: Fields, **changes: object) -> ModelConfig:
    return decoder(c, **{**GPT_STYLE, **changes})


@model_type("gpt2", "gpt-sw3")
def gpt2(c: Fields) -> ModelConfig:
    """LayerNorm, learned positions, biases everywhere except in the head, plain MLP."""
    refuse(c, "add_cross_attention")
    return _layer_norm_decoder(
        c,
        position_embedding="learned",
        trainable_position_size=c.size("n_positions"),
        mlp_dim=c.size("n_inner", 4 * c.size("hidden_size")),
        **equal_heads(c),
    )


@model_type("gpt_bigcode")
def gpt_bigcode(c: Fields) -> ModelConfig:
    """Like gpt2, with one key/value head."""
    config = gpt2(c)
    return config.replace(num_kv_heads=1) if c.flag("multi_query", default=True) else config


@model_type("openai-gpt")
def openai_gpt(c: Fields) -> ModelConfig:
    """Like gpt2, with an MLP four times as wide; norms after the blocks, none at the end."""
    width = c.size("hidden_size")
    return gpt2(c).replace(mlp_dim=4 * width, final_norm=False)


@model_type("gpt_neo")
def gpt_neo(c: Fields) -> ModelConfig:
    """Like gpt2, but no bias on q, k and v; full and windowed layers as listed."""
    return _layer_norm_decoder(
        c,
        attention_bias=False,
        attention_output_bias=True,
        position_embedding="learned",
        trainable_position_size=c.size("max_position_embeddings"),
        mlp_dim=c.size("intermediate_size", 4 * c.size("hidden_size")),
        sliding_window_size=c.size("window_size"),
        layer_types=_attention_types(c),
        **equal_heads(c),
    )


def _attention_types(c: Fields) -> list[str]:
    """``[[["global", "local"], 12]]``: each group of kinds with its number of repeats."""
    groups = c.get("attention_types")
    if groups is None:
        groups = [[["global", "local"], 12]]
    named = {"global": FULL, "local": SLIDING}
    try:
        kinds = [named[kind] for group, times in groups for _ in range(times) for kind in group]
    except (TypeError, ValueError, KeyError):
        c.fail("attention_types", 'expected lists such as [[["global", "local"], 12]]')
    return checked_length(c, "attention_types", kinds)


@model_type("opt")
def opt(c: Fields) -> ModelConfig:
    """Learned positions (two extra rows in the table); the token table may be narrower."""
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


@model_type("falcon")
def falcon(c: Fields) -> ModelConfig:
    """One key/value head, several, or one per query head; norms depend on the kind of block."""
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
