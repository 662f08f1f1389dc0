"""Text models with a vision tower, nested as ``text_config`` and ``vision_config``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from mfu_jax.flops.analytic.huggingface.fields import Fields
from mfu_jax.flops.analytic.huggingface.gemma import gemma3_text, gemma3n_text, gemma4_text
from mfu_jax.flops.analytic.huggingface.mixtures import llama4_text, qwen3_5_moe_text, qwen3_5_text
from mfu_jax.flops.analytic.huggingface.registry import model_type
from mfu_jax.flops.analytic.shapes.hf_decoder import HfDecoderShape


@model_type("gemma3")
def gemma3(c: Fields) -> HfDecoderShape:
    """Gemma 3 with SigLIP; images_per_sequence says how many images there are."""
    vision = c.nested("vision_config", "siglip_vision_model")
    return gemma3_text(_text(c, "gemma3_text")).replace(
        vision_tower="siglip",
        vision_pooling_head=vision.flag("vision_use_head", default=True),
        image_tokens=c.size("mm_tokens_per_image"),
        **_encoder(vision),
    )


@model_type("llama4")
def llama4(c: Fields) -> HfDecoderShape:
    """Llama 4 with its vision tower; images_per_sequence and tiles_per_image say how much."""
    vision = c.nested("vision_config", "llama4_vision_model")
    ratio = vision.get("pixel_shuffle_ratio")
    if isinstance(ratio, bool) or not isinstance(ratio, int | float) or not 0 < ratio <= 1:
        vision.fail("pixel_shuffle_ratio", "expected a number above 0, at most 1")
    sizes = _encoder(vision)
    # Its head belongs to the text model, whose own config says whether it is tied.
    return llama4_text(c.nested("text_config", "llama4_text")).replace(
        vision_tower="llama4",
        vision_output_dim=vision.size("vision_output_dim"),
        projector_input_dim_for_vit=vision.size("projector_input_dim"),
        projector_output_dim_for_vit=vision.size("projector_output_dim"),
        pixel_shuffle_ratio_for_vit=ratio,
        tile_size_for_vit=sizes["image_size_for_vit"],
        **sizes,
    )


@model_type("qwen3_5")
def qwen3_5(c: Fields) -> HfDecoderShape:
    """The text model, as AutoModelForCausalLM builds it; with its vision tower where
    ``architectures`` says Qwen3_5ForConditionalGeneration.

    Images come in any size: image_size_for_vit says which, images_per_sequence how many.
    """
    return _qwen(c, "qwen3_5_text", qwen3_5_text)


@model_type("qwen3_5_moe")
def qwen3_5_moe(c: Fields) -> HfDecoderShape:
    """As qwen3_5, with experts."""
    return _qwen(c, "qwen3_5_moe_text", qwen3_5_moe_text)


def _qwen(c: Fields, kind: str, text: Callable[[Fields], HfDecoderShape]) -> HfDecoderShape:
    names = c.list_of(str, "architectures") or []
    if not any(name.endswith("ForConditionalGeneration") for name in names):
        return text(c.nested("text_config", kind))
    shape = text(_text(c, kind))
    vision = c.nested("vision_config", "qwen3_5_vision")
    vision.quotient("hidden_size", "num_heads")
    return shape.replace(
        vision_tower="qwen3_5",
        patch_size_for_vit=vision.size("patch_size"),
        temporal_patch_size_for_vit=vision.size("temporal_patch_size"),
        num_channels_for_vit=vision.size("in_channels"),
        hidden_size_for_vit=vision.size("hidden_size"),
        intermediate_size_for_vit=vision.size("intermediate_size"),
        num_hidden_layers_for_vit=vision.size("depth"),
        num_position_embeddings_for_vit=vision.size("num_position_embeddings"),
        spatial_merge_size_for_vit=vision.size("spatial_merge_size"),
        out_hidden_size_for_vit=vision.size("out_hidden_size"),
    )


@model_type("gemma3n")
def gemma3n(c: Fields) -> HfDecoderShape:
    """Gemma 3n with its towers; images_per_sequence and audio_frames_per_sequence say how much."""
    vision = c.nested("vision_config", "gemma3n_vision")
    audio = c.nested("audio_config", "gemma3n_audio")
    if vision.text("architecture") != "mobilenetv5_300m_enc":
        vision.fail("architecture", "expected 'mobilenetv5_300m_enc', the one that is known")
    for name, sizes in (("sscp_conv_kernel_size", 3), ("sscp_conv_stride_size", 2)):
        if audio.get(name) != [[sizes, sizes]] * 2:
            audio.fail(name, f"expected {[[sizes, sizes]] * 2}")
    left = max(audio.size("conf_attention_context_left", zero=True) - 1, 0)
    right = audio.size("conf_attention_context_right", zero=True)
    chunk = audio.size("conf_attention_chunk_size")
    audio.quotient("hidden_size", "conf_num_attention_heads")
    return gemma3n_text(_text(c, "gemma3n_text")).replace(
        vision_tower="gemma3n",
        hidden_size_for_vit=vision.size("hidden_size"),
        vision_vocab=vision.size("vocab_size"),
        audio_vocab=audio.size("vocab_size"),
        audio_channels=_channels(audio, "sscp_conv_channel_size"),
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


@model_type("gemma4")
def gemma4(c: Fields) -> HfDecoderShape:
    """Gemma 4 with the towers that its config has; images come in any size: image_size_for_vit."""
    shape = gemma4_text(_text(c, "gemma4_text"))
    towers: dict[str, Any] = {}
    if c.has("vision_config"):
        towers |= _gemma4_vision(c.nested("vision_config", "gemma4_vision"))
    if c.has("audio_config"):
        towers |= _gemma4_audio(c.nested("audio_config", "gemma4_audio"))
    return shape.replace(vision_tower="gemma4", **towers) if towers else shape


def _gemma4_vision(vision: Fields) -> dict[str, Any]:
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


def _gemma4_audio(audio: Fields) -> dict[str, Any]:
    channels = _channels(audio, "subsampling_conv_channels")
    if channels[0] % 4:
        audio.fail("subsampling_conv_channels", "expected a first number that 4 divides")
    left = max(audio.size("attention_context_left") - 1, 0)
    right = audio.size("attention_context_right", zero=True)
    chunk = audio.size("attention_chunk_size")
    audio.quotient("hidden_size", "num_attention_heads")
    return {
        "audio_channels": channels,
        "audio_heads": audio.size("num_attention_heads"),
        "audio_kernel": audio.size("conv_kernel_size"),
        "audio_chunk": chunk,
        "audio_context": chunk + left + right,
        # The mask keeps one key less on either side than the blocks hold.
        "audio_past": max(left - 1, 0),
        "audio_future": max(right - 1, 0),
        "audio_relative_positions": (chunk + left + right) // 2 + 1,
        # As many mel bins as channels: the projection behind the convolutions takes it for granted.
        "num_mel_bins_for_audio": channels[0],
        "d_model_for_audio": audio.size("hidden_size"),
        "encoder_layers_for_audio": audio.size("num_hidden_layers"),
        "output_dim_for_audio": audio.size("output_proj_dims"),
    }


def _channels(audio: Fields, name: str) -> list[int]:
    channels = audio.list_of(int, name) or []
    if len(channels) != 2 or min(channels) < 1:
        audio.fail(name, "expected two numbers")
    return channels


def _text(c: Fields, kind: str) -> Fields:
    """The nested text config of a model whose outer config decides whether the head is tied."""
    tied = c.flag("tie_word_embeddings")
    return c.nested("text_config", kind).with_values(tie_word_embeddings=tied)


def _encoder(vision: Fields) -> dict[str, Any]:
    vision.quotient("hidden_size", "num_attention_heads")
    image, patch = vision.size("image_size"), vision.size("patch_size")
    if image < patch:
        vision.fail("image_size", f"expected patch_size={patch} or more")
    return {
        "image_size_for_vit": image,
        "patch_size_for_vit": patch,
        "num_channels_for_vit": vision.size("num_channels"),
        "hidden_size_for_vit": vision.size("hidden_size"),
        "intermediate_size_for_vit": vision.size("intermediate_size"),
        "num_hidden_layers_for_vit": vision.size("num_hidden_layers"),
    }
