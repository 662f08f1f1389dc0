"""Families with experts in some layers, latent or sparse attention, linear attention."""

from __future__ import annotations

import dataclasses
import functools
import math

from mfu_jax.errors import UserError
from mfu_jax.flops.analytic import matmuls, mixers
from mfu_jax.flops.analytic.architectures import mixtures, parts
from mfu_jax.flops.analytic.architectures.registry import architecture
from mfu_jax.flops.analytic.components import Layer, Model, layers_of
from mfu_jax.flops.analytic.matmuls import Components
from mfu_jax.flops.analytic.shapes.fields import shown
from mfu_jax.flops.analytic.shapes.model import ModelShape
from mfu_jax.flops.masks import TopK


@architecture("deepseek")
def deepseek(shape: ModelShape) -> Model:
    """Latent attention; dense layers first, then experts; indexer, hyper-connections, engram."""
    attended = _deepseek_attention(shape)

    def block(kind: tuple[bool, int | None]) -> tuple[str, Components]:
        dense, engram = kind
        name = "dense_layers" if dense else "moe_layers"
        parts_of_layer = (*attended, *_forward(shape, dense=dense))
        if engram is None:
            return name, parts_of_layer
        return f"{name}_engram_{engram}", (*parts_of_layer, *_engram(shape, engram))

    engrams = {layer: index for index, layer in enumerate(shape.engram_layers)}
    kinds = (
        (i < shape.first_num_dense_layers, engrams.get(i)) for i in range(shape.num_decoder_layers)
    )
    return parts.decoder(shape, layers_of(kinds, block))


def _deepseek_attention(shape: ModelShape) -> Components:
    """Norms, attention with its indexer, and the hyper-connections around both blocks."""
    if not shape.use_indexer:
        attended = parts.attention(shape, parts.global_mask(shape))
    else:
        shape.require("indexer_topk", "indexer_n_heads", "indexer_head_dim", "q_lora_rank")
        attended = (
            *mixers.indexer(
                shape.emb_dim,
                shape.q_lora_rank,
                shape.indexer_n_heads,
                shape.indexer_head_dim,
                scored=shape.max_target_length > shape.indexer_topk,
                trained=shape.indexer_loss_scaling_factor > 0,
            ),
            *parts.attention(shape, TopK(shape.indexer_topk)),
        )
    return (*parts.norms(shape, 2), *_hyper_connections(shape), *attended)


def _hyper_connections(shape: ModelShape) -> Components:
    """Around attention and around the MLP: two a layer."""
    return _both_hyper_connections(shape) if shape.mhc_expansion_rate > 1 else ()


def _both_hyper_connections(shape: ModelShape) -> Components:
    return (
        *matmuls.hyper_connection(
            shape.mhc_expansion_rate, shape.emb_dim, "hyper_connection/attention"
        ),
        *matmuls.hyper_connection(shape.mhc_expansion_rate, shape.emb_dim, "hyper_connection/mlp"),
    )


def _forward(shape: ModelShape, *, dense: bool) -> Components:
    """A dense layer's MLP, or the experts. A model that has no dense layer needs no mlp_dim."""
    return parts.mlp(shape) if dense else parts.feed_forward(shape)


def _engram(shape: ModelShape, index: int) -> Components:
    """n-gram memory of the `index`-th engram layer: hashed tables, projections, convolution."""
    shape.require(
        "engram_num_heads", "engram_head_dim", "engram_max_ngram_size", "engram_kernel_size"
    )
    orders = shape.engram_max_ngram_size - 1
    mixing = matmuls.engram(
        shape.emb_dim,
        streams=shape.mhc_expansion_rate,
        memory=shape.engram_num_heads * shape.engram_head_dim * orders,
        kernel=shape.engram_kernel_size,
    )
    if not shape.engram_vocab_bases:
        return mixing  # FLOPs need no table sizes; count_parameters asks for them
    if len(shape.engram_vocab_bases) != orders:
        raise UserError(
            f"engram_vocab_bases has {len(shape.engram_vocab_bases)} entries; expected {orders}, "
            f"one for each n-gram order up to engram_max_ngram_size"
        )
    if shape.engram_num_heads > _MOST_ENGRAM_HEADS or max(shape.engram_vocab_bases) > 2**40:
        raise UserError(
            f"engram_num_heads={shape.engram_num_heads}, engram_vocab_bases="
            f"{shown(shape.engram_vocab_bases)}: expected at most {_MOST_ENGRAM_HEADS} and 2^40"
        )
    rows = _engram_rows(shape.engram_vocab_bases, shape.engram_num_heads, len(shape.engram_layers))[
        index
    ]
    return (matmuls.table("engram/tables", rows, shape.engram_head_dim), *mixing)


