"""Requirements on a config with images, for each tower of the reference model."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from mfu_jax.errors import UserError

if TYPE_CHECKING:
    from mfu_jax.trainer.config.pyconfig import Config

_SIZES = (
    "patch_size_for_vit num_channels_for_vit hidden_size_for_vit intermediate_size_for_vit "
    "num_hidden_layers_for_vit num_attention_heads_for_vit"
).split()


@dataclass(frozen=True, kw_only=True)
class TowerRules:
    """The rules of one tower.

    Attributes:
        side: the key with an image's side in pixels, or its height and width.
        sizes: further keys that the tower needs.
        joined: from a config, the side in patches of the square that becomes one token.
        rows: the key with the rows of each axis's position table; empty: no such table.
        head_unit: the width of a head must be a multiple of this.
        oblong: whether images need not be square.
        mlp_reads_squares: whether `intermediate_size_for_vit` is the width of a square of patches.
        goes_deep: whether inner layers feed the decoder, and the position table is a square's.
    """

    side: str
    sizes: tuple[str, ...] = ()
    joined: Callable[[Config], int]
    rows: str = ""
    head_unit: int = 1
    oblong: bool = False
    mlp_reads_squares: bool = False
    goes_deep: bool = False


_QWEN3 = TowerRules(
    side="image_size_for_vit",
    sizes=(
        "spatial_merge_size_for_vit",
        "temporal_patch_size_for_vit",
        "num_position_embeddings_for_vit",
    ),
    joined=lambda config: config.spatial_merge_size_for_vit,
    head_unit=4,
    oblong=True,
    goes_deep=True,
)

# decoder_block → its tower
TOWERS: Mapping[str, TowerRules] = {
    "gemma3": TowerRules(side="image_size_for_vit", joined=lambda config: 4),
    "gemma4": TowerRules(
        side="image_size_for_vit",
        sizes=("num_position_embeddings_for_vit",),
        joined=lambda config: 3,
        rows="num_position_embeddings_for_vit",
        head_unit=4,
        oblong=True,
    ),
    "llama4": TowerRules(
        side="tile_size_for_vit",
        sizes=(
            "projector_input_dim_for_vit",
            "projector_output_dim_for_vit",
            "pixel_shuffle_ratio_for_vit",
        ),
        joined=lambda config: round(1 / config.pixel_shuffle_ratio_for_vit),
        head_unit=4,
        mlp_reads_squares=True,
    ),
    "qwen3": _QWEN3,
    "qwen3_moe": _QWEN3,
}


def check_images(config: Config) -> None:
    """Raises a `UserError` if the config has images that it cannot train on."""
    if not config.images_per_sequence:
        if config.use_multimodal:
            raise UserError("use_multimodal=true needs images_per_sequence, which is 0")
        return
    wanted = f"images_per_sequence={config.images_per_sequence}"
    rules = TOWERS.get(config.decoder_block)
    if rules is None:
        raise UserError(
            f"{wanted}: the reference model has the towers of {', '.join(TOWERS)}, not that of "
            f"decoder_block={config.decoder_block}; 0 trains the text model"
        )
    for key in (*_SIZES, *rules.sizes):
        if getattr(config, key) <= 0:
            raise UserError(f"{wanted} needs {key}, which is {getattr(config, key)}")
    _check_patches(config, rules)
    if rules.goes_deep:
        _check_depth(config)


def _check_depth(config: Config) -> None:
    """Checks the position table, and which of the tower's inner layers feed the decoder."""
    rows = config.num_position_embeddings_for_vit
    if math.isqrt(rows) ** 2 != rows:
        raise UserError(
            f"num_position_embeddings_for_vit={rows}: expected a square, whose table of places is "
            "stretched to an image's patches"
        )
    if config.out_hidden_size_for_vit not in (0, config.emb_dim):
        raise UserError(
            f"out_hidden_size_for_vit={config.out_hidden_size_for_vit}: expected "
            f"emb_dim={config.emb_dim}, which it is added to"
        )
    deep, layers = config.deepstack_visual_indexes_for_vit, config.num_hidden_layers_for_vit
    fits = len(deep) <= config.num_decoder_layers and all(0 <= n < layers for n in deep)
    if not fits or list(deep) != sorted(set(deep)):
        raise UserError(
            f"deepstack_visual_indexes_for_vit={list(deep)}: expected ascending numbers below "
            f"num_hidden_layers_for_vit={layers}, one for each of the first layers of at most "
            f"num_decoder_layers={config.num_decoder_layers}"
        )


def _sides(config: Config, rules: TowerRules) -> tuple[int, ...]:
    """Side of a square image, or an image's height and width, in pixels."""
    size = getattr(config, rules.side)
    sides = (size,) if isinstance(size, int) else tuple(size)
    if len(sides) not in (1, 2) or min(sides) <= 0 or (len(sides) == 2 and not rules.oblong):
        wanted = "a size, or [height, width]" if rules.oblong else "the side of a square"
        raise UserError(
            f"images_per_sequence needs {rules.side}, which is {size}: expected {wanted}"
        )
    return sides


def _rows(config: Config, rules: TowerRules) -> int:
    """Rows of each axis's position table; 0: as many as needed."""
    return getattr(config, rules.rows) if rules.rows else 0


def _check_patches(config: Config, rules: TowerRules) -> None:
    """Checks the sides and widths of a tower that must divide each other."""
    joined, most = rules.joined(config), _rows(config, rules)
    for side in _sides(config, rules):
        patches = side // config.patch_size_for_vit
        if patches < joined or patches % joined:
            raise UserError(
                f"{rules.side}: {side} pixels make {patches} patches; expected a multiple of "
                f"{joined}, which become one token"
            )
        if most and patches > most:
            raise UserError(
                f"{rules.side}: {side} pixels make {patches} patches; expected at most "
                f"{rules.rows}={most}"
            )
    width, heads = config.hidden_size_for_vit, config.num_attention_heads_for_vit
    if width % (heads * rules.head_unit):
        raise UserError(
            f"hidden_size_for_vit={width}: expected a multiple of {heads * rules.head_unit}, for "
            f"num_attention_heads_for_vit={heads}"
        )
    if rules.mlp_reads_squares and config.intermediate_size_for_vit != width * joined**2:
        raise UserError(
            f"intermediate_size_for_vit={config.intermediate_size_for_vit}: the MLP behind the "
            f"patches reads {joined**2} of hidden_size_for_vit={width}; expected "
            f"{width * joined**2}"
        )
