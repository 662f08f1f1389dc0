"""Requirements on a config with images, for each tower of the reference model."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from mfu_jax.trainer.config.keys import key_rules
from mfu_jax.trainer.config.messages import wrong

if TYPE_CHECKING:
    from mfu_jax.trainer.config.pyconfig import Config


@dataclass(frozen=True, kw_only=True)
class TowerRules:
    """The rules of one tower.

    Attributes:
        side: the key with an image's side in pixels, or its height and width.
        sizes: further keys that the tower needs.
        joined: the side in patches of the square that becomes one token, or the key that has it, or
            its inverse.
        rows: the key with the rows of each axis's position table; empty: no such table.
        head_unit: the width of a head must be a multiple of this.
        oblong: whether images need not be square.
        mlp_reads_squares: whether `intermediate_size_for_vit` is the width of a square of patches.
        goes_deep: whether inner layers feed the decoder, and the position table is a square's.
    """

    side: str
    sizes: Sequence[str] = ()
    joined: int | str
    rows: str = ""
    head_unit: int = 1
    oblong: bool = False
    mlp_reads_squares: bool = False
    goes_deep: bool = False


# decoder_block → its tower
TOWERS: Mapping[str, TowerRules] = {
    block: TowerRules(**rules) for block, rules in key_rules()["towers"].items()
}


def check_images(config: Config) -> None:
    """Raises a `UserError` if the config has images that it cannot train on."""
    if not config.images_per_sequence:
        if config.use_multimodal:
            raise wrong(config, "use_multimodal", "it needs images_per_sequence, which is 0")
        return
    rules = TOWERS.get(config.decoder_block)
    if rules is None:
        problem = f"the reference model has the towers of {', '.join(TOWERS)}, not that of this one"
        raise wrong(config, "images_per_sequence decoder_block", problem)
    for key in (*key_rules()["tower_sizes"], *rules.sizes):
        if getattr(config, key) <= 0:
            raise wrong(config, f"images_per_sequence {key}", f"it needs {key}")
    _check_patches(config, rules)
    if rules.goes_deep:
        _check_depth(config)


def _check_depth(config: Config) -> None:
    """Checks the position table, and which of the tower's inner layers feed the decoder."""
    rows = config.num_position_embeddings_for_vit
    if math.isqrt(rows) ** 2 != rows:
        expected = "expected a square, whose table is stretched to an image's patches"
        raise wrong(config, "num_position_embeddings_for_vit", expected)
    if config.out_hidden_size_for_vit not in (0, config.emb_dim):
        expected = f"expected emb_dim={config.emb_dim}, which it is added to"
        raise wrong(config, "out_hidden_size_for_vit", expected)
    deep, layers = config.deepstack_visual_indexes_for_vit, config.num_hidden_layers_for_vit
    fits = len(deep) <= config.num_decoder_layers and all(0 <= n < layers for n in deep)
    if not fits or list(deep) != sorted(set(deep)):
        expected = f"expected ascending numbers below {layers}, at most one for each decoder layer"
        keys = "deepstack_visual_indexes_for_vit num_hidden_layers_for_vit num_decoder_layers"
        raise wrong(config, keys, expected)


def _sides(config: Config, rules: TowerRules) -> tuple[int, ...]:
    """Side of a square image, or an image's height and width, in pixels."""
    size = getattr(config, rules.side)
    sides = (size,) if isinstance(size, int) else tuple(size)
    if len(sides) > (2 if rules.oblong else 1) or not sides or min(sides) <= 0:
        wanted = "a size, or [height, width]" if rules.oblong else "the side of a square"
        raise wrong(config, rules.side, f"expected {wanted}")
    return sides


def _joined(config: Config, rules: TowerRules) -> int:
    """Side of the square of patches that becomes one token."""
    if isinstance(rules.joined, int):
        return rules.joined
    side = getattr(config, rules.joined)
    return round(side if side >= 1 else 1 / side)


def _check_patches(config: Config, rules: TowerRules) -> None:
    """Checks the sides and widths of a tower that must divide each other."""
    joined = _joined(config, rules)
    most = getattr(config, rules.rows) if rules.rows else math.inf
    for side in _sides(config, rules):
        patches = side // config.patch_size_for_vit
        if patches < joined or patches % joined or patches > most:
            expected = f"a multiple of {joined}, which become one token, and at most {most}"
            problem = f"{side} pixels make {patches} patches; expected {expected}"
            raise wrong(config, rules.side, problem)
    width, heads = config.hidden_size_for_vit, config.num_attention_heads_for_vit
    if width % (heads * rules.head_unit):
        expected = f"expected a multiple of {heads * rules.head_unit}"
        raise wrong(config, "hidden_size_for_vit num_attention_heads_for_vit", expected)
    if rules.mlp_reads_squares and config.intermediate_size_for_vit != width * joined**2:
        expected = f"expected {width * joined**2}: the MLP reads {joined**2} patches at once"
        raise wrong(config, "intermediate_size_for_vit hidden_size_for_vit", expected)
