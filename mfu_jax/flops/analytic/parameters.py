"""Exact parameter counts from the config, summed over the same components as the FLOPs."""

from __future__ import annotations

from typing import Any, NamedTuple

from mfu_jax.flops.analytic.architectures.families import build
from mfu_jax.flops.analytic.components import Layers
from mfu_jax.flops.analytic.inputs.sources import as_model_config
from mfu_jax.flops.analytic.model_configs.model import ModelConfig
from mfu_jax.flops.analytic.names import LOGITS, POSITIONS
from mfu_jax.flops.analytic.towers.selection import require_towers


class ParameterCount(NamedTuple):
    """Parameter counts of a model.

    Attributes:
        total: all weights, tied ones counted once.
        active: weights that one token uses: all but the experts it is not routed to.
        embedding: weights in lookup tables (tokens, positions, per-layer inputs).
        head: weights of the output head; 0 if it reuses the embedding table.
        positions: the part of `embedding` in a table of positions.
    """

    total: int
    active: int
    embedding: int
    head: int
    positions: int

    @property
    def active_non_embedding(self) -> int:
        """Active weights without tables and output head (Kaplan et al., 2020)."""
        return self.active - self.embedding - self.head


def count_parameters(config: Any) -> ParameterCount:
    """Counts the weights of `config`.

    Args:
        config: a `ModelConfig`, a mapping, or any object with MaxText's field names.

    >>> config = dict(vocab_size=10, num_decoder_layers=1, emb_dim=4, num_query_heads=2,
    ...     head_dim=2, mlp_dim=8, mlp_activations=["gelu"], logits_via_embedding=True)
    >>> count_parameters(config).total  # table, q k v o, wi wo, three norms
    180
    """
    model_config = as_model_config(config)
    return parameters_of(model_config, build(model_config))


def parameters_of(config: ModelConfig, model: Layers) -> ParameterCount:
    """Counts the weights of the model built from `config`.

    Raises:
        UserError: sizes are missing that only the weights depend on, not the FLOPs.
    """
    if config.engram.engram_layers:
        config.require("engram_vocab_bases")
    require_towers(config)
    total = active = embedding = head = positions = 0
    for layer in model:
        for part in layer.components:
            held = layer.repeats * part.parameters
            total += held
            used = part.parameters if part.active_parameters is None else part.active_parameters
            active += layer.repeats * used
            embedding += held if part.table else 0
            head += held if part.name == LOGITS else 0
            positions += held if part.table and part.name == POSITIONS else 0
    return ParameterCount(total, active, embedding, head, positions)