_MOST_ENGRAM_HEADS = 256


@functools.lru_cache
def _engram_rows(bases: tuple[int, ...], heads: int, layers: int) -> tuple[int, ...]:
    """Table rows of each engram layer: every head's table has a prime size that no other has."""
    seen: set[int] = set()
    rows = []
    for _ in range(layers):
        total = 0
        for base in bases:
            candidate = base
            for _ in range(heads):
                while candidate in seen or not _is_prime(candidate):
                    candidate += 1
                seen.add(candidate)
                total += candidate
        rows.append(total)
    return tuple(rows)


def _is_prime(number: int) -> bool:
    return number > 1 and all(number % d for d in range(2, math.isqrt(number) + 1))


@architecture("deepseek4")
def deepseek4(shape: ModelShape) -> Model:
    """Window, compressed and sparse compressed attention by layer; experts everywhere."""
    shape.require(
        "num_query_heads",
        "num_kv_heads",
        "head_dim",
        "q_lora_rank",
        "o_groups",
        "o_lora_rank",
        "sliding_window_size",
        "compress_ratios",
        "indexer_topk",
        "indexer_n_heads",
        "indexer_head_dim",
    )
    if len(shape.compress_ratios) < shape.num_decoder_layers:
        raise UserError(
            f"compress_ratios has {len(shape.compress_ratios)} entries; expected one for each of "
            f"{shape.num_decoder_layers} layers"
        )
    return compressed_decoder(shape, streamed=shape.mhc_expansion_rate > 1)


def compressed_decoder(shape: ModelShape, *, streamed: bool) -> Model:
    """The layers of DeepSeek V4.

    Args:
        streamed: whether there are hyper-connections; transformers builds them for one stream too.
    """
    streams = shape.mhc_expansion_rate

    def block(kind: tuple[int, bool]) -> tuple[str, Components]:
        ratio, hashed = kind
        name = _DEEPSEEK4_LAYERS.get(ratio, "compressed_layers")
        return f"{name}_hash_routed" if hashed else name, (
            *parts.norms(shape, 2),
            *(_both_hyper_connections(shape) if streamed else ()),
            *_compressed_attention(shape, ratio),
            *(parts.moe(shape, router_bias=False) if hashed else parts.moe(shape)),
        )

    ratios = shape.compress_ratios[: shape.num_decoder_layers]
    kinds = ((ratio, i < shape.first_num_hash_layers) for i, ratio in enumerate(ratios))
    # The streams are joined by weights that are computed from all of them.
    closing = (
        matmuls.projection("hyper_head", streams * shape.emb_dim, streams, bias=True),
        matmuls.vector("hyper_head/scale", 1),
    )
    layers = layers_of(kinds, block)
    return parts.decoder(shape, layers, closing=closing if streamed else ())


# Ratio 4 is the one that has an indexer.
_DEEPSEEK4_LAYERS = {0: "window_layers", 4: "sparse_compressed_layers"}
_INDEXED_RATIO = 4


def _compressed_attention(shape: ModelShape, ratio: int) -> Components:
    indexed = ratio == _INDEXED_RATIO
    attended = mixers.compressed_attention(
        shape.emb_dim,
        shape.num_query_heads,
        shape.num_kv_heads,
        shape.head_dim,
        q_lora_rank=shape.q_lora_rank,
        o_groups=shape.o_groups,
        o_lora_rank=shape.o_lora_rank,
        window=shape.sliding_window_size,
        ratio=ratio,
        topk=shape.indexer_topk if indexed else 0,
    )
    if not indexed:
        return attended
    picked = mixers.compressed_indexer(
        shape.emb_dim,
        shape.q_lora_rank,
        shape.indexer_n_heads,
        shape.indexer_head_dim,
        ratio=ratio,
        trained=shape.indexer_loss_scaling_factor > 0,
    )
    return (*picked, *attended)


