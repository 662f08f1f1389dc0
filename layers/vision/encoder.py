"""Vision encoders (ViT, arXiv 2010.11929): images become tokens in the text."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from ..building import Builder, Inputs
from ..feed_forward.mlp import MlpSpec
from ..normalizations import scaled_to_one
from ..stack.block import PRE_NORMS, LayerSpec
from ..stack.stack import Remat, Stack, results
from .attention import VisionAttentionSpec
from .deep_stack import SquareProjector, stretched
from .merging import MergeSpec, PatchMerge

_BYTE = 255.0


class Images(NamedTuple):
    """The images of a batch, and the positions of their tokens.

    Attributes:
        pixels: [batch, images, height, width, channels], from 0 to 255; a tile counts as an image.
        places: which of its sequence's image tokens is at each position, counted from 1; 0: text;
            [batch, sequence].
    """

    pixels: jax.Array
    places: jax.Array


@dataclass(frozen=True, kw_only=True)
class VisionSpec:
    """A tower: patches, layers of full attention, merging, projection to the decoder's width.

    Attributes:
        sides: pixels of an image's height and width.
        patch: side of a patch in pixels.
        merge: makes one token from several patches.
        norms: of a layer, as in `LayerSpec`.
        normalization, epsilon: of the norms.
        last_norm: whether a norm follows the layers.
        patch_bias: whether the projection of patches has a bias.
        axis_rows: rows of the position table of each axis; the two entries are added; 0: one table
            with a row for each patch.
        class_token: one more token follows the patches, dropped at the end, and a norm precedes
            the layers.
        table_rows: rows of a square position table, interpolated to the image's grid; 0: the table
            has a row for each patch.
        frames: how often a patch is repeated, as the frames of a video.
        projector_norm: norm before the projection to the decoder's width, a name of `NORMS` or
            `WEIGHTLESS`; empty: none.
        projector_is_mlp: see `SquareProjector`.
        deep: layers whose results go to the decoder's first layers, each by its own projector.
        grid_positions: image tokens have row and column positions in the text, too.
    """

    sides: tuple[int, int]
    patch: int
    channels: int
    width: int
    layers: int
    attention: VisionAttentionSpec
    feed_forward: MlpSpec
    merge: MergeSpec
    norms: tuple[str, ...] = PRE_NORMS
    normalization: str = "layernorm"
    epsilon: float = 1e-6
    last_norm: bool = True
    patch_bias: bool = False
    axis_rows: int = 0
    class_token: bool = False
    table_rows: int = 0
    frames: int = 1
    projector_norm: str = ""
    projector_is_mlp: bool = False
    deep: tuple[int, ...] = ()
    grid_positions: bool = False

    @property
    def grid(self) -> tuple[int, int]:
        """Rows and columns of patches in an image."""
        height, width = self.sides
        return height // self.patch, width // self.patch

    @property
    def patches(self) -> int:
        """Patches per image."""
        return math.prod(self.grid)

    @property
    def tokens(self) -> int:
        """Tokens per image."""
        return math.prod(self.token_grid)

    @property
    def token_grid(self) -> tuple[int, int]:
        """Rows and columns of tokens in an image."""
        rows, columns = self.grid
        return rows // self.merge.side, columns // self.merge.side


class VisionEncoder(nnx.Module):
    """Images → tokens in the tower's width, and inner layers' tokens in the decoder's width."""

    def __init__(
        self, spec: VisionSpec, build: Builder, *, scan: bool, remat: Remat, first_alone: bool
    ) -> None:
        own = dataclasses.replace(
            build, emb_dim=spec.width, normalization=spec.normalization, epsilon=spec.epsilon
        )
        pixels = spec.frames * spec.channels * spec.patch**2
        self.patches = own.dense((pixels,), (spec.width,), ("patch", "embed"), bias=spec.patch_bias)
        places = 2 * spec.axis_rows or spec.table_rows or spec.patches + spec.class_token
        self.positions = own.matrix((places, spec.width), spec.width, ("position", "embed"))
        if spec.class_token:
            self.class_token = own.matrix((spec.width,), spec.width, ("norm",))
            self.first_norm = own.norm()
        parts: dict[str, Any] = {"mixer": spec.attention, "feed_forward": spec.feed_forward}
        keys = jax.random.split(build.rngs.params(), spec.layers)
        layers = [
            LayerSpec(**parts, norms=spec.norms, of_images=True, shown=number in spec.deep)
            for number in range(spec.layers)
        ]
        self.layers = Stack(layers, keys, own, scan=scan, remat=remat, first_alone=first_alone)
        if spec.last_norm:
            self.norm = own.norm()
        self.merge = PatchMerge(spec.merge, own)
        joined = spec.merge.width(spec.width)
        self.deep = nnx.List(
            [SquareProjector(joined, joined, build.emb_dim, own) for _ in spec.deep]
        )
        self.spec = spec

    def __call__(self, pixels: jax.Array) -> tuple[jax.Array, list[jax.Array]]:
        """Runs the tower.

        Args:
            pixels: [images, height, width, channels], from 0 to 255.

        Returns:
            [images, tokens, merge's width]; and, for each of the `deep` layers,
            [images, tokens, emb_dim].
        """
        spec = self.spec
        with jax.named_scope("patches"):
            x = self.patches(self._cut(pixels))
        numbers = jnp.broadcast_to(jnp.arange(x.shape[1]), x.shape[:2])
        if spec.class_token:
            token = self.class_token[...].astype(x.dtype)
            x = jnp.concatenate([x, jnp.broadcast_to(token, (len(x), 1, spec.width))], axis=1)
            numbers = jnp.pad(numbers, ((0, 0), (0, 1)), constant_values=-1)
        x = x + self._of_places().astype(x.dtype)
        if spec.class_token:
            x = self.first_norm(x)
        of_patches = Inputs(tokens=numbers, positions=numbers, segment_ids=jnp.ones_like(numbers))
        x, notes = self.layers(x, of_patches)
        with jax.named_scope("deep"):
            shown = results(self.layers.segments, notes)
            deep = [p(self._merged(y)) for p, y in zip(self.deep, shown, strict=True)]
        x = (self.norm(x) if spec.last_norm else x)[:, : spec.patches]
        with jax.named_scope("merge"):
            return self._merged(x), deep

    def _merged(self, x: jax.Array) -> jax.Array:
        """[images, patches, width] → [images, tokens, merge's width]."""
        merged: jax.Array = self.merge(x.reshape(len(x), *self.spec.grid, -1))
        return merged

    def _of_places(self) -> jax.Array:
        """The position embeddings of the patches and the class token, [patches, width]."""
        table = self.positions[...]
        if self.spec.table_rows:
            return stretched(table, self.spec.grid)
        if not self.spec.axis_rows:
            return table
        numbers, columns = jnp.arange(self.spec.patches), self.spec.grid[1]
        return table[numbers % columns] + table[self.spec.axis_rows + numbers // columns]

    def _cut(self, pixels: jax.Array) -> jax.Array:
        """Patches scaled to [−1, 1]: [images, patches, frames · patch · patch · channels]."""
        (rows, columns), patch = self.spec.grid, self.spec.patch
        scaled = (pixels.astype(jnp.float32) * (2 / _BYTE) - 1).astype(self.patches.dtype)
        cut = scaled[:, : rows * patch, : columns * patch]
        cut = cut.reshape(len(cut), rows, patch, columns, patch, -1).swapaxes(2, 3)
        return jnp.tile(cut.reshape(len(cut), rows * columns, -1), self.spec.frames)


# A projector norm without weights.
WEIGHTLESS = "weightless"


def make_projector(spec: VisionSpec, build: Builder) -> VisionProjector | SquareProjector:
    """A tower's tokens → the decoder's width."""
    if not spec.projector_is_mlp:
        return VisionProjector(spec, build)
    own = dataclasses.replace(build, normalization=spec.projector_norm, epsilon=spec.epsilon)
    return SquareProjector(spec.merge.width(spec.width), spec.width, build.emb_dim, own)


class VisionProjector(nnx.Module):
    """A tower's tokens → the decoder's width."""

    def __init__(self, spec: VisionSpec, build: Builder) -> None:
        width = spec.merge.width(spec.width)
        if spec.projector_norm not in ("", WEIGHTLESS):
            own = dataclasses.replace(build, epsilon=spec.epsilon)
            self.norm = own.norm(width, spec.projector_norm)
        self.projection = build.dense((width,), (build.emb_dim,), ("q_lora", "embed"))
        self.kind, self.epsilon = spec.projector_norm, spec.epsilon

    def __call__(self, x: jax.Array) -> jax.Array:
        """[images, tokens, width] → [images, tokens, emb_dim]."""
        if self.kind == WEIGHTLESS:
            x = scaled_to_one(x, self.epsilon)
        elif self.kind:
            x = self.norm(x)
        return self.projection(x)


@dataclass(frozen=True, kw_only=True)
class ImageTokens:
    """The tower's tokens of the images of a batch.

    Attributes:
        tokens: of each sequence's images, one after another, [batch, image tokens, emb_dim].
        deep: the same, for each inner layer.
        places: as in `Images`.
        per_image: tokens per image.
    """

    tokens: jax.Array
    deep: tuple[jax.Array, ...]
    places: jax.Array
    per_image: int

    @property
    def numbers(self) -> jax.Array:
        """The image at each position, counted from 1; 0: text; [batch, sequence]."""
        return -(-self.places // self.per_image)

    def shifted(self, count: int) -> ImageTokens:
        """The tokens `count` positions ahead, as `Inputs.shifted`."""
        ahead = jnp.pad(self.places[:, count:], ((0, 0), (0, count)))
        return dataclasses.replace(self, places=ahead)

    def put_into(self, x: jax.Array) -> jax.Array:
        """The embedded text [batch, sequence, emb_dim] with the image tokens put in."""
        return self._instead(x, self.tokens)

    def deep_placed(self, x: jax.Array) -> tuple[jax.Array, ...]:
        """`deep` at the image positions, zeros elsewhere, each with the shape of the text `x`."""
        return tuple(self._instead(jnp.zeros_like(x), tokens) for tokens in self.deep)

    def _instead(self, x: jax.Array, tokens: jax.Array) -> jax.Array:
        """A gather: no matmul."""
        numbers = jnp.maximum(self.places - 1, 0)
        picked = jax.vmap(lambda tokens, numbers: tokens[numbers])(tokens, numbers)
        return jnp.where(self.places[..., None] > 0, picked.astype(x.dtype), x)
