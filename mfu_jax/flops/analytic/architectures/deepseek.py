"""DeepSeek V2, V3, V3.2 and V4: latent, sparse and compressed attention, with experts."""

from __future__ import annotations

import functools

from mfu_jax.errors import UserError
from mfu_jax.flops.analytic import formulas, mixers
from mfu_jax.flops.analytic.architectures import blocks
from mfu_jax.flops.analytic.components import Component, Layers, layers_of
from mfu_jax.flops.analytic.formulas import Components
from mfu_jax.flops.analytic.model_configs.attention import SparseAttentionConfig
from mfu_jax.flops.analytic.model_configs.model import ModelConfig
from mfu_jax.flops.exact import is_prime
from mfu_jax.flops.masks import Causal, Mask, TopK
from mfu_jax.util.values import shown


def deepseek(config: ModelConfig) -> Layers:
    """Dense layers first, then experts; latent attention, hyper-connections, engram.

    With an indexer, in all layers or in those that `index_share_pattern` has as F.
    """
    sparse, layers = config.sparse_attention, config.num_decoder_layers
    pattern = sparse.index_share_pattern if sparse.use_index_share else "F" * layers
    if len(pattern) != layers:
        raise UserError(
            f"index_share_pattern={shown(pattern)}: expected F or S for each of {layers} layers"
        )
    attended = {kind: _deepseek_attention(config, own_index=kind == "F") for kind in set(pattern)}

    def block(kind: tuple[bool, int | None, str]) -> tuple[str, Components]:
        dense, engram, index = kind
        name = f"{'dense' if dense else 'moe'}_layers{'' if index == 'F' else '_shared_index'}"
        components = (*attended[index], *blocks.feed_forward(config, dense=dense))
        if engram is None:
            return name, components
        return f"{name}_engram_{engram}", (*components, *_engram(config, engram))

    engrams = {layer: index for index, layer in enumerate(config.engram.engram_layers)}
    dense_layers = config.experts.first_num_dense_layers
    kinds = ((i < dense_layers, engrams.get(i), pattern[i]) for i in range(layers))
    return blocks.decoder(config, layers_of(kinds, block))


def _deepseek_attention(config: ModelConfig, *, own_index: bool) -> Components:
    """Norms, attention with its indexer, and the hyper-connections around both blocks."""
    sparse = config.sparse_attention
    if not sparse.use_indexer:
        attended = blocks.attention(config, blocks.global_mask(config))
    else:
        config.require("indexer_topk", "indexer_n_heads", "indexer_head_dim", "q_lora_rank")
        picked = mixers.indexer(
            config,
            scored=config.step.max_target_length > sparse.indexer_topk,
            trained=sparse.indexer_loss_scaling_factor > 0,
        )
        attended = blocks.attention(config, _indexed_mask(sparse))
        attended = (*picked, *attended) if own_index else attended
    around = _hyper_connections(config) if config.stack.mhc_expansion_rate > 1 else ()
    return (*blocks.norms(config, 2), *around, *attended)


def _indexed_mask(sparse: SparseAttentionConfig) -> Mask:
    """The mask keeps every key in the indexer's dense warm-up (arXiv 2512.02556, section 2.1.1)."""
    return Causal() if _is_warm_up(sparse) else TopK(sparse.indexer_topk)


def _is_warm_up(sparse: SparseAttentionConfig) -> bool:
    return sparse.indexer_loss_scaling_factor > 0 and not sparse.indexer_sparse_training


def _hyper_connections(config: ModelConfig) -> Components:
    """Around attention and around the MLP: two per layer."""
    streams, width = config.stack.mhc_expansion_rate, config.emb_dim
    return (
        *formulas.hyper_connection(streams, width, "hyper_connection/attention"),
        *formulas.hyper_connection(streams, width, "hyper_connection/mlp"),
    )


