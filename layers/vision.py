"""Vision encoders (ViT, arXiv 2010.11929): images become tokens that stand in the text."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from .blocks import LayerSpec
from .building import Builder, Inputs
from .feed_forwards import MlpSpec
from .stack import Remat, Stack
from .vision_merging import MergeSpec

# meta-llama/Llama-4-Scout-17B-16E, config.json, vision_config: rope_theta.
_GRID_TIMESCALE = 10_000.0
_BYTE = 255.0


class Images(NamedTuple):
    """The images of a batch, and where their tokens stand.

    Attributes:
        pixels: [batch, images, side, side, channels], from 0 to 255; tiles count as images.
        places: which of its sequence's image tokens stands at each place, from 1 on; 0: text;
            [batch, sequence].
    """

    pixels: jax.Array
    places: jax.Array


@dataclass(frozen=True, kw_only=True)
class VisionSpec:
    """A tower: patches, layers of full attention, fewer tokens, and the decoder's width.

    Attributes:
        side: pixels of a side of an image.
        patch: of a patch.
        hidden: width of the layers' MLP.
        merge: makes one token of several patches.
        activation: of the MLP.
        patch_bias: of the projection of patches.
        class_token: behind the patches stands one more token, which is left out in the end, and a
            norm stands before the layers, too.
        grid_rope: queries and keys are rotated by their patch's row and column.
        epsilon: of the norms.
        projector_norm: before the projection to the decoder's width; empty: none.
    """

    side: int
    patch: int
    channels: int
    width: int
    hidden: int
    layers: int
    heads: int
    merge: MergeSpec
    activation: str = "gelu"
    patch_bias: bool = False
    class_token: bool = False
    grid_rope: bool = False
    epsilon: float = 1e-6
    projector_norm: str = ""

    @property
    def columns(self) -> int:
        """Patches in a row of an image."""
        return self.side // self.patch

    @property
    def tokens(self) -> int:
        """Tokens that an image becomes."""
        return (self.columns // self.merge.side) ** 2


class VisionEncoder(nnx.Module):
    """Images → their tokens, in the tower's width."""

    def __init__(
        self,
        spec: VisionSpec,
        build: Builder,
        *,
        scan: bool,
        remat: Remat,
        first_alone: bool = False,
    ) -> None:
        own = dataclasses.replace(
            build, emb_dim=spec.width, normalization="layernorm", epsilon=spec.epsilon
        )
        pixels = spec.channels * spec.patch**2
        self.patches = own.dense((pixels,), (spec.width,), ("patch", "embed"), bias=spec.patch_bias)
        places = spec.columns**2 + spec.class_token
        self.positions = own.matrix((places, spec.width), spec.width, ("position", "embed"))
        if spec.class_token:
            self.class_token = own.matrix((spec.width,), spec.width, ("norm",))
            self.first_norm = own.norm()
        layer = LayerSpec(
            mixer=VisionAttentionSpec(
                heads=spec.heads, columns=spec.columns if spec.grid_rope else 0
            ),
            feed_forward=MlpSpec(hidden=spec.hidden, activations=(spec.activation,), bias=True),
        )
        keys = jax.random.split(build.rngs.params(), spec.layers)
        self.layers = Stack(
            (layer,) * spec.layers, keys, own, scan=scan, remat=remat, first_alone=first_alone
        )
        self.norm = own.norm()
        self.merge = spec.merge.make(own)
        self.spec = spec

    def __call__(self, pixels: jax.Array) -> jax.Array:
        """[images, side, side, channels], from 0 to 255 → [images, tokens, merge's width]."""
        spec = self.spec
        with jax.named_scope("patches"):
            x = self.patches(self._cut(pixels))
        numbers = jnp.broadcast_to(jnp.arange(x.shape[1]), x.shape[:2])
        if spec.class_token:
            token = self.class_token[...].astype(x.dtype)
            x = jnp.concatenate([x, jnp.broadcast_to(token, (len(x), 1, spec.width))], axis=1)
            numbers = jnp.pad(numbers, ((0, 0), (0, 1)), constant_values=-1)
        x = x + self.positions[...].astype(x.dtype)
        if spec.class_token:
            x = self.first_norm(x)
        of_patches = Inputs(tokens=numbers, positions=numbers, segment_ids=jnp.ones_like(numbers))
        x, _ = self.layers(x, of_patches)
        x = self.norm(x)[:, : spec.columns**2]
        with jax.named_scope("merge"):
            merged: jax.Array = self.merge(x.reshape(len(x), spec.columns, spec.columns, -1))
        return merged

    def _cut(self, pixels: jax.Array) -> jax.Array:
        """Patches with values from −1 to 1: [images, patches, patch · patch · channels]."""
        count, patch = self.spec.columns, self.spec.patch
        scaled = (pixels.astype(jnp.float32) * (2 / _BYTE) - 1).astype(self.patches.dtype)
        cut = scaled[:, : count * patch, : count * patch]
        cut = cut.reshape(len(cut), count, patch, count, patch, -1).swapaxes(2, 3)
        return cut.reshape(len(cut), count**2, -1)


