"""The table of families: `decoder_block` → function that lists a model's layers."""

from __future__ import annotations

from collections.abc import Callable

from mfu_jax.errors import UserError, nearest
from mfu_jax.flops.analytic.components import Model
from mfu_jax.flops.analytic.model_configs.model import ModelConfig

Family = Callable[[ModelConfig], Model]
_FAMILIES: dict[str, Family] = {}


def architecture(*blocks: str) -> Callable[[Family], Family]:
    """Registers a function for the `decoder_block` names that it handles."""

    def register(family: Family) -> Family:
        _FAMILIES.update(dict.fromkeys(blocks, family))
        return family

    return register


def known_blocks() -> list[str]:
    """Every registered `decoder_block`."""
    return sorted(_FAMILIES)


def build(config: ModelConfig) -> Model:
    """The layers of `config`.

    Raises:
        UserError: its `decoder_block` is not registered.
    """
    try:
        family = _FAMILIES[config.decoder_block]
    except KeyError:
        block = config.decoder_block
        raise UserError(
            f"decoder_block={block!r} is not known{nearest(block, _FAMILIES)}; known are "
            f"{', '.join(known_blocks())}; count_model_flops(fn, *args) counts any JAX function"
        ) from None
    return family(config)
