"""What the rows of ``model_types.yml`` name: rules for one value, and functions of several."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mfu_jax.flops.analytic.huggingface.common import (
    PLAIN_MLP,
    checked_length,
    equal_heads,
    every,
    experts,
    has_rope,
    heads,
    image,
    latent,
    layer_types,
    refuse,
)
from mfu_jax.flops.analytic.huggingface.fields import Fields
from mfu_jax.flops.analytic.huggingface.latent import sparse_layers
from mfu_jax.flops.analytic.huggingface.mixtures import delta_net
from mfu_jax.flops.analytic.model_configs.layers import FULL, SLIDING

_LIGHTNING = "lightning_attention"
_LARA = ("linear_attention", SLIDING, "linear_attention", FULL, SLIDING)


def windows_if_any(c: Fields) -> list[str]:
    """As listed, or else a window in every layer if the config has one."""
    return layer_types(c, lambda _: SLIDING if c.optional_size("sliding_window") else FULL)


def late_windows(c: Fields) -> list[str]:
    """Windows, if used, from layer max_window_layers on."""
    used = c.flag("use_sliding_window", default=not c.knows("use_sliding_window"))
    windowed = used and c.optional_size("sliding_window")
    first = c.size("max_window_layers", zero=True) if windowed else c.size("num_hidden_layers")
    return layer_types(c, lambda i: SLIDING if i >= first else FULL)


def interval_windows(c: Fields) -> list[str]:
    """Windows except in every n-th layer; if layers are listed, some files spell n "LLLG"."""
    windowed = not c.has("layer_types") and c.optional_size("sliding_window")
    interval = c.size("sliding_window_pattern", 0, zero=True) if windowed else 0
    return layer_types(c, every(interval, FULL, SLIDING) if interval else lambda _: FULL)


def early_windows(c: Fields) -> list[str]:
    """Windows, if used, in every second layer before max_window_layers."""
    windowed = c.flag("use_sliding_window") and c.optional_size("sliding_window")
    first = c.size("max_window_layers", zero=True) if windowed else 0
    return layer_types(c, lambda i: SLIDING if i % 2 == 0 and i < first else FULL)


def full_from_last(c: Fields) -> list[str]:
    """Full attention in every fourth layer, counted from the last."""
    last = c.size("num_hidden_layers") - 1
    return layer_types(c, lambda i: SLIDING if (last - i) % 4 else FULL)


def sixth_or_last(c: Fields) -> list[str]:
    """Full attention in every sixth layer, and in the last one."""
    last = c.size("num_hidden_layers") - 1
    return layer_types(c, lambda i: FULL if i % 6 == 5 or i == last else SLIDING)


def rope_free_windows(c: Fields) -> list[str]:
    """Windows, if used, in the layers without rotary positions."""
    windowed = c.flag("use_sliding_window") and c.optional_size("sliding_window")
    rotary = has_rope(c) if windowed else lambda _: 1
    return layer_types(c, lambda i: FULL if rotary(i) else SLIDING)


def alternating_lightning(c: Fields) -> list[str]:
    """Attention and lightning attention in turn."""
    kinds = (FULL, _LIGHTNING)
    return layer_types(c, lambda i: kinds[i % 2], linear_attention=_LIGHTNING)


def lfm3_layers(c: Fields) -> list[str]:
    """A convolution in the first of two layers, then a window or full attention in turn."""
    attended = {0: SLIDING, 2: FULL}
    return layer_types(c, lambda i: attended.get(i % 4, "conv") if i else "conv")


def attention_types(c: Fields) -> list[str]:
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


def used_window(c: Fields) -> int:
    """The window's size, if windows are used."""
    return c.optional_size("sliding_window") if c.flag("use_sliding_window") else 0


def window_to_each_side(c: Fields) -> int:
    """The window; without a causal mask, the field is that of both sides."""
    window = c.optional_size("sliding_window")
    both_ways = c.get("use_bidirectional_attention") is True
    return window // 2 + 1 if both_ways and window else window


def half_window(c: Fields) -> int:
    """Half of a window to both sides; an encoder's includes the query itself."""
    return c.optional_size("local_attention") // 2 + (c.model_type == "modernbert")


def head_width(c: Fields) -> int:
    """The width of a head."""
    return heads(c)["head_dim"]


def latent_value_width(c: Fields) -> int:
    """The width of a value head in latent attention."""
    width: int = latent(c)["v_head_dim"]
    return width


def opt_final_norm(c: Fields) -> bool:
    """Whether a norm follows the last layer: not after post-norms, nor in some older files."""
    before = c.flag("do_layer_norm_before", default=True)
    return before and not c.flag("_remove_final_layer_norm")


def molmo2_norms(c: Fields) -> str:
    """The norms on queries and keys: of each head, or over all."""
    return "head" if c.get("qk_norm_type") == "qwen3" else "all_heads"


def whisper_head_width(c: Fields) -> int:
    """The width of a decoder's head; the encoder's, too, must be a whole number."""
    c.quotient("d_model", "encoder_attention_heads")
    return c.quotient("d_model", "decoder_attention_heads")