class VisionProjector(nnx.Module):
    """A tower's tokens → the decoder's width."""

    def __init__(self, spec: VisionSpec, build: Builder) -> None:
        width = spec.merge.width(spec.width)
        if spec.projector_norm:
            own = dataclasses.replace(build, epsilon=spec.epsilon)
            self.norm = own.norm(width, spec.projector_norm)
        self.projection = build.dense((width,), (build.emb_dim,), ("q_lora", "embed"))
        self.has_norm = bool(spec.projector_norm)

    def __call__(self, x: jax.Array) -> jax.Array:
        """[images, tokens, width] → [images, tokens, emb_dim]."""
        return self.projection(self.norm(x) if self.has_norm else x)


@dataclass(frozen=True, kw_only=True)
class VisionAttentionSpec:
    """Every patch sees every patch.

    Attributes:
        columns: patches in a row, for the rotation by row and column; 0: none.
    """

    heads: int
    columns: int = 0
    scope: str = "self_attention"
    needs: frozenset[str] = frozenset()

    def make(self, build: Builder) -> VisionAttention:
        """The layer's weights."""
        return VisionAttention(self, build)


class VisionAttention(nnx.Module):
    """Multi-head attention without a mask, with biases."""

    def __init__(self, spec: VisionAttentionSpec, build: Builder) -> None:
        width, heads = build.emb_dim, (spec.heads, build.emb_dim // spec.heads)
        inwards, outwards = ("embed", "q_heads", "head_dim"), ("q_heads", "head_dim", "embed")
        self.query, self.key, self.value = (
            build.dense((width,), heads, inwards, bias=True, name=name)
            for name in ("q_proj", "k_proj", "v_proj")
        )
        self.out = build.dense(heads, (width,), outwards, bias=True, name="o_proj")
        self.spec = spec

    def __call__(self, x: jax.Array, inputs: Inputs) -> jax.Array:
        """[images, patches, width] → the same; `inputs.positions` are the patches' numbers."""
        q, k, v = (
            checkpoint_name(make(x), f"{name}_proj")
            for name, make in (("query", self.query), ("key", self.key), ("value", self.value))
        )
        if self.spec.columns:
            q, k = (grid_rotated(y, inputs.positions, self.spec.columns) for y in (q, k))
        with jax.named_scope("attention_op"):
            context = jax.nn.dot_product_attention(q, k, v, implementation="xla")
        return checkpoint_name(self.out(checkpoint_name(context, "context")), "out_proj")


def grid_rotated(x: jax.Array, numbers: jax.Array, columns: int) -> jax.Array:
    """Neighbouring values of a head as pairs: the first half turned by column, the rest by row.

    Args:
        x: [images, patches, heads, head_dim], of which head_dim is a multiple of 4.
        numbers: of the patches, row by row; −1 is not rotated; [images, patches].
        columns: patches in a row.
    """
    pairs = x.shape[-1] // 2
    steps = _GRID_TIMESCALE ** -(jnp.arange(pairs // 2) / (pairs // 2))
    places = jnp.stack([numbers % columns, numbers // columns], axis=-1) + 1
    angle = (places[..., None] * steps).reshape(*numbers.shape, 1, pairs)
    angle = jnp.where(numbers[..., None, None] < 0, 0.0, angle)
    first, second = jnp.moveaxis(x.astype(jnp.float32).reshape(*x.shape[:-1], pairs, 2), -1, 0)
    sin, cos = jnp.sin(angle), jnp.cos(angle)
    turned = [first * cos - second * sin, first * sin + second * cos]
    return jnp.stack(turned, axis=-1).reshape(x.shape).astype(x.dtype)


@dataclass(frozen=True, kw_only=True)
class ImageTokens:
    """What a tower made of the images of a batch.

    Attributes:
        tokens: of each sequence's images, one after another, [batch, image tokens, emb_dim].
        places: of `Images`.
        per_image: tokens of an image.
    """

    tokens: jax.Array
    places: jax.Array
    per_image: int

    @property
    def numbers(self) -> jax.Array:
        """The image at each place, from 1 on; 0: text; [batch, sequence]."""
        return -(-self.places // self.per_image)

    def shifted(self, count: int) -> ImageTokens:
        """The tokens `count` places ahead, as `Inputs.shifted`."""
        ahead = jnp.pad(self.places[:, count:], ((0, 0), (0, count)))
        return dataclasses.replace(self, places=ahead)

    def put_into(self, x: jax.Array) -> jax.Array:
        """The embedded text [batch, sequence, emb_dim] with them. A gather: no matmul."""
        numbers = jnp.maximum(self.places - 1, 0)
        picked = jax.vmap(lambda tokens, numbers: tokens[numbers])(self.tokens, numbers)
        return jnp.where(self.places[..., None] > 0, picked.astype(x.dtype), x)
