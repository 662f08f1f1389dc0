"""Qwen3-VL's (arXiv 2511.21631) additions to a tower: an MLP for each square of patches, a position
table interpolated to the image, and positions of the text in time, rows and columns.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from ..building import Builder


class SquareProjector(nnx.Module):
    """``gelu(norm(x) · mlp_0) · mlp_2`` of squares of patches.

    Args:
        joined: width of a square of patches.
        normed: width of the norm: a square's, or a patch's.
        out: width of the decoder.
        build: the tower's builder.
    """

    def __init__(self, joined: int, normed: int, out: int, build: Builder) -> None:
        self.norm = build.norm(normed)
        self.mlp_0 = build.dense((joined,), (joined,), ("embed", "mlp"), bias=True)
        self.mlp_2 = build.dense((joined,), (out,), ("mlp", "embed"), bias=True)
        self.normed = normed

    def __call__(self, x: jax.Array) -> jax.Array:
        """[images, tokens, joined] → [images, tokens, out]."""
        normed = self.norm(x.reshape(*x.shape[:2], -1, self.normed)).reshape(x.shape)
        hidden = jax.nn.gelu(self.mlp_0(normed), approximate=False)
        projected: jax.Array = self.mlp_2(hidden)
        return projected


def stretched(table: jax.Array, grid: tuple[int, int]) -> jax.Array:
    """Interpolates a square table of positions [side · side, width] to [rows · columns, width].

    Bilinear between the table's rows and columns; corners lie on corners. Sums of scaled rows: no
    matmul.
    """
    side = round(len(table) ** 0.5)
    if grid == (side, side):
        return table
    (top, bottom, down), (left, right, across) = (_between(count, side) for count in grid)

    def row(numbers: np.ndarray) -> jax.Array:
        first, last = (table[(side * numbers[:, None] + n).reshape(-1)] for n in (left, right))
        share = np.tile(across, len(numbers))[:, None]
        return first * (1 - share) + last * share

    share = np.repeat(down, len(left))[:, None]
    return row(top) * (1 - share) + row(bottom) * share


def _between(count: int, side: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """For each of `count` places: the entries before and after, and the weight of the latter."""
    at = np.arange(count, dtype=np.float32) * (side - 1) / max(count - 1, 1)
    before = np.floor(at).astype(np.int32)
    return before, np.minimum(before + 1, side - 1), (at - before).astype(np.float32)


def grid_positions(positions: jax.Array, places: jax.Array, grid: tuple[int, int]) -> jax.Array:
    """Positions in time, rows and columns.

    In text, all three are equal. An image is one moment, and takes as many positions as its longer
    side has tokens.

    Args:
        positions: of each token in its document, [batch, sequence].
        places: as in `Images`.
        grid: rows and columns of an image's tokens.

    Returns:
        [batch, sequence, 3].
    """
    rows, columns = grid
    number = jnp.where(places > 0, places - 1, 0) % (rows * columns)  # in its image
    begun = jax.lax.cummax(places, axis=1) // (rows * columns)
    before = jnp.where(places > 0, (places - 1) // (rows * columns), begun)  # images in the row
    first = jnp.arange(places.shape[1]) - positions  # start of the document
    own = before - jnp.take_along_axis(before, first, axis=1)
    start = positions - number - own * (rows * columns - max(grid))
    down, across = (jnp.where(places > 0, n, 0) for n in (number // columns, number % columns))
    return jnp.stack([start, start + down, start + across], axis=-1)