def t5_activations(c: Fields) -> tuple[str, ...]:
    """Two activations, for a gated MLP, or one."""
    return ("gelu", "linear") if c.text("feed_forward_proj").startswith("gated") else PLAIN_MLP


def num_labels(c: Fields) -> int:
    """Number of classes: that of id2label, else num_labels, else transformers' default, 2."""
    labels = c.get("id2label")
    return len(labels) if isinstance(labels, Mapping) and labels else c.size("num_labels", 2)


def image_tokens(c: Fields) -> int:
    """An image's patches and a class token."""
    sizes = image(c)
    tokens: int = (sizes["image_size_for_vit"] // sizes["patch_size_for_vit"]) ** 2 + 1
    return tokens


def zaya_kernels(c: Fields) -> tuple[int, int]:
    """Of the convolutions over queries and keys."""
    return c.size("cca_time0"), c.size("cca_time1")


def zaya_vectors(c: Fields) -> int:
    """Scales and shifts of the streams, of keys, and of the router between layers."""
    layers, width = c.size("num_hidden_layers"), c.size("hidden_size")
    of_routers = (layers - 1) * c.size("router_hidden_size")
    return (8 * layers + 2) * width + layers * heads(c)["num_kv_heads"] + of_routers


def classifier_bias(c: Fields) -> int:
    """A bias of the matrix before the head."""
    return c.size("hidden_size") * c.flag("classifier_bias")


def two_norms_a_layer(c: Fields) -> int:
    """Weights of a norm before each output projection, in attention and MLP."""
    return c.size("num_hidden_layers") * (c.size("hidden_size") + c.size("intermediate_size"))


def additional_vocabulary(c: Fields) -> int:
    """Weights of a second table of tokens."""
    return c.optional_size("additional_vocab_size") * c.size("hidden_size")


def gate_biases(c: Fields) -> int:
    """One bias for each head's gate."""
    return c.size("num_hidden_layers") * heads(c)["num_query_heads"]


def even_heads(c: Fields) -> dict[str, int]:
    """Heads in pairs."""
    if (sizes := heads(c))["num_kv_heads"] % 2:
        c.fail("num_key_value_heads", "expected an even number")
    return sizes


def square_heads(c: Fields) -> dict[str, int]:
    """Heads that are together as wide as the model."""
    sizes = heads(c)
    if sizes["num_query_heads"] * sizes["head_dim"] != c.size("hidden_size"):
        c.fail("head_dim", "expected hidden_size / num_attention_heads")
    return sizes


def multi_query(c: Fields) -> dict[str, int]:
    """One key/value head, unless the config says otherwise."""
    return {"num_kv_heads": 1} if c.flag("multi_query", default=True) else {}


def alone(c: Fields) -> dict[str, Any]:
    """A decoder that reads no encoder."""
    refuse(c, "add_cross_attention")
    return {}


def without_decoder(c: Fields) -> dict[str, Any]:
    """An encoder alone."""
    for unsupported in ("add_cross_attention", "is_decoder"):
        if c.flag(unsupported):
            c.fail(unsupported, "only the encoder is counted from a config")
    return {}


def falcon(c: Fields) -> dict[str, Any]:
    """One key/value head, several, or one per query head; norms depend on the kind of block."""
    sizes, grouped = equal_heads(c), c.flag("new_decoder_architecture")
    if grouped:
        sizes["num_kv_heads"] = c.size("num_kv_heads", sizes["num_query_heads"])
        if sizes["num_query_heads"] % sizes["num_kv_heads"]:
            c.fail("num_kv_heads", "expected a divisor of num_attention_heads")
    elif c.flag("multi_query", default=True):
        sizes["num_kv_heads"] = 1
    parallel = c.flag("parallel_attn", default=True)
    in_parallel = c.size("num_ln_in_parallel_attn", 2 if grouped else 1)
    return {**sizes, "norms_per_layer": 2 if not parallel or in_parallel == 2 else 1}


def lara(c: Fields) -> dict[str, Any]:
    """Delta nets, windows and full attention in turn; experts, and no gate of attention."""
    return {
        **delta_net(c),
        **experts(c, 0),
        "attention_output_gate": False,
        "layer_types": layer_types(c, lambda i: _LARA[i % len(_LARA)]),
    }


def two_experts(c: Fields) -> dict[str, Any]:
    """Experts in every layer, of which a router always picks two (SparseMixer)."""
    if c.size("num_experts_per_tok") != 2:
        c.fail("num_experts_per_tok", "expected 2, which the model's router always picks")
    return experts(c, 0)


def sparse_experts(c: Fields) -> dict[str, Any]:
    """Experts from the first layer that is not dense on, in every n-th or as listed."""
    return experts(c, sparse_layers(c))


def later_experts(c: Fields) -> dict[str, Any]:
    """Experts after the first layers, by default after the very first."""
    return experts(c, c.size("first_k_dense_replace", 1, zero=True))
