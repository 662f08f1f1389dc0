"""The vision towers: `decoder_block` → how a model sees."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ..vision import VisionSpec
from ..vision_merging import PoolSpec, ShuffleSpec

_TOWERS: dict[str, Callable[[Any], VisionSpec]] = {}
# Gemma 3 averages 4 × 4 patches.
_POOLED = 4


def tower(block: str) -> Callable[[Callable[[Any], VisionSpec]], Callable[[Any], VisionSpec]]:
    """Registers a function of the config for a `decoder_block`."""

    def register(function: Callable[[Any], VisionSpec]) -> Callable[[Any], VisionSpec]:
        _TOWERS[block] = function
        return function

    return register


def known_towers() -> list[str]:
    """Every `decoder_block` that has a tower."""
    return sorted(_TOWERS)


def vision_spec(config: Any) -> VisionSpec | None:
    """The tower of a config whose sequences have images; None: they have none."""
    return _TOWERS[config.decoder_block](config) if config.images_per_sequence else None


@tower("gemma3")
def siglip(config: Any) -> VisionSpec:
    """SigLIP (arXiv 2303.15343), averaged, normed and projected."""
    return VisionSpec(
        side=config.image_size_for_vit,
        merge=PoolSpec(side=_POOLED),
        patch_bias=True,
        projector_norm="zero_centered_rmsnorm",
        **_sizes(config),
    )


@tower("llama4")
def llama4(config: Any) -> VisionSpec:
    """Tiles, each with a class token, rotated by row and column; pixel shuffle."""
    return VisionSpec(
        side=config.tile_size_for_vit,
        merge=ShuffleSpec(
            side=round(1 / config.pixel_shuffle_ratio_for_vit),
            hidden=config.projector_input_dim_for_vit,
            out=config.projector_output_dim_for_vit,
        ),
        activation="exact_gelu",
        class_token=True,
        grid_rope=True,
        epsilon=1e-5,
        **_sizes(config),
    )


def _sizes(config: Any) -> dict[str, Any]:
    return {
        "patch": config.patch_size_for_vit,
        "channels": config.num_channels_for_vit,
        "width": config.hidden_size_for_vit,
        "hidden": config.intermediate_size_for_vit,
        "layers": config.num_hidden_layers_for_vit,
        "heads": config.num_attention_heads_for_vit,
    }
