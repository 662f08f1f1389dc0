"""What families share: attention and MLP of a shape, and the frame around the layers."""

from __future__ import annotations

from typing import Any

from mfu_jax.flops.analytic import matmuls, mixers
from mfu_jax.flops.analytic.components import Layer, Model
from mfu_jax.flops.analytic.matmuls import Components
from mfu_jax.flops.analytic.shapes.model import ModelShape
from mfu_jax.flops.analytic.towers.maxtext import towers
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

# The blocks that GPT descends from: LayerNorm, learned positions.
GPT_BLOCKS = ("gpt2", "gpt3")


def layer_norm(shape: ModelShape) -> bool:
    """Whether norms have a bias (LayerNorm) or not (RMSNorm)."""
    if shape.normalization != "auto":
        return shape.normalization == "layernorm"
    return shape.decoder_block in GPT_BLOCKS


def learned_positions(shape: ModelShape) -> bool:
    """Whether positions have a table of their own."""
    if shape.position_embedding != "auto":
        return shape.position_embedding == "learned"
    return shape.decoder_block in GPT_BLOCKS


def norms(shape: ModelShape, copies: int, name: str = "norms") -> Components:
    """`copies` norms over the model width."""
    return (matmuls.norm(name, shape.emb_dim, bias=layer_norm(shape), copies=copies),)


def global_mask(shape: ModelShape) -> Mask:
    """Causal over the whole sequence, as far as prefix and packing leave it so."""
    return _packed(shape, Prefix(shape.prefix_length) if shape.prefix_length else Causal())


def layer_mask(shape: ModelShape) -> Mask:
    """The mask of a family whose layers are all alike, as its config says.

    A sliding window or a chunk size that is given is applied, whatever `attention_type` says.
    """
    if shape.attention_type == "full":
        return _packed(shape, Full())
    if shape.attention_type == "block_diffusion":
        shape.require("causal_block_size")
        return _packed(shape, BlockDiffusion(shape.causal_block_size))
    if shape.chunk_attn_window_size:
        return chunk_mask(shape)
    return window_mask(shape)


def window_mask(shape: ModelShape) -> Mask:
    """The sliding window; without a size the layer is global."""
    if not shape.sliding_window_size:
        return global_mask(shape)
    return _packed(shape, SlidingWindow(shape.sliding_window_size))


def chunk_mask(shape: ModelShape) -> Mask:
    """Chunks of the attention window; without a size the layer is global."""
    if not shape.chunk_attn_window_size:
        return global_mask(shape)
    return _packed(shape, Chunked(shape.chunk_attn_window_size))


def _packed(shape: ModelShape, mask: Mask) -> Mask:
    if shape.packed_document_lengths:
        return Packed(mask, lengths=shape.packed_document_lengths)
    if shape.packed_document_length:
        return Packed(mask, each=min(shape.packed_document_length, shape.max_target_length))
    return mask


def attention(shape: ModelShape, mask: Mask, **changes: Any) -> Components:
    """Multi-head or latent attention, as `attention_type` says."""
    if shape.attention_type == "mla":
        return latent_attention(shape, mask)
    options: dict[str, Any] = {
        "kv_heads": shape.num_kv_heads or shape.num_query_heads,
        "head_dim": shape.head_dim,
        "bias": shape.attention_bias or shape.use_bias,
        "qk_norm": shape.use_qk_norm,
        "shared_kv": shape.share_kv_projections,
        **changes,
    }
    shape.require("num_query_heads", *(() if options["head_dim"] else ("head_dim",)))
    return matmuls.attention(shape.emb_dim, shape.num_query_heads, mask=mask, **options)


def latent_attention(shape: ModelShape, mask: Mask, *, bias: bool = False) -> Components:
    """MLA without its indexer."""
    shape.require(
        "num_query_heads", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"
    )
    return mixers.latent_attention(
        shape.emb_dim,
        shape.num_query_heads,
        q_lora_rank=shape.q_lora_rank,
        kv_lora_rank=shape.kv_lora_rank,
        nope_dim=shape.qk_nope_head_dim,
        rope_dim=shape.qk_rope_head_dim,
        v_dim=shape.v_head_dim,
        mask=mask,
        bias=bias,
    )


