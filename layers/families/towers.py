"""The vision towers: `decoder_block` → the vision encoder.

Adding one: a function and a row of `_TOWERS` here, its rules in
mfu_jax/trainer/config/keys.yml, and its logits in tests/layers/test_hugging_face.py.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ..feed_forward.mlp import MlpSpec
from ..stack.block import POST_NORMS, PRE_NORMS
from ..vision.attention import GridRope, VisionAttentionSpec
from ..vision.encoder import WEIGHTLESS, VisionSpec
from ..vision.merging import MergeSpec

# Gemma 3 averages 4 × 4 patches, Gemma 4 3 × 3.
_POOLED, _GEMMA4_POOLED = 4, 3
# meta-llama/Llama-4-Scout-17B-16E, config.json, vision_config: rope_theta; google/gemma-4-31B-it.
_LLAMA4_TIMESCALE, _GEMMA4_TIMESCALE = 10_000.0, 100.0
_QWEN3_TIMESCALE = 10_000.0  # transformers, Qwen3VLVisionConfig


def _tower(
    config: Any,
    *,
    merge: MergeSpec,
    attention: dict[str, Any],
    activation: str = "gelu",
    tile: int = 0,
    **parts: Any,
) -> VisionSpec:
    """A tower of the config's sizes; an image is a square of side `tile`, or the config's."""
    size = tile or config.image_size_for_vit
    height, width = (size, size) if isinstance(size, int) else size
    patch, hidden = config.patch_size_for_vit, config.intermediate_size_for_vit
    heads = config.num_attention_heads_for_vit
    options: dict[str, Any] = {
        "sides": (height, width),
        "patch": patch,
        "channels": config.num_channels_for_vit,
        "width": config.hidden_size_for_vit,
        "layers": config.num_hidden_layers_for_vit,
        "attention": VisionAttentionSpec(heads=heads, columns=width // patch, **attention),
        "feed_forward": MlpSpec(hidden=hidden, activations=(activation,), bias=True),
        **parts,
    }
    return VisionSpec(merge=merge, **options)


def siglip(config: Any) -> VisionSpec:
    """SigLIP (arXiv 2303.15343); tokens are averaged, normed and projected."""
    return _tower(
        config,
        merge=MergeSpec(side=_POOLED, kind="mean"),
        attention={},
        patch_bias=True,
        projector_norm="zero_centered_rmsnorm",
    )


def gemma4(config: Any) -> VisionSpec:
    """Norms around every part, gated MLPs, a position table per axis, standardised means."""
    hidden, activations = config.intermediate_size_for_vit, tuple(config.mlp_activations)
    rope = GridRope(timescale=_GEMMA4_TIMESCALE)
    return _tower(
        config,
        merge=MergeSpec(side=_GEMMA4_POOLED, kind="standardized"),
        attention={"rope": rope, "bias": False, "normed": True},
        feed_forward=MlpSpec(hidden=hidden, activations=activations),
        norms=PRE_NORMS + POST_NORMS,
        normalization="rmsnorm",
        last_norm=False,
        axis_rows=config.num_position_embeddings_for_vit,
        projector_norm=WEIGHTLESS,
    )


def llama4(config: Any) -> VisionSpec:
    """Tiles, each with a class token; rotary positions by row and column; pixel shuffle."""
    return _tower(
        config,
        tile=config.tile_size_for_vit,
        attention={"rope": GridRope(timescale=_LLAMA4_TIMESCALE, first=1, neighbours=True)},
        activation="exact_gelu",
        merge=MergeSpec(
            side=round(1 / config.pixel_shuffle_ratio_for_vit),
            kind="shuffled",
            hidden=config.projector_input_dim_for_vit,
            out=config.projector_output_dim_for_vit,
        ),
        class_token=True,
        epsilon=1e-5,
    )


def qwen3(config: Any) -> VisionSpec:
    """Qwen3-VL: patches of two frames; squares go through an MLP, also those of inner layers."""
    return _tower(
        config,
        attention={"rope": GridRope(timescale=_QWEN3_TIMESCALE, across=True)},
        merge=MergeSpec(side=config.spatial_merge_size_for_vit, kind="joined"),
        patch_bias=True,
        last_norm=False,
        table_rows=config.num_position_embeddings_for_vit,
        frames=config.temporal_patch_size_for_vit,
        projector_norm="layernorm",
        projector_is_mlp=True,
        deep=tuple(config.deepstack_visual_indexes_for_vit),
        grid_positions=True,
    )


_TOWERS: dict[str, Callable[[Any], VisionSpec]] = {
    "gemma3": siglip,
    "gemma4": gemma4,
    "llama4": llama4,
    "qwen3": qwen3,
    "qwen3_moe": qwen3,
}


def known_towers() -> list[str]:
    """Every `decoder_block` with a tower."""
    return sorted(_TOWERS)


def vision_spec(config: Any) -> VisionSpec | None:
    """The tower of a config whose sequences have images; None: no images."""
    return _TOWERS[config.decoder_block](config) if config.images_per_sequence else None
