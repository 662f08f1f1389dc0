"""Gemma 2, 3 and 3n: norms before and after each block, windows in most layers."""

from __future__ import annotations

from mfu_jax.flops.analytic.huggingface.common import (
    audio_channels,
    checked_length,
    decoder,
    every,
    layer_types,
    per_layer_inputs,
    tied_text,
    vision_encoder,
)
from mfu_jax.flops.analytic.huggingface.fields import Fields
from mfu_jax.flops.analytic.huggingface.registry import model_type
from mfu_jax.flops.analytic.model_configs.layers import FULL, SLIDING
from mfu_jax.flops.analytic.model_configs.model import ModelConfig


@model_type("gemma2")
def gemma2(c: Fields) -> ModelConfig:
    """Alternating local and global layers."""
    return decoder(
        c,
        norms_per_layer=4,
        layer_types=layer_types(c, every(2, FULL, SLIDING)),
        bidirectional=c.get("use_bidirectional_attention") is True,
    )


@model_type("vaultgemma")
def vaultgemma(c: Fields) -> ModelConfig:
    """Like gemma2, with norms before each block only."""
    return gemma2(c).replace(norms_per_layer=2)


@model_type("gemma3_text")
def gemma3_text(c: Fields) -> ModelConfig:
    """Five local layers, then a global one; norms on queries and keys."""
    interval = c.size("sliding_window_pattern", 6)
    both_ways = c.get("use_bidirectional_attention") is True
    window = c.optional_size("sliding_window")
    return decoder(
        c,
        norms_per_layer=4,
        qk_norm="head",
        layer_types=layer_types(c, every(interval, FULL, SLIDING)),
        bidirectional=both_ways,
        # The field is the size of the whole window, half of which is on each side.
        sliding_window_size=window // 2 + 1 if both_ways and window else window,
    )


@model_type("gemma3")
def gemma3(c: Fields) -> ModelConfig:
    """Gemma 3 with SigLIP; images_per_sequence gives the number of images."""
    vision = c.nested("vision_config", "siglip_vision_model")
    return gemma3_text(tied_text(c, "gemma3_text")).replace(
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
    for name, sizes in (("sscp_conv_kernel_size", 3), ("sscp_conv_stride_size", 2)):
        if audio.get(name) != [[sizes, sizes]] * 2:
            audio.fail(name, f"expected {[[sizes, sizes]] * 2}")
    left = max(audio.size("conf_attention_context_left", zero=True) - 1, 0)
    right = audio.size("conf_attention_context_right", zero=True)
    chunk = audio.size("conf_attention_chunk_size")
    audio.quotient("hidden_size", "conf_num_attention_heads")
    return gemma3n_text(tied_text(c, "gemma3n_text")).replace(
        vision_tower="gemma3n",
        hidden_size_for_vit=vision.size("hidden_size"),
        vision_vocab=vision.size("vocab_size"),
        audio_vocab=audio.size("vocab_size"),
        audio_channels=audio_channels(audio, "sscp_conv_channel_size"),
        audio_heads=audio.size("conf_num_attention_heads"),
        audio_kernel=audio.size("conf_conv_kernel_size"),
        audio_chunk=chunk,
        audio_context=chunk + left + right,
        audio_past=left,
        audio_future=right,
        audio_relative_positions=left + right + 1,
        audio_reduction=audio.size("conf_reduction_factor"),
        num_mel_bins_for_audio=audio.size("input_feat_size"),
        d_model_for_audio=audio.size("hidden_size"),
        encoder_layers_for_audio=audio.size("conf_num_hidden_layers"),
    )