def delta_net(shape: ModelShape) -> Components:
    """The gated delta net of the shape."""
    return mixers.gated_delta_net(
        shape.emb_dim,
        key_heads=shape.gdn_num_key_heads,
        value_heads=shape.gdn_num_value_heads,
        key_dim=shape.gdn_key_head_dim,
        value_dim=shape.gdn_value_head_dim,
        kernel=shape.gdn_conv_kernel_dim,
        chunk=shape.scan_chunk_size,
    )


def mlp(shape: ModelShape, hidden: int | None = None, name: str = "mlp") -> Components:
    """The dense MLP of the shape, or one of another hidden width."""
    if hidden is None:
        shape.require("mlp_dim")
        hidden = shape.mlp_dim
    return matmuls.mlp(shape.emb_dim, hidden, gated=shape.gated_mlp, bias=shape.use_bias, name=name)


def moe(shape: ModelShape, *, shared_dim: int | None = None, **changes: Any) -> Components:
    """Routed experts and, where the shape has them, shared experts of `shared_dim`."""
    shape.require("moe_mlp_dim", "num_experts", "num_experts_per_tok")
    options: dict[str, Any] = {
        "width": shape.emb_dim,
        "hidden": shape.moe_mlp_dim,
        "bias": shape.use_bias,
        "router_bias": shape.routed_bias,
        "capacity_factor": shape.capacity_factor or None,
        **changes,
    }
    routed = matmuls.moe(
        experts=shape.num_experts,
        per_token=shape.num_experts_per_tok,
        gated=shape.gated_mlp,
        **options,
    )
    if not shape.shared_experts:
        return routed
    hidden = shape.shared_experts * (shape.moe_mlp_dim if shared_dim is None else shared_dim)
    return (*routed, *mlp(shape, hidden, "moe/shared"))


def feed_forward(shape: ModelShape) -> Components:
    """Experts where there is more than one, else the dense MLP."""
    return moe(shape) if shape.num_experts > 1 else mlp(shape)


def head(shape: ModelShape, width: int, *, bias: bool = False) -> matmuls.Component:
    """The output head, at every position or at `logits_positions` of them."""
    output = matmuls.head(shape.vocab_size, width, tied=shape.logits_via_embedding, bias=bias)
    if not shape.logits_positions:
        return output
    return output.replace(tokens=min(shape.logits_positions, shape.max_target_length))


def decoder(
    shape: ModelShape,
    layers: tuple[Layer, ...],
    *,
    embedding: Components = (),
    last_norm: bool = True,
    closing: Components = (),
) -> Model:
    """`layers` between the embedding and the output head.

    Args:
        embedding: further components that stand beside the token embedding.
        closing: components between the last layer and the final norm.
    """
    first = [matmuls.table("tokens", shape.vocab_size, shape.emb_dim)]
    if learned_positions(shape):
        positions = shape.trainable_position_size or shape.max_target_length
        first.append(matmuls.table("positions", positions, shape.emb_dim))
    output = head(shape, shape.emb_dim)
    final = norms(shape, 1, "final_norm") if last_norm else ()
    return Model(
        layers=(
            *towers(shape),
            Layer(name="embedding", components=(*first, *embedding)),
            *layers,
            *mtp_modules(shape, layers[-1].components, output),
            Layer(name="head", components=(*closing, *final, output)),
        )
    )


def mtp_modules(
    shape: ModelShape, layer: Components, output: matmuls.Component
) -> tuple[Layer, ...]:
    """The multi-token-prediction modules, each with a copy of the last decoder layer."""
    if not shape.mtp_num_layers:
        return ()
    parts = matmuls.multi_token_prediction(shape.emb_dim, layer, output)
    return (Layer(name="multi_token_prediction", components=parts, repeats=shape.mtp_num_layers),)
