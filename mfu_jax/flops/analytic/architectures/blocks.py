"""What families share: masks, attention, MLP and experts, and what surrounds the layers."""

from __future__ import annotations

from typing import Any

from mfu_jax.flops.analytic import formulas, mixers, names
from mfu_jax.flops.analytic.components import Layers, layer
from mfu_jax.flops.analytic.formulas import Components
from mfu_jax.flops.analytic.model_configs.model import ModelConfig
from mfu_jax.flops.analytic.towers.selection import towers
from mfu_jax.flops.masks import (
    BlockDiffusion,
    Causal,
    Chunked,
    Full,
    Mask,
    Packed,
    Prefix,
    SlidingWindow,
)

# Blocks in the style of GPT: LayerNorm, learned positions.
GPT_BLOCKS = ("gpt2", "gpt3")


def layer_norm(config: ModelConfig) -> bool:
    """Whether norms have a bias (LayerNorm) or not (RMSNorm)."""
    if (normalization := config.stack.normalization) != "auto":
        return normalization == "layernorm"
    return config.decoder_block in GPT_BLOCKS


def learned_positions(config: ModelConfig) -> bool:
    """Whether positions have their own table."""
    if (positions := config.embedding.position_embedding) != "auto":
        return positions == "learned"
    return config.decoder_block in GPT_BLOCKS


def norms(config: ModelConfig, copies: int, name: str = "norms") -> Components:
    """`copies` norms over the model width; none if norms have no weights."""
    if not copies or config.stack.normalization == "none":
        return ()
    return (formulas.norm(name, config.emb_dim, bias=layer_norm(config), copies=copies),)


def global_mask(config: ModelConfig) -> Mask:
    """Causal over the whole sequence, except for a prefix and packed documents."""
    prefix = config.attention.prefix_length
    return _packed(config, Prefix(prefix) if prefix else Causal())


def layer_mask(config: ModelConfig) -> Mask:
    """The mask of a family with uniform layers.

    A window or chunk size in the config applies regardless of `attention_type`.
    """
    kind = config.attention.attention_type
    if kind == "full":
        return _packed(config, Full())
    if kind == "block_diffusion":
        config.require("causal_block_size")
        return _packed(config, BlockDiffusion(config.attention.causal_block_size))
    if config.attention.chunk_attn_window_size:
        return chunk_mask(config)
    return window_mask(config)


def window_mask(config: ModelConfig) -> Mask:
    """The sliding window; without a window size, the layer is global."""
    window = config.attention.sliding_window_size
    return _packed(config, SlidingWindow(window)) if window else global_mask(config)


def chunk_mask(config: ModelConfig) -> Mask:
    """Chunked attention; without a chunk size, the layer is global."""
    chunk = config.attention.chunk_attn_window_size
    return _packed(config, Chunked(chunk)) if chunk else global_mask(config)


def _packed(config: ModelConfig, mask: Mask) -> Mask:
    step = config.step
    if step.packed_document_lengths:
        return Packed(mask, lengths=step.packed_document_lengths)
    if step.packed_document_length:
        return Packed(mask, each=min(step.packed_document_length, step.max_target_length))
    return mask


def attention(config: ModelConfig, mask: Mask, **changes: Any) -> Components:
    """Multi-head or latent attention, depending on `attention_type`."""
    sizes = config.attention
    if sizes.attention_type == "mla":
        return mixers.latent_attention(config, mask)
    options: dict[str, Any] = {
        "kv_heads": sizes.num_kv_heads or sizes.num_query_heads,
        "head_dim": sizes.head_dim,
        "bias": sizes.attention_bias or config.feed_forward.use_bias,
        "qk_norm": sizes.use_qk_norm,
        "shared_kv": sizes.share_kv_projections,
        **changes,
    }
    config.require("num_query_heads", *(() if options["head_dim"] else ("head_dim",)))
    return formulas.attention(config.emb_dim, sizes.num_query_heads, mask=mask, **options)