@architecture("llama4")
def llama4(shape: ModelShape) -> Model:
    """Chunked attention but for every n-th layer; experts in every m-th layer."""
    interval, step = shape.nope_layer_interval, max(shape.interleave_moe_layer_step, 1)

    def block(kind: tuple[bool, bool]) -> tuple[str, Components]:
        is_global, dense = kind
        mask = parts.global_mask(shape) if is_global else parts.chunk_mask(shape)
        name = "global" if is_global else "chunked"
        return f"{name}_dense_layers" if dense else f"{name}_moe_layers", (
            *parts.norms(shape, 2),
            # Its norm on queries and keys has no weights.
            *parts.attention(shape, mask, qk_norm=False),
            *_forward(shape, dense=dense),
        )

    kinds = (
        (interval > 0 and i % interval == 0, i % step != 0)
        for i in range(1, shape.num_decoder_layers + 1)
    )
    return parts.decoder(shape, layers_of(kinds, block))


@architecture("envy")
def envy(shape: ModelShape) -> Model:
    """Switch-style: experts in every n-th layer, a dense MLP in the others."""
    step = max(shape.interleave_moe_layer_step, 1)
    attended = (*parts.norms(shape, 3), *parts.attention(shape, parts.global_mask(shape)))

    def block(dense: bool) -> tuple[str, Components]:
        name = "dense_layers" if dense else "moe_layers"
        return name, (*attended, *_forward(shape, dense=dense))

    kinds = (i % step != 0 for i in range(1, shape.num_decoder_layers + 1))
    return parts.decoder(shape, layers_of(kinds, block))


@architecture("qwen3_custom_moe")
def qwen3_custom_moe(shape: ModelShape) -> Model:
    """Attention projects to a narrower latent; the experts work on it; a projection leads back."""
    shape.require("attention_output_dim", "moe_expert_input_dim")
    latent = shape.moe_expert_input_dim
    block = (
        *parts.norms(shape, 2),
        *parts.attention(
            shape,
            parts.global_mask(shape),
            qk_norm=True,
            output_width=shape.attention_output_dim,
        ),
        matmuls.norm("latent_norm", latent),
        *parts.moe(shape, width=latent),
        matmuls.projection("up_proj", latent, shape.emb_dim),
    )
    return parts.decoder(
        shape, (Layer(name="layers", components=block, repeats=shape.num_decoder_layers),)
    )


@architecture("qwen3_next", "qwen3_5")
def qwen3_next(shape: ModelShape) -> Model:
    """Gated delta nets, gated full attention in every n-th layer, experts with a shared one."""
    shape.require(
        "gdn_num_key_heads",
        "gdn_num_value_heads",
        "gdn_key_head_dim",
        "gdn_value_head_dim",
        "gdn_conv_kernel_dim",
        "inhomogeneous_layer_cycle_interval",
    )
    experts: Components = parts.feed_forward(shape)
    if shape.num_experts > 1 and shape.shared_experts:
        experts = (*experts, matmuls.projection("moe/shared_gate", shape.emb_dim, 1))
    token_mixers = {
        "full_attention_layers": parts.attention(
            shape, parts.global_mask(shape), output_gate=True, qk_norm=True
        ),
        "delta_net_layers": parts.delta_net(shape),
    }
    interval = shape.inhomogeneous_layer_cycle_interval
    before = parts.norms(shape, 2)
    kinds = (
        "delta_net_layers" if i % interval else "full_attention_layers"
        for i in range(1, shape.num_decoder_layers + 1)
    )
    return parts.decoder(
        shape, layers_of(kinds, lambda kind: (kind, (*before, *token_mixers[kind], *experts)))
    )


@architecture("hf_deepseek_v4")
def hf_deepseek_v4(shape: ModelShape) -> Model:
    """As MaxText's, but the norms of hyper-connections have no weights."""
    model = mixtures.compressed_decoder(shape, streamed=True)
    layers = tuple(
        dataclasses.replace(
            layer,
            components=tuple(
                part
                for part in layer.components
                if not (part.name.startswith("hyper_connection/") and part.name.endswith("/norm"))
            ),
        )
        for layer in model.layers
    )
    return dataclasses.replace(model, layers=layers)
