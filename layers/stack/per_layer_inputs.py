"""Gemma's per-layer embeddings: each layer has its own input for every token."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
from flax import nnx

from ..building import Builder, Inputs
from ..normalizations import RMSNorm
from ..projections.linears import Embed


class PerLayerEmbedding(nnx.Module):
    """The inputs of all layers: a token table plus a projection of the embedding."""

    def __init__(self, rows: int, layers: int, width: int, build: Builder) -> None:
        self.table = Embed(build, rows, layers * width, row_axis="vocab")
        self.projection = build.dense((build.emb_dim,), (layers, width), ("embed", "layers", "mlp"))
        self.norm = RMSNorm(width, epsilon=build.epsilon, weight_dtype=build.weight_dtype)
        self.shape = (layers, width)

    def __call__(self, x: jax.Array, tokens: jax.Array) -> jax.Array:
        """Embedding [batch, sequence, emb_dim] → [layers, batch, sequence, width]."""
        layers, width = self.shape
        own = self.table(tokens).reshape(*tokens.shape, layers, width) * math.sqrt(width)
        with jax.named_scope("per_layer_projection"):
            projected = self.projection(x) / math.sqrt(x.shape[-1])
        return jnp.moveaxis((self.norm(projected) + own) / math.sqrt(2), 2, 0)


class PerLayerInput(nnx.Module):
    """``x + norm(proj(gelu(gate(x)) · input))``."""

    def __init__(self, width: int, build: Builder) -> None:
        self.gate = build.dense((build.emb_dim,), (width,), ("embed", "mlp"))
        self.projection = build.dense((width,), (build.emb_dim,), ("mlp", "embed"))
        self.norm = build.norm()

    def __call__(self, x: jax.Array, inputs: Inputs) -> jax.Array:
        """[batch, sequence, emb_dim] → the same."""
        assert inputs.per_layer is not None  # the decoder sets it for every layer, or for none
        with jax.named_scope("per_layer_input"):
            gated = jax.nn.gelu(self.gate(x)) * inputs.per_layer
            return x + self.norm(self.projection(gated))