def _engram(config: ModelConfig, index: int) -> Components:
    """The n-gram memory of the `index`-th engram layer: hashed tables, projections, convolution."""
    config.require(
        "engram_num_heads", "engram_head_dim", "engram_max_ngram_size", "engram_kernel_size"
    )
    sizes = config.engram
    heads, bases = sizes.engram_num_heads, sizes.engram_vocab_bases
    orders = sizes.engram_max_ngram_size - 1
    mixing = formulas.engram(
        config.emb_dim,
        streams=config.stack.mhc_expansion_rate,
        memory=heads * sizes.engram_head_dim * orders,
        kernel=sizes.engram_kernel_size,
    )
    if not bases:
        return mixing  # FLOPs need no table sizes; count_parameters requires them
    if len(bases) != orders:
        raise UserError(
            f"engram_vocab_bases has {len(bases)} entries; expected {orders}, one for each n-gram "
            f"order up to engram_max_ngram_size"
        )
    tables = heads * orders * len(sizes.engram_layers)
    if tables > _MOST_ENGRAM_TABLES or max(bases) > _LARGEST_ENGRAM_TABLE:
        raise UserError(
            f"engram_num_heads={heads}, engram_vocab_bases={shown(bases)} make {tables} tables; "
            f"expected at most {_MOST_ENGRAM_TABLES}, of at most 2^40 rows"
        )
    rows = _engram_rows(bases, heads, len(sizes.engram_layers))[index]
    return (formulas.table("engram/tables", rows, sizes.engram_head_dim), *mixing)


_MOST_ENGRAM_TABLES = 1024  # each needs a search for a prime
_LARGEST_ENGRAM_TABLE = 2**40


@functools.lru_cache
def _engram_rows(bases: tuple[int, ...], heads: int, layers: int) -> tuple[int, ...]:
    """Table rows of each engram layer: every head's table has a prime size of its own."""
    seen: set[int] = set()
    last: dict[int, int] = {}  # base → the largest prime taken from it
    rows = []
    for _ in range(layers):
        total = 0
        for base in bases:
            candidate = last.get(base, base)
            for _ in range(heads):
                while candidate in seen or not is_prime(candidate):
                    candidate += 1
                seen.add(candidate)
                total += candidate
            last[base] = candidate
        rows.append(total)
    return tuple(rows)


def deepseek4(config: ModelConfig) -> Layers:
    """Window, compressed and sparse compressed attention, by layer; experts everywhere."""
    config.require(
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
    ratios = config.sparse_attention.compress_ratios
    if len(ratios) < config.num_decoder_layers:
        raise UserError(
            f"compress_ratios has {len(ratios)} entries; expected one for each of "
            f"{config.num_decoder_layers} layers"
        )
    return _compressed_decoder(config, streamed=config.stack.mhc_expansion_rate > 1)


def hf_deepseek_v4(config: ModelConfig) -> Layers:
    """Like `deepseek4`, but the norms of hyper-connections have no weights."""

    def weightless(part: Component) -> Components:
        removed = part.name.startswith("hyper_connection/") and part.name.endswith("/norm")
        return () if removed else (part,)

    return tuple(layer.each(weightless) for layer in _compressed_decoder(config, streamed=True))


def _compressed_decoder(config: ModelConfig, *, streamed: bool) -> Layers:
    """The layers of DeepSeek V4.

    Args:
        streamed: whether there are hyper-connections; transformers also builds them for one stream.
    """
    streams = config.stack.mhc_expansion_rate

    def block(kind: tuple[int, bool]) -> tuple[str, Components]:
        ratio, hashed = kind
        name = _DEEPSEEK4_LAYERS.get(ratio, "compressed_layers")
        return f"{name}_hash_routed" if hashed else name, (
            *blocks.norms(config, 2),
            *(_hyper_connections(config) if streamed else ()),
            *_compressed_attention(config, ratio),
            *(blocks.moe(config, router_bias=False) if hashed else blocks.moe(config)),
        )

    ratios = config.sparse_attention.compress_ratios[: config.num_decoder_layers]
    kinds = ((ratio, i < config.experts.first_num_hash_layers) for i, ratio in enumerate(ratios))
    # The weights that join the streams are computed from all streams.
    closing = (
        formulas.projection("hyper_head", streams * config.emb_dim, streams, bias=True),
        formulas.vector("hyper_head/scale", 1),
    )
    layers = layers_of(kinds, block)
    return blocks.decoder(config, layers, closing=closing if streamed else ())


# Layers of this ratio have an indexer.
_INDEXED_RATIO = 4
_DEEPSEEK4_LAYERS = {0: "window_layers", _INDEXED_RATIO: "sparse_compressed_layers"}


def _compressed_attention(config: ModelConfig, ratio: int) -> Components:
    sparse, indexed = config.sparse_attention, ratio == _INDEXED_RATIO
    attended = mixers.compressed_attention(
        config, ratio, topk=sparse.indexer_topk if indexed else 0, sparse=not _is_warm_up(sparse)
    )
    if not indexed:
        return attended
    trained = sparse.indexer_loss_scaling_factor > 0
    return (*mixers.compressed_indexer(config, ratio, trained=trained), *attended)
