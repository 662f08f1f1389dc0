"""Gemma 2 to 4: windows in most layers; the text models and their vision and audio towers."""

from __future__ import annotations

from typing import Any

from mfu_jax.flops.analytic.huggingface.common import (
    TRANSLATIONS,
    audio_channels,
    changed_layers,
    checked_length,
    decoder,
    every,
    experts,
    layer_types,
    model_type,
    per_layer_inputs,
    refuse,
    tied_text,
    vision_encoder,
)
from mfu_jax.flops.analytic.huggingface.fields import Fields
from mfu_jax.flops.analytic.model_configs.layers import FULL, SLIDING
from mfu_jax.flops.analytic.model_configs.model import ModelConfig


@model_type("gemma3")
def gemma3(c: Fields) -> ModelConfig:
    """Gemma 3 with SigLIP; images_per_sequence gives the number of images."""
    vision = c.nested("vision_config", "siglip_vision_model")
    return TRANSLATIONS["gemma3_text"](tied_text(c, "gemma3_text")).replace(
        vision_tower="siglip",
        vision_pooling_head=vision.flag("vision_use_head", default=True),
        image_tokens=c.size("mm_tokens_per_image"),
        **vision_encoder(vision),
    )


@model_type("gemma3n_text")
def gemma3n_text(c: Fields) -> ModelConfig:
    """Four local layers, then a global one; AltUp, Laurel, per-layer inputs, shared keys."""
    widths = c.get("intermediate_size")
    each = (
        checked_length(c, "intermediate_size", c.list_of(int, "intermediate_size") or [])
        if (isinstance(widths, list | tuple))
        else []
    )
    return decoder(
        c,
        decoder_block="hf_gemma",
        layer_types=layer_types(c, every(5, FULL, SLIDING)),
        mlp_dim=max(each) if each else c.size("intermediate_size"),
        mlp_dims=each,
        altup_inputs=c.size("altup_num_inputs"),
        laurel_rank=c.size("laurel_rank"),
        **per_layer_inputs(c),
    )


@model_type("gemma3n")
def gemma3n(c: Fields) -> ModelConfig:
    """Gemma 3n and its towers; images_per_sequence, audio_frames_per_sequence: how many inputs."""
    vision = c.nested("vision_config", "gemma3n_vision")
    audio = c.nested("audio_config", "gemma3n_audio")
    if vision.text("architecture") != "mobilenetv5_300m_enc":
        vision.fail("architecture", "expected 'mobilenetv5_300m_enc', the only known one")
    for name, side in (("sscp_conv_kernel_size", 3), ("sscp_conv_stride_size", 2)):
        if audio.get(name) != [[side, side]] * 2:
            audio.fail(name, f"expected {[[side, side]] * 2}")
    sizes = _conformer(audio, "conf_")
    return gemma3n_text(tied_text(c, "gemma3n_text")).replace(
        vision_tower="gemma3n",
        hidden_size_for_vit=vision.size("hidden_size"),
        vision_vocab=vision.size("vocab_size"),
        audio_vocab=audio.size("vocab_size"),
        audio_channels=audio_channels(audio, "sscp_conv_channel_size"),
        audio_relative_positions=sizes["audio_past"] + sizes["audio_future"] + 1,
        audio_reduction=audio.size("conf_reduction_factor"),
        num_mel_bins_for_audio=audio.size("input_feat_size"),
        **sizes,
    )


def _conformer(audio: Fields, prefix: str = "") -> dict[str, int]:
    """Sizes of a conformer; the keys before and after a chunk that its queries are multiplied with.

    Args:
        prefix: of the fields' names.
    """
    audio.quotient("hidden_size", f"{prefix}num_attention_heads")
    left = max(audio.size(f"{prefix}attention_context_left", zero=True) - 1, 0)
    right = audio.size(f"{prefix}attention_context_right", zero=True)
    chunk = audio.size(f"{prefix}attention_chunk_size")
    return {
        "audio_heads": audio.size(f"{prefix}num_attention_heads"),
        "audio_kernel": audio.size(f"{prefix}conv_kernel_size"),
        "audio_chunk": chunk,
        "audio_context": chunk + left + right,
        "audio_past": left,
        "audio_future": right,
        "d_model_for_audio": audio.size("hidden_size"),
        "encoder_layers_for_audio": audio.size(f"{prefix}num_hidden_layers"),
    }


