"""What all layers of a model share when they are built, and what they read when they run."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass, field
from typing import Any, Protocol

import jax
import jax.numpy as jnp
from flax import nnx

from .normalizations import NORMS
from .projections.gathered_products import Gathers
from .projections.linears import Dense
from .projections.lora import Lora
from .projections.quantization import Quantization


@dataclass(frozen=True, kw_only=True)
class Builder:
    """Makes the weights of one layer.

    Attributes:
        emb_dim: width of the residual stream.
        dtype: of activations and matmuls; weights are stored in `weight_dtype`.
        normalization: a name of `NORMS`.
        epsilon: of the norms.
        attention: name of the attention implementation.
        pads_vocabulary: whether logits are computed for a vocabulary that fills tensor cores.
        saves_rotated: whether remat saves queries and keys after their norms and rotation.
        packed: whether a row may hold several documents, which attention keeps apart.
        on_tpu: whether dropless experts use the TPU kernels.
        gathers: when projections gather their weights.
        whole_gradients: whether the gradient of a part's norm waits for its whole input.
        rngs: for the initial weights.
        quantization: of the matmuls with weights; None: they run in `dtype`.
        lora: adapters beside projections; None: no adapters.
    """

    emb_dim: int
    dtype: jnp.dtype
    weight_dtype: jnp.dtype
    normalization: str
    epsilon: float
    attention: str
    rngs: nnx.Rngs
    quantization: Quantization | None = None
    lora: Lora | None = None
    on_tpu: bool = False
    gathers: Gathers = "xla"
    whole_gradients: bool = False
    packed: bool = True
    pads_vocabulary: bool = False
    saves_rotated: bool = False

    def of_layer(self, key: jax.Array) -> Builder:
        """A copy for a layer that starts from `key`."""
        return dataclasses.replace(self, rngs=nnx.Rngs(params=key))

    def dense(
        self,
        in_shape: tuple[int, ...],
        out_shape: tuple[int, ...],
        logical_axes: tuple[str, ...],
        *,
        bias: bool = False,
        name: str = "",
    ) -> Dense:
        """A projection.

        Args:
            logical_axes: a name for every dimension of the kernel.
            name: as in the analytic count, if the projection may have an adapter.
        """
        lora = self.lora if self.lora and name in self.lora.targets else None
        return Dense(self, in_shape, out_shape, logical_axes, use_bias=bias, lora=lora)

    def norm(self, features: int | None = None, kind: str | None = None) -> Any:
        """A norm over `features`, by default over the residual stream's width."""
        width = self.emb_dim if features is None else features
        make = NORMS[kind or self.normalization]
        return make(width, epsilon=self.epsilon, weight_dtype=self.weight_dtype)

    def vector(self, shape: tuple[int, ...], fill: float, logical_axes: tuple[str, ...]) -> Any:
        """Weights that start at a constant: scales, biases."""
        return nnx.Param(jnp.full(shape, fill, self.weight_dtype), logical_axes=logical_axes)

    def matrix(self, shape: tuple[int, ...], fan_in: int, logical_axes: tuple[str, ...]) -> Any:
        """Random weights scaled by their fan-in, as in `dense`."""
        values = jax.random.truncated_normal(self.rngs.params(), -2, 2, shape, self.weight_dtype)
        return nnx.Param(values / math.sqrt(fan_in), logical_axes=logical_axes)


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class Inputs:
    """What a layer reads besides the residual stream, and where it leaves what others read.

    Attributes:
        tokens: [batch, sequence].
        positions: of each token in its document, [batch, sequence].
        segment_ids: number of each token's document, [batch, sequence].
        kept: keys and values that earlier layers store for later ones, by name; layers add theirs.
        per_layer: this layer's own input, [batch, sequence, width].
        images: the image of each token, from 1 on; 0: text; [batch, sequence]; None: no images.
        deep: image features from inner layers of the tower, zeros in text, each
            [batch, sequence, emb_dim].
        grid: positions in time, rows and columns, [batch, sequence, 3]; None: no layer reads them.
        notes: what the layer reports, by name: losses, loads; initially empty.
    """

    tokens: jax.Array
    positions: jax.Array
    segment_ids: jax.Array
    kept: dict[str, Any] = field(default_factory=dict)
    per_layer: jax.Array | None = None
    images: jax.Array | None = None
    deep: tuple[jax.Array, ...] = ()
    grid: jax.Array | None = None
    notes: dict[str, jax.Array] = field(default_factory=dict)

    def shifted(self, count: int) -> Inputs:
        """The tokens `count` positions ahead; beyond the end of a row, token 0."""
        ahead = jnp.pad(self.tokens[:, count:], ((0, 0), (0, count)))
        return dataclasses.replace(self, tokens=ahead)


class PartSpec(Protocol):
    """The description of a part of a layer; hashable, so that equal layers can be scanned."""

    @property
    def scope(self) -> str:
        """The part's `jax.named_scope`."""
        ...

    @property
    def needs(self) -> frozenset[str]:
        """What the part needs from the attention implementation."""
        ...

    def make(self, build: Builder) -> Any:
        """Builds the part, which is called with (x [batch, sequence, emb_dim], `Inputs`)."""
        ...
