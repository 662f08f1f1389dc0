"""The vision towers: `decoder_block` → the vision encoder.

Adding one: ``@tower("name")`` here, its keys in mfu_jax/trainer/config/image_rules.py, and its
logits in tests/layers/test_hugging_face.py.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ..feed_forward.mlp import MlpSpec
from ..stack.block import POST_NORMS, PRE_NORMS
from ..vision.attention import GridRope, VisionAttentionSpec
from ..vision.encoder import WEIGHTLESS, VisionSpec
from ..vision.merging import JoinSpec, PoolSpec, ShuffleSpec, StandardizedPoolSpec

_TOWERS: dict[str, Callable[[Any], VisionSpec]] = {}
# Gemma 3 averages 4 × 4 patches, Gemma 4 3 × 3.
_POOLED, _GEMMA4_POOLED = 4, 3
# meta-llama/Llama-4-Scout-17B-16E, config.json, vision_config: rope_theta; google/gemma-4-31B-it.
_LLAMA4_TIMESCALE, _GEMMA4_TIMESCALE = 10_000.0, 100.0
_QWEN3_TIMESCALE = 10_000.0  # transformers, Qwen3VLVisionConfig


def tower(*blocks: str) -> Callable[[Callable[[Any], VisionSpec]], Callable[[Any], VisionSpec]]:
    """Registers a function of the config for the given `decoder_block` names."""

    def register(function: Callable[[Any], VisionSpec]) -> Callable[[Any], VisionSpec]:
        _TOWERS.update(dict.fromkeys(blocks, function))
        return function

    return register


def known_towers() -> list[str]:
    """Every `decoder_block` with a tower."""
    return sorted(_TOWERS)


def vision_spec(config: Any) -> VisionSpec | None:
    """The tower of a config whose sequences have images; None: no images."""
    return _TOWERS[config.decoder_block](config) if config.images_per_sequence else None


@tower("gemma3")
def siglip(config: Any) -> VisionSpec:
    """SigLIP (arXiv 2303.15343); tokens are averaged, normed and projected."""
    sides = _sides(config)
    return VisionSpec(
        sides=sides,
        attention=_attention(config, sides),
        feed_forward=_plain_mlp(config, "gelu"),
        merge=PoolSpec(side=_POOLED),
        patch_bias=True,
        projector_norm="zero_centered_rmsnorm",
        **_sizes(config),
    )


@tower("gemma4")
def gemma4(config: Any) -> VisionSpec:
    """Norms around every part, gated MLPs, a position table per axis, standardised means."""
    sides = _sides(config)
    gated = MlpSpec(
        hidden=config.intermediate_size_for_vit, activations=tuple(config.mlp_activations)
    )
    rope = GridRope(timescale=_GEMMA4_TIMESCALE)
    return VisionSpec(
        sides=sides,
        attention=_attention(config, sides, rope=rope, bias=False, normed=True),
        feed_forward=gated,
        merge=StandardizedPoolSpec(side=_GEMMA4_POOLED),
        norms=PRE_NORMS + POST_NORMS,
        normalization="rmsnorm",
        last_norm=False,
        axis_rows=config.num_position_embeddings_for_vit,
        projector_norm=WEIGHTLESS,
        **_sizes(config),
    )


@tower("llama4")
def llama4(config: Any) -> VisionSpec:
    """Tiles, each with a class token; rotary positions by row and column; pixel shuffle."""
    sides = (config.tile_size_for_vit, config.tile_size_for_vit)
    rope = GridRope(timescale=_LLAMA4_TIMESCALE, first=1, neighbours=True)
    return VisionSpec(
        sides=sides,
        attention=_attention(config, sides, rope=rope),
        feed_forward=_plain_mlp(config, "exact_gelu"),
        merge=ShuffleSpec(
            side=round(1 / config.pixel_shuffle_ratio_for_vit),
            hidden=config.projector_input_dim_for_vit,
            out=config.projector_output_dim_for_vit,
        ),
        class_token=True,
        epsilon=1e-5,
        **_sizes(config),
    )


@tower("qwen3", "qwen3_moe")
def qwen3(config: Any) -> VisionSpec:
    """Qwen3-VL: patches of two frames; squares go through an MLP, also those of inner layers."""
    sides = _sides(config)
    rope = GridRope(timescale=_QWEN3_TIMESCALE, across=True)
    return VisionSpec(
        sides=sides,
        attention=_attention(config, sides, rope=rope),
        feed_forward=_plain_mlp(config, "gelu"),
        merge=JoinSpec(side=config.spatial_merge_size_for_vit),
        patch_bias=True,
        last_norm=False,
        table_rows=config.num_position_embeddings_for_vit,
        frames=config.temporal_patch_size_for_vit,
        projector_norm="layernorm",
        projector_is_mlp=True,
        deep=tuple(config.deepstack_visual_indexes_for_vit),
        grid_positions=True,
        **_sizes(config),
    )


def _sides(config: Any) -> tuple[int, int]:
    """Height and width of an image; a single number means a square."""
    size = config.image_size_for_vit
    height, width = (size, size) if isinstance(size, int) else size
    return height, width


def _attention(config: Any, sides: tuple[int, int], **changes: Any) -> VisionAttentionSpec:
    return VisionAttentionSpec(
        heads=config.num_attention_heads_for_vit,
        columns=sides[1] // config.patch_size_for_vit,
        **changes,
    )


def _plain_mlp(config: Any, activation: str) -> MlpSpec:
    return MlpSpec(hidden=config.intermediate_size_for_vit, activations=(activation,), bias=True)


def _sizes(config: Any) -> dict[str, Any]:
    return {
        "patch": config.patch_size_for_vit,
        "channels": config.num_channels_for_vit,
        "width": config.hidden_size_for_vit,
        "layers": config.num_hidden_layers_for_vit,
    }
