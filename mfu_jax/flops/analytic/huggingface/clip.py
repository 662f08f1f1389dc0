"""CLIP: a text and a vision encoder."""

from __future__ import annotations

from mfu_jax.flops.analytic.huggingface.common import encoder, model_type, vision_encoder
from mfu_jax.flops.analytic.huggingface.fields import Fields
from mfu_jax.flops.analytic.model_configs.model import ModelConfig


@model_type("clip")
def clip(c: Fields) -> ModelConfig:
    """Text and vision encoders with their projections; one image per text."""
    text = _clip_part(c, "text")
    vision = _clip_part(c, "vision")
    return encoder(
        text,
        decoder_block="hf_clip",
        vocab_size=text.size("vocab_size"),
        trainable_position_size=text.size("max_position_embeddings"),
        projection_width=c.size("projection_dim"),
        images_per_sequence=1,
        **vision_encoder(vision),
    )


def _clip_part(c: Fields, name: str) -> Fields:
    """Older files also have ``text_config_dict``, which then replaces ``text_config``."""
    older = f"{name}_config_dict"
    return c.nested(older if c.has(older) else f"{name}_config", f"clip_{name}_model")
