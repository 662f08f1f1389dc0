"""Llama 4 and Qwen 3.5 with their vision towers, nested as ``vision_config``."""

from __future__ import annotations

from collections.abc import Callable

from mfu_jax.flops.analytic.huggingface.common import (
    TRANSLATIONS,
    model_type,
    tied_text,
    vision_encoder,
)
from mfu_jax.flops.analytic.huggingface.fields import Fields
from mfu_jax.flops.analytic.huggingface.mixtures import llama4_text, qwen3_5_moe_text
from mfu_jax.flops.analytic.model_configs.model import ModelConfig


@model_type("emu3")
def emu3(c: Fields) -> ModelConfig:
    """The text model, as built by AutoModelForCausalLM."""
    return TRANSLATIONS["llama"](c.nested("text_config", "emu3_text_model"))


@model_type("llama4")
def llama4(c: Fields) -> ModelConfig:
    """Llama 4 and its vision tower; images_per_sequence and tiles_per_image: how many inputs."""
    vision = c.nested("vision_config", "llama4_vision_model")
    ratio = vision.get("pixel_shuffle_ratio")
    if isinstance(ratio, bool) or not isinstance(ratio, int | float) or not 0 < ratio <= 1:
        vision.fail("pixel_shuffle_ratio", "expected a number above 0, at most 1")
    sizes = vision_encoder(vision)
    # The head belongs to the text model, whose own config says whether it is tied.
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
def qwen3_5(c: Fields) -> ModelConfig:
    """The text model, as built by AutoModelForCausalLM; with its vision tower if
    ``architectures`` says Qwen3_5ForConditionalGeneration.

    Images may have any size, given by image_size_for_vit; images_per_sequence is their number.
    """
    return _qwen(c, "qwen3_5_text", TRANSLATIONS["qwen3_5_text"])


@model_type("qwen3_5_moe")
def qwen3_5_moe(c: Fields) -> ModelConfig:
    """Like qwen3_5, with experts."""
    return _qwen(c, "qwen3_5_moe_text", qwen3_5_moe_text)


def _qwen(c: Fields, kind: str, text: Callable[[Fields], ModelConfig]) -> ModelConfig:
    names = c.list_of(str, "architectures") or []
    if not any(name.endswith("ForConditionalGeneration") for name in names):
        return text(c.nested("text_config", kind))
    config = text(tied_text(c, kind))
    vision = c.nested("vision_config", "qwen3_5_vision")
    vision.quotient("hidden_size", "num_heads")
    return config.replace(
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