def mlp(config: ModelConfig, hidden: int | None = None, name: str = "mlp") -> Components:
    """The dense MLP, of hidden width `hidden` (None: `mlp_dim`)."""
    sizes = config.feed_forward
    if hidden is None:
        config.require("mlp_dim")
        hidden = sizes.mlp_dim
    return formulas.mlp(config.emb_dim, hidden, gated=sizes.gated, bias=sizes.use_bias, name=name)


def moe(config: ModelConfig, *, shared_dim: int | None = None, **changes: Any) -> Components:
    """Routed experts and, if the config has them, shared experts of width `shared_dim`."""
    config.require("moe_mlp_dim", "num_experts", "num_experts_per_tok")
    sizes = config.experts
    options: dict[str, Any] = {
        "width": config.emb_dim,
        "hidden": sizes.moe_mlp_dim,
        "bias": config.feed_forward.use_bias,
        "router_bias": sizes.routed_bias,
        "capacity_factor": sizes.capacity_factor or None,
        "zero": sizes.zero_experts,
        "zero_per_token": sizes.zero_experts_per_tok,
        **changes,
    }
    routed = formulas.moe(
        experts=sizes.num_experts,
        per_token=sizes.num_experts_per_tok,
        gated=config.feed_forward.gated,
        **options,
    )
    if not sizes.shared_experts:
        return routed
    hidden = sizes.shared_experts * (sizes.moe_mlp_dim if shared_dim is None else shared_dim)
    return (*routed, *mlp(config, hidden, names.SHARED_EXPERTS))


def feed_forward(config: ModelConfig, *, dense: bool = False) -> Components:
    """Experts if the model has them and this layer is not `dense`; else the MLP."""
    return mlp(config) if dense or config.experts.num_experts == 1 else moe(config)


def head(config: ModelConfig, width: int, *, bias: bool = False) -> formulas.Component:
    """The output head, at every position or at only `logits_positions` of them."""
    tied, step = config.embedding.logits_via_embedding, config.step
    output = formulas.head(config.vocab_size, width, tied=tied, bias=bias)
    if not step.logits_positions:
        return output
    return output.replace(tokens=min(step.logits_positions, step.max_target_length))


def decoder(
    config: ModelConfig,
    layers: Layers,
    *,
    embedding: Components = (),
    closing: Components = (),
) -> Layers:
    """`layers` between the tables and the head, with projections if the token table is narrower.

    Args:
        embedding: further components next to the tables.
        closing: components between the last layer and the final norm.
    """
    tables, stack = config.embedding, config.stack
    width = tables.token_width or config.emb_dim
    projected = width != config.emb_dim
    first = [formulas.table("tokens", config.vocab_size, width)]
    last = [*closing]
    if projected:
        first.append(formulas.projection("project_in", width, config.emb_dim))
    if learned_positions(config):
        positions = tables.trainable_position_size or config.step.max_target_length
        first.append(formulas.table(names.POSITIONS, positions, config.emb_dim))
    if tables.embedding_norm:
        first.extend(norms(config, 1, "embedding_norm"))
    if stack.further_vectors:
        last.append(formulas.vector("further_vectors", stack.further_vectors))
    if stack.final_norm:
        last.extend(norms(config, 1, "final_norm"))
    if projected:
        last.append(formulas.projection("project_out", config.emb_dim, width))
    output = head(config, width, bias=tables.head_bias)
    if tables.output_head and tables.head_transform:
        last.append(formulas.projection("transform", config.emb_dim, config.emb_dim))
        last.extend(norms(config, 1, "transform_norm"))
    if tables.output_head:
        last.append(output)
    return (
        *towers(config),
        layer("embedding", *first, *embedding),
        *layers,
        *mtp_modules(config, layers[-1].components, output),
        layer("head", *last),
    )


def mtp_modules(config: ModelConfig, repeated: Components, output: formulas.Component) -> Layers:
    """The multi-token-prediction modules, each with a copy of the last decoder layer."""
    if not config.stack.mtp_num_layers:
        return ()
    parts = formulas.multi_token_prediction(config.emb_dim, repeated, output)
    return (layer(names.MULTI_TOKEN_PREDICTION, *parts, repeats=config.stack.mtp_num_layers),)
