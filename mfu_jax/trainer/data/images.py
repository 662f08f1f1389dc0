"""Random images at the beginning of every row of text."""

from __future__ import annotations

import zlib
from collections.abc import Callable

import numpy as np

from mfu_jax.errors import UserError
from mfu_jax.layers.families import model_spec
from mfu_jax.trainer.config.pyconfig import Config

Row = dict[str, np.ndarray]
# The token at image positions; not a separator.
_PLACEHOLDER = 1


def image_shape(config: Config) -> tuple[int, ...]:
    """The images of a sequence: [images × tiles, height, width, channels]."""
    spec = model_spec(config).vision
    if spec is None:
        return ()
    tiles = config.images_per_sequence * max(config.tiles_per_image, 1)
    return tiles, *spec.sides, spec.channels


def image_tokens(config: Config) -> int:
    """Image tokens per sequence.

    Raises:
        UserError: they leave no text.
    """
    spec = model_spec(config).vision
    tokens = image_shape(config)[0] * spec.tokens if spec is not None else 0
    if tokens >= config.max_target_length:
        raise UserError(
            f"images_per_sequence={config.images_per_sequence} makes {tokens} tokens of each "
            f"sequence; expected fewer than max_target_length={config.max_target_length}"
        )
    return tokens


def with_images(config: Config, split: Callable[[np.ndarray], Row]) -> Callable[[np.ndarray], Row]:
    """`split` for rows of S + 1 tokens that begin with images, whose pixels are random.

    Both sequences of a pair have the same images.

    The first document of a row becomes the text after the images; among image tokens, only the
    last has a target.

    Returns:
        A function whose result also has ``images`` (bytes, of `image_shape`) and
        ``inputs_image`` (see `Images.places`; int32 [S]).
    """
    count, shape = image_tokens(config), image_shape(config)

    def cut(row: np.ndarray) -> Row:
        pixels = np.random.default_rng(zlib.crc32(row.tobytes())).integers(
            0, 256, shape, dtype=np.uint8
        )
        row = row.copy()
        row[:count] = _PLACEHOLDER
        found = split(row)
        *pair, length = found["inputs"].shape
        found["targets_weight"][..., : count - 1] = 0
        places = np.arange(1, length + 1, dtype=np.int32)
        images = np.broadcast_to(pixels, (*pair, *shape))
        at = np.broadcast_to(np.where(places <= count, places, 0), (*pair, length))
        return {**found, "images": images, "inputs_image": at}

    return cut