@model_type("gemma4_text", "gemma4_unified_text")
def gemma4_text(c: Fields) -> ModelConfig:
    """Five local layers, then a global one with its own heads; dense, or with experts as well."""
    both_ways = c.get("use_bidirectional_attention") == "all"
    window = c.optional_size("sliding_window")
    kinds = layer_types(c, every(6, FULL, SLIDING))
    kinds[-1] = FULL
    equal = c.flag("attention_k_eq_v")
    beside = c.flag("enable_moe_block")
    return decoder(
        c,
        decoder_block="hf_gemma",
        layer_types=kinds,
        bidirectional=both_ways,
        sliding_window_size=window // 2 + 1 if both_ways and window else window,
        share_kv_projections=equal,
        **_global_heads(c, kinds, equal=equal),
        use_double_wide_mlp=c.flag("use_double_wide_mlp"),
        moe_beside_mlp=beside,
        **(experts(c) if beside else {}),
        **per_layer_inputs(c),
    )


def _global_heads(c: Fields, kinds: list[str], *, equal: bool) -> dict[str, int]:
    """Width and number of the global layers' heads, from their own fields or per_layer_config."""
    if changed := changed_layers(c, kinds, FULL):
        kv_heads = changed.size("num_key_value_heads")
        return {
            "global_head_dim": changed.size("head_dim"),
            "global_num_kv_heads": kv_heads if kv_heads != c.size("num_key_value_heads") else 0,
        }
    return {
        "global_head_dim": c.size("global_head_dim", 512),
        "global_num_kv_heads": c.optional_size("num_global_key_value_heads") if equal else 0,
    }


@model_type("diffusion_gemma")
def diffusion_gemma(c: Fields) -> ModelConfig:
    """Gemma 4 as an encoder and a decoder of blocks of text, with experts in every layer."""
    if not c.flag("tie_word_embeddings"):
        c.fail("tie_word_embeddings", "expected true: encoder and decoder have the same weights")
    text = tied_text(c, "diffusion_gemma_text")
    refuse(text, "attention_bias")  # the only weights that transformers has twice
    always = {"attention_k_eq_v": True, "enable_moe_block": True}
    return gemma4_text(text.with_values(**always)).replace(
        decoder_block="hf_diffusion_gemma",
        causal_block_size=c.size("canvas_length"),
        vision_tower="gemma4",
        **_vision(c.nested("vision_config", "gemma4_vision")),
    )


@model_type("gemma4")
def gemma4(c: Fields) -> ModelConfig:
    """Gemma 4 with the towers in its config; image_size_for_vit gives the images' size."""
    config = gemma4_text(tied_text(c, "gemma4_text"))
    towers: dict[str, Any] = {}
    if c.has("vision_config"):
        towers |= _vision(c.nested("vision_config", "gemma4_vision"))
    if c.has("audio_config"):
        towers |= _audio(c.nested("audio_config", "gemma4_audio"))
    return config.replace(vision_tower="gemma4", **towers) if towers else config


def _vision(vision: Fields) -> dict[str, Any]:
    heads, kv_heads = vision.size("num_attention_heads"), vision.size("num_key_value_heads")
    if heads % kv_heads:
        vision.fail("num_key_value_heads", f"expected a divisor of num_attention_heads={heads}")
    return {
        "vision_heads": heads,
        "vision_kv_heads": kv_heads,
        "vision_head_dim": vision.size("head_dim"),
        "vision_pooling": vision.size("pooling_kernel_size"),
        "patch_size_for_vit": vision.size("patch_size"),
        "hidden_size_for_vit": vision.size("hidden_size"),
        "intermediate_size_for_vit": vision.size("intermediate_size"),
        "num_hidden_layers_for_vit": vision.size("num_hidden_layers"),
        "num_position_embeddings_for_vit": vision.size("position_embedding_size"),
    }


def _audio(audio: Fields) -> dict[str, Any]:
    channels = audio_channels(audio, "subsampling_conv_channels")
    if channels[0] % 4:
        audio.fail("subsampling_conv_channels", "expected a first number that 4 divides")
    sizes = _conformer(audio)
    return {
        **sizes,
        "audio_channels": channels,
        # On either side, the mask keeps one key fewer than a block holds.
        "audio_past": max(sizes["audio_past"] - 1, 0),
        "audio_future": max(sizes["audio_future"] - 1, 0),
        "audio_relative_positions": sizes["audio_context"] // 2 + 1,
        # As many mel bins as channels, as the projection after the convolutions assumes.
        "num_mel_bins_for_audio": channels[0],
        "output_dim_for_audio": audio.size("output_proj_dims"),
    }
