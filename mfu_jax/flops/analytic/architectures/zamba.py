"""Zamba and Zamba 2: Mamba layers, and transformer blocks whose weights are shared by layers."""

from __future__ import annotations

from mfu_jax.flops.analytic import formulas
from mfu_jax.flops.analytic.architectures import blocks, generic_decoder
from mfu_jax.flops.analytic.components import Component, Layers, layers_of
from mfu_jax.flops.analytic.formulas import Components
from mfu_jax.flops.analytic.model_configs.layers import HYBRID
from mfu_jax.flops.analytic.model_configs.model import ModelConfig


def zamba(config: ModelConfig) -> Layers:
    """Mamba in every layer, preceded in hybrid layers by a shared block and a projection.

    Hybrid layers cycle through the shared blocks (arXiv 2405.16712, 2411.15242): a block's weights
    are counted where it first runs, its FLOPs in every layer.
    """
    mixer = "mamba2" if config.state_space.mamba_heads else "mamba"
    mamba = (
        *blocks.norms(config, 1),
        *generic_decoder.token_mixer(config, mixer),
    )
    shared = _shared_block(config)

    def block(kind: str) -> tuple[str, Components]:
        if kind == mixer:
            return f"{mixer}_layers", mamba
        first = kind == "first"
        used = shared if first else tuple(part.replace(parameters=0) for part in shared)
        own = (*_adapters(config), formulas.projection("linear", config.emb_dim, config.emb_dim))
        return "hybrid_layers" if first else "hybrid_layers_again", (*used, *own, *mamba)

    return blocks.decoder(config, layers_of(_kinds(config, mixer), block))


def _kinds(config: ModelConfig, mixer: str) -> list[str]:
    kinds, hybrids = [], 0
    for kind, _ in generic_decoder.kinds_of_layers(config):
        if kind != HYBRID:
            kinds.append(mixer)
            continue
        kinds.append("first" if hybrids < config.stack.shared_blocks else "again")
        hybrids += 1
    return kinds


def _shared_block(config: ModelConfig) -> Components:
    """Attention over the concatenated layer input and embedding, ``[T, 2·D]``, and an MLP."""
    width, sizes = config.emb_dim, config.attention
    return (
        formulas.norm("norms", 3 * width),
        *formulas.attention(
            2 * width,
            sizes.num_query_heads,
            sizes.num_kv_heads,
            sizes.head_dim,
            blocks.global_mask(config),
            output_width=width,
        ),
        *blocks.mlp(config),
    )


def _adapters(config: ModelConfig) -> Components:
    """Low-rank matrices that each layer adds to the projections of a shared block."""
    stack, width = config.stack, config.emb_dim
    found: list[Component] = []
    if rank := stack.shared_adapter_rank:
        hidden = 2 * config.feed_forward.mlp_dim
        found += _adapter("mlp/adapter", width, rank, hidden, copies=1)
        if stack.shared_attention_adapters:
            found += _adapter("attention/adapter", 2 * width, rank, 2 * width, copies=3)
    return tuple(found)


def _adapter(name: str, inputs: int, rank: int, outputs: int, *, copies: int) -> Components:
    return (
        formulas.projection(f"{name}_a", inputs, rank, copies=copies),
        formulas.projection(f"{name}_b", rank, outputs, copies=copies),
    )
