"""Multi-token prediction (DeepSeek-V3, arXiv 2412.19437, section 2.2)."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from ..building import Builder, Inputs
from .block import Block, LayerSpec
from .stack import Remat, run_block


class MultiTokenPrediction(nnx.Module):
    """One more layer, on the last hidden state joined with the embedding of a later token."""

    def __init__(self, layer: LayerSpec, build: Builder, *, remat: Remat) -> None:
        D = build.emb_dim
        self.hidden_norm, self.embedding_norm, self.norm = (build.norm() for _ in range(3))
        self.projection = build.dense((2 * D,), (D,), ("streams", "embed"))
        self.block = Block(layer, build)
        self.remat = remat

    def __call__(
        self, hidden: jax.Array, embedding: jax.Array, inputs: Inputs
    ) -> tuple[jax.Array, jax.Array, dict[str, Any]]:
        """Hidden state before and after the norm, and the layer's notes.

        Args:
            hidden: of the model, or of the previous module, [batch, sequence, emb_dim].
            embedding: of the token ahead of each position, the same shape.
        """
        joined = [self.hidden_norm(hidden), self.embedding_norm(embedding)]
        with jax.named_scope("projection"):
            x = self.projection(jnp.concatenate(joined, axis=-1))
        graphdef, weights = nnx.split(self.block)
        with jax.named_scope("layer"):
            x, _, notes = self.remat(run_block(graphdef))(x, weights, inputs)
        with jax.named_scope("norm"):
            return x, self.norm(x), notes
