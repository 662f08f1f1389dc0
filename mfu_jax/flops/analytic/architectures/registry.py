"""The table of families: `decoder_block` → function that lists a model's layers."""

from __future__ import annotations

from collections.abc import Callable

from mfu_jax.errors import UserError, nearest
from mfu_jax.flops.analytic.components import Model
from mfu_jax.flops.analytic.shapes.model import ModelShape

Family = Callable[[ModelShape], Model]
_FAMILIES: dict[str, Family] = {}


def architecture(*blocks: str) -> Callable[[Family], Family]:
    """Registers a function for the `decoder_block` names that it serves."""

    def register(family: Family) -> Family:
        _FAMILIES.update(dict.fromkeys(blocks, family))
        return family

    return register


def known_blocks() -> list[str]:
    """Every registered `decoder_block`."""
    return sorted(_FAMILIES)


def build(shape: ModelShape) -> Model:
    """The layers of `shape`.

    Raises:
        UserError: nobody registered its `decoder_block`.
    """
    try:
        family = _FAMILIES[shape.decoder_block]
    except KeyError:
        block = shape.decoder_block
        raise UserError(
            f"decoder_block={block!r} is not known{nearest(block, _FAMILIES)}; known are "
            f"{', '.join(known_blocks())}; count_model_flops(fn, *args) counts any JAX function"
        ) from None
    return family(shape)
