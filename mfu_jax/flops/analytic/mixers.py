"""Token mixers other than plain attention: latent, sparse, compressed, recurrent.

Shapes as in `formulas`: T tokens, S sequence length, D model width, H heads, h head width.
Sizes are those of the config's groups (`model_configs.attention`).
"""

from __future__ import annotations

from mfu_jax.flops.analytic.components import Cache, Component
from mfu_jax.flops.analytic.formulas import (
    Components,
    attention_scores,
    norm,
    projection,
    short_convolution,
    vector,
)
from mfu_jax.flops.analytic.model_configs.model import ModelConfig
from mfu_jax.flops.analytic.names import CORE_CHUNKED, DELTA_NET, INDEXER
from mfu_jax.flops.masks import Causal, Mask, SlidingWindow, Strided


def latent_attention(
    config: ModelConfig, mask: Mask, *, bias: bool = False, borrowed: bool = False
) -> Components:
    """Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434), without weight absorption.

    Queries through ``[D, q_rank]`` and ``[q_rank, H·(nope+rope)]``, or one matrix if there is
    no q-LoRA; keys and values through ``[D, kv_rank+rope]`` and ``[kv_rank, H·(nope+v)]``.
    With `gated_queries`, ``[2·q_rank, H·(nope+rope+v)]``.

    Args:
        borrowed: the latent of keys and values, the first of these, is an earlier layer's.
    """
    config.require("num_query_heads", "kv_lora_rank", "qk_nope_head_dim", "v_head_dim")
    if not config.decoder_block.startswith("hf_"):  # a config.json may have no rotary part
        config.require("qk_rope_head_dim")
    width, heads, sizes = config.emb_dim, config.attention.num_query_heads, config.latent_attention
    rank, kv_rank, rope = sizes.q_lora_rank, sizes.kv_lora_rank, sizes.qk_rope_head_dim
    nope, value = sizes.qk_nope_head_dim, sizes.v_head_dim
    query: Components = (projection("attention/q_proj", width, heads * (nope + rope)),)
    if rank:
        query = (
            projection("attention/q_a", width, rank, bias=bias),
            norm("attention/q_norm", rank),
            projection(
                "attention/q_b",
                (1 + sizes.gated_queries) * rank,
                heads * (nope + rope + sizes.gated_queries * value),
            ),
        )
    latent: Components = (
        projection("attention/kv_a", width, kv_rank + rope, bias=bias),
        norm("attention/kv_norm", kv_rank),
    )
    cache = Cache(kv_rank + rope, borrowed=borrowed, decode_macs=heads * (kv_rank + rope))
    return (
        *query,
        *(() if borrowed else latent),
        projection("attention/kv_b", kv_rank, heads * (nope + value)),
        *_latent_scores(heads, nope + rope, value, mask, cache, kv_rank),
        projection("attention/o_proj", heads * value, width, bias=bias),
    )


def _latent_scores(
    heads: int, qk_dim: int, v_dim: int, mask: Mask, cache: Cache, latent: int
) -> Components:
    """Scores of MLA. Decoding caches the latent and the rotary key, and attends to them directly:

    latent + rope multiply-adds for Q·K and latent for P·V, per head and pair; the up-projections
    move to the query and the output, at the same cost.
    """
    query, value = attention_scores(heads, qk_dim, v_dim, mask, "attention/scores", cache=cache)
    return query, value.replace(cache=Cache(decode_macs=heads * latent))


def indexer(config: ModelConfig, *, scored: bool, trained: bool = False) -> Components:
    """The lightning indexer of sparse attention (DeepSeek-V3.2, arXiv 2512.02556).

    ``q [T,q_rank]@[q_rank,H·h]`` (of the D inputs if there is no q-LoRA), one shared key
    ``[T,D]@[D,h]``, head weights ``[T,D]@[D,H]``, then for each causal pair H·h multiply-adds for
    the scores and H to sum over heads.

    Pooled keys each summarise `indexer_pool` tokens, weighed by a gate ``[T,D]@[D,h]``.

    Its inputs are detached: no gradient reaches the layers below. Its own weights get gradients
    only if an indexer loss trains them.

    Args:
        scored: False if the sequence is no longer than top-k: every key is selected and none is
            scored, but queries and keys are still projected.
        trained: whether an indexer loss trains the indexer's weights.
    """
    width, dim = config.emb_dim, config.sparse_attention.indexer_head_dim
    heads = config.sparse_attention.indexer_n_heads
    parts: Components = (
        projection(f"{INDEXER}/q_proj", config.latent_attention.q_lora_rank or width, heads * dim),
        projection(f"{INDEXER}/k_proj", width, dim),
        norm(f"{INDEXER}/k_norm", dim, bias=True),
    )
    mask: Mask = Causal()
    if pool := config.sparse_attention.indexer_pool:
        mask = Strided(pool)
        gate = projection(f"{INDEXER}/pool_gate", width, dim)
        parts = (*parts, gate, vector(f"{INDEXER}/pool_positions", pool * dim))
    scoring = _scoring(width, heads, dim, mask)
    if not scored:
        scoring = tuple(part.replace(macs=0) for part in scoring)
    return tuple(_detached(part, trained=trained) for part in (*parts, *scoring))


def _scoring(width: int, heads: int, dim: int, mask: Mask) -> Components:
    """An indexer's head weights, its scores, and their sum over the heads."""
    scores, kept = f"{INDEXER}/scores", Cache(dim)
    return (
        projection(f"{INDEXER}/weights_proj", width, heads),
        Component(name=scores, kind="attention", macs=heads * dim, mask=mask, cache=kept),
        Component(name=f"{INDEXER}/reduce", kind="attention", macs=heads, mask=mask),
    )


def block_indexer(config: ModelConfig) -> Components:
    """Selects blocks of `indexer_pool` keys (Qwen 4): the blocks' mean keys, and H queries.

    ``[T,D]@[D,(H+1)·h]``, then H·h multiply-adds for each query and whole block before it; the sum
    over heads is elementwise. No gradient passes through the selection.
    """
    sizes = config.sparse_attention
    heads, dim, mask = sizes.indexer_n_heads, sizes.indexer_head_dim, Strided(sizes.indexer_pool)
    scores, kept = f"{INDEXER}/scores", Cache(dim)
    parts = (
        projection(f"{INDEXER}/qk_proj", config.emb_dim, (heads + 1) * dim),
        norm(f"{INDEXER}/norms", dim, copies=2),
        Component(name=scores, kind="attention", macs=heads * dim, mask=mask, cache=kept),
    )
    return tuple(_detached(part, trained=False) for part in parts)


def ngram_memory(config: ModelConfig) -> Components:
    """What a layer reads from tables of n-grams, P values, goes into k streams (Qwen 4).

    Keys ``[P, k·D]``, values ``[P, D]``, a depthwise convolution over k·D channels; gates are
    elementwise. The tables belong to the embedding.
    """
    width, sizes = config.emb_dim, config.engram
    streams, read = config.stack.mhc_expansion_rate, sizes.engram_num_heads * sizes.engram_head_dim
    return (
        projection("ngram_memory/key_proj", read, streams * width),
        projection("ngram_memory/value_proj", read, width),
        short_convolution("ngram_memory/conv", sizes.engram_kernel_size, streams * width),
        norm("ngram_memory/norms", width, copies=3 * streams),
    )


def _detached(part: Component, *, trained: bool) -> Component:
    """A part of an indexer: no gradient leaves it; it has gradients inside only if trained.

    Scores multiply two activations, whose gradients both lead to the indexer's own weights.
    """
    reads_other_parts = part.kind == "attention"
    return part.replace(right_gradient=trained, left_gradient=trained and reads_other_parts)


def gated_delta_net(config: ModelConfig) -> Components:
    """A gated delta net layer (arXiv 2412.06464): linear attention with a state ``[h_k, h_v]``.

    ``in_qkvz [D, 2·K + 2·V]`` with K = H_k·h_k and V = H_v·h_v, ``in_ba [D, 2·H_v]``, a depthwise
    convolution over q, k and v, and ``out [V, D]``.

    The recurrent form of the core makes four passes over each head's state per token: k·kᵀ, v·kᵀ,
    the decayed update, and the read-out, 4·h_k·h_v multiply-adds. With a `scan_chunk_size` C, the
    chunked program does per token and head k·kᵀ and q·kᵀ (2·C·h_k), the triangular solve applied to
    v and k (C·(h_k + h_v)), the in-chunk output (C·h_v), and three passes over the state.
    """
    width, sizes = config.emb_dim, config.linear_attention
    heads, chunk = sizes.gdn_num_value_heads, sizes.scan_chunk_size
    key_dim, value_dim = sizes.gdn_key_head_dim, sizes.gdn_value_head_dim
    keys, values = sizes.gdn_num_key_heads * key_dim, heads * value_dim
    passes = 4 * key_dim * value_dim
    in_chunks = chunk * (3 * key_dim + 2 * value_dim) + 3 * key_dim * value_dim
    return (
        projection(f"{DELTA_NET}/in_proj_qkvz", width, 2 * keys + 2 * values),
        projection(f"{DELTA_NET}/in_proj_ba", width, 2 * heads),
        short_convolution(f"{DELTA_NET}/conv", sizes.gdn_conv_kernel_dim, 2 * keys + values),
        vector(f"{DELTA_NET}/decay", 2 * heads),
        _core(DELTA_NET, heads * (in_chunks if chunk else passes), values * key_dim, chunk=chunk),
        norm(f"{DELTA_NET}/norm", value_dim),
        projection(f"{DELTA_NET}/out_proj", values, width),
    )


def _core(name: str, macs: int, state: int, *, chunk: int = 0) -> Component:
    """A recurrence, token by token or in chunks, over `state` values per sequence."""
    core = CORE_CHUNKED if chunk else "core"
    return Component(name=f"{name}/{core}", kind="attention", macs=macs, cache=Cache(state=state))


def mamba2(config: ModelConfig) -> Components:
    """A Mamba-2 layer (arXiv 2405.21060) with I inner channels, G groups and a state of N.

    ``in [D, 2·I + 2·G·N + H]``, a depthwise convolution over I + 2·G·N channels, ``out [I, D]``.
    The recurrence updates the state (x·Bᵀ) and reads it (C·h): 2·I·N multiply-adds per token. With
    a `scan_chunk_size` C, the chunked program also does C·Bᵀ inside the chunk (C·G·N) and its
    product with x (C·I) per token.
    """
    width, sizes = config.emb_dim, config.state_space
    chunk, state = config.linear_attention.scan_chunk_size, sizes.mamba_state
    inner, heads, grouped = sizes.mamba_inner, sizes.mamba_heads, sizes.mamba_groups * state
    channels = inner + 2 * grouped
    macs = chunk * (grouped + inner) + 2 * inner * state
    return (
        projection("mamba2/in_proj", width, inner + channels + heads, bias=sizes.mamba_bias),
        short_convolution("mamba2/conv", sizes.mamba_kernel, channels, bias=sizes.mamba_conv_bias),
        vector("mamba2/decay", 3 * heads),
        _core("mamba2", macs, inner * state, chunk=chunk),
        *((norm("mamba2/norm", inner),) if sizes.mamba_norm else ()),
        projection("mamba2/out_proj", inner, width, bias=sizes.mamba_output_bias),
    )


def compressed_attention(config: ModelConfig, ratio: int, *, topk: int, sparse: bool) -> Components:
    """DeepSeek-V4's attention: a sliding window, plus keys that each summarise `ratio` tokens.

    Queries through ``[D, q_rank]`` and ``[q_rank, H·h]``; one matrix ``[D, K·h]`` produces keys
    and values; the output passes g groups ``[H·h/g, o_rank]`` and then ``[g·o_rank, D]``.

    A compressor projects ``[D, c·h]`` twice (content and gate): with overlapping windows (c = 2)
    if an indexer selects `topk` of its keys, else with c = 1, every past key being used.

    Args:
        ratio: tokens per compressed key; 0: window only.
        topk: number of compressed keys that the indexer selects; 0: all.
        sparse: False: queries still attend to all compressed keys, as in the indexer's warm-up.
    """
    width, rank = config.emb_dim, config.latent_attention.q_lora_rank
    groups, o_rank = config.sparse_attention.o_groups, config.sparse_attention.o_lora_rank
    heads, dim = config.attention.num_query_heads, config.attention.head_dim
    keys = config.attention.num_kv_heads * dim
    window = SlidingWindow(config.attention.sliding_window_size)
    compressed: Components = ()
    if ratio:
        mask, kept = Strided(ratio, topk if sparse else 0), Cache(dim)
        compressed = (
            *_compressor("attention", width, dim, ratio, overlap=topk > 0),
            *attention_scores(heads, dim, dim, mask, "attention/compressed_scores", cache=kept),
        )
    return (
        projection("attention/q_a", width, rank),
        norm("attention/q_norm", rank),
        projection("attention/q_b", rank, heads * dim),
        projection("attention/kv_proj", width, keys),
        norm("attention/kv_norm", dim),
        vector("attention/sinks", heads),
        *attention_scores(heads, dim, dim, window, "attention/scores", cache=Cache(keys)),
        *compressed,
        projection("attention/o_a", heads * dim // groups, o_rank, copies=groups),
        projection("attention/o_b", groups * o_rank, width),
    )


def _compressor(name: str, width: int, dim: int, ratio: int, *, overlap: bool) -> Components:
    """Content and gate of compressed keys, ``[D, c·h]`` each, and a bias per position."""
    outputs = (1 + overlap) * dim
    return (
        projection(f"{name}/compressor", width, outputs, copies=2),
        vector(f"{name}/compressor_positions", ratio * outputs),
        norm(f"{name}/compressor_norm", dim),
    )


def compressed_indexer(config: ModelConfig, ratio: int, *, trained: bool) -> Components:
    """The indexer over compressed keys: it compresses its own and scores them like `indexer`."""
    width, dim = config.emb_dim, config.sparse_attention.indexer_head_dim
    heads = config.sparse_attention.indexer_n_heads
    parts = (
        projection(f"{INDEXER}/q_proj", config.latent_attention.q_lora_rank, heads * dim),
        *_compressor(INDEXER, width, dim, ratio, overlap=True),
        *_scoring(width, heads, dim, Strided(ratio)),
    )
    return tuple(_detached(part, trained=trained) for part in parts)


def mamba(config: ModelConfig) -> Components:
    """A Mamba-1 layer (arXiv 2312.00752) with I inner channels and a time step of rank R.

    ``in [D, 2·I]``, a depthwise convolution over I channels, ``x [I, R + 2·N]``, ``dt [R, I]``,
    ``out [I, D]``. The recurrence updates the state elementwise, without a sum, and reads it (h·C):
    I·N multiply-adds per token. `mamba_norm`: norms over the time step, B and C (Jamba).
    """
    width, sizes = config.emb_dim, config.state_space
    inner, state, rank = sizes.mamba_inner, sizes.mamba_state, sizes.mamba_rank
    return (
        projection("mamba/in_proj", width, 2 * inner, bias=sizes.mamba_bias),
        short_convolution("mamba/conv", sizes.mamba_kernel, inner, bias=sizes.mamba_conv_bias),
        projection("mamba/x_proj", inner, rank + 2 * state),
        projection("mamba/dt_proj", rank, inner, bias=True),
        vector("mamba/decay", inner * (state + 1)),
        *((norm("mamba/norms", rank + 2 * state),) if sizes.mamba_norm else ()),
        _core("mamba", inner * state, inner * state),
        projection("mamba/out_proj", inner, width, bias=sizes.mamba_bias),
    )


def gated_short_convolution(config: ModelConfig) -> Components:
    """LFM2's convolution block: ``in [D, 3·D]`` makes two gates and x, ``out [D, D]``."""
    width, sizes = config.emb_dim, config.state_space
    return (
        projection("conv/in_proj", width, 3 * width, bias=sizes.conv_bias),
        short_convolution("conv/conv", sizes.conv_kernel, width, bias=sizes.conv_bias),
        projection("conv/out_proj", width, width, bias=sizes.conv_bias),
    )


def lightning_attention(config: ModelConfig) -> Components:
    """Linear attention with a decaying state ``[h, h]`` (MiniMax-01, arXiv 2501.08313).

    ``qkv [D, 3·H·h]``, a gate ``[D, H·h]``, ``out [H·h, D]``. The recurrence updates the state
    (k·vᵀ) and reads it (q·state): 2·h² multiply-adds per head and token.
    """
    width, head_dim = config.emb_dim, config.attention.head_dim
    joined = config.attention.num_query_heads * head_dim
    return (
        projection("lightning_attention/qkv_proj", width, 3 * joined),
        projection("lightning_attention/gate_proj", width, joined),
        _core("lightning_attention", 2 * joined * head_dim, joined * head_dim),
        norm("lightning_attention/norm", joined),
        projection("lightning_attention/out_proj", joined, width),
    )


def kimi_delta_attention(config: ModelConfig) -> Components:
    """Kimi delta attention (arXiv 2510.26692): a delta net whose decay differs per channel.

    ``q, k, v [D, H·h]`` and a depthwise convolution over them, ``b [D, H]``, the decay and the
    output gate ``[D, H·h]`` or, if low-rank, ``[D, h]`` and ``[h, H·h]``; ``out [H·h, D]``. The
    recurrence makes four passes over each head's state, like a gated delta net.
    """
    width, sizes = config.emb_dim, config.linear_attention
    heads, head_dim = sizes.gdn_num_value_heads, sizes.gdn_value_head_dim
    joined = heads * head_dim
    low_rank = sizes.gdn_low_rank_gates
    gates: Components = (
        projection("delta/low_rank/in_proj", width, head_dim, copies=low_rank),
        projection("delta/gate_b", head_dim, joined, copies=low_rank),
        projection("delta/gate_proj", width, joined, copies=2 - low_rank),
    )
    return (
        projection("delta/in_proj", width, joined, copies=3),
        short_convolution("delta/conv", sizes.gdn_conv_kernel_dim, 3 * joined),
        projection("delta/in_proj_ba", width, heads),
        *(gate for gate in gates if gate.macs),
        vector("delta/decay", heads + joined),
        _core("delta", 4 * joined * head_dim, joined * head_dim),
        norm("delta/norm", head_dim),
        projection("delta/out_proj", joined, width),
    )


def gated_linear_recurrence(config: ModelConfig) -> Components:
    """Griffin's recurrent block with an RG-LRU (arXiv 2402.19427), I channels in H blocks.

    Two branches ``[D, I]``, a depthwise convolution, two block-diagonal gates
    (``[I/H, I/H]`` for each of H blocks), ``out [I, D]``; the recurrence itself is elementwise.
    """
    width, inner = config.emb_dim, config.state_space.recurrent_width
    heads, kernel = config.attention.num_query_heads, config.state_space.conv_kernel
    block = inner // heads
    return (
        projection("recurrence/in_proj", width, inner, bias=True, copies=2),
        short_convolution("recurrence/conv", kernel, inner, bias=True),
        projection("recurrence/gates", block, block, bias=True, copies=2 * heads),
        vector("recurrence/decay", inner),
        projection("recurrence/out_proj", inner, width, bias=True),
    )


def rwkv_time_mixing(config: ModelConfig) -> Components:
    """RWKV-4's time mixing (arXiv 2305.13048): an elementwise recurrence between projections.

    Receptance, key and value ``[D, I]``, ``out [I, D]``; per channel a decay, a bonus and the
    share of the previous token that is mixed in.
    """
    width, inner = config.emb_dim, config.state_space.recurrent_width
    return (
        projection("time_mixing/in_proj", width, inner, copies=3),
        vector("time_mixing/decay", 2 * inner),
        vector("time_mixing/shift", 3 * width),
        projection("time_mixing/out_proj", inner, width),
    )


def rwkv_channel_mixing(config: ModelConfig) -> Components:
    """RWKV-4's feed-forward: key ``[D, F]``, value ``[F, D]``, receptance ``[D, D]``."""
    width, hidden = config.emb_dim, config.feed_forward.mlp_dim
    return (
        projection("channel_mixing/wi", width, hidden),
        projection("channel_mixing/receptance", width, width),
        vector("channel_mixing/shift", 2 * width),
        projection("channel_mixing/wo", hidden, width),
    )


def relative_positions(config: ModelConfig) -> Components:
    """What Inkling adds to attention: learned biases by distance, and convolutions.

    A query chooses in ``[D, H·r]``, and ``[r, extent]`` is shared by the heads. Depthwise
    convolutions run over keys, values and the outputs of both blocks; in Inkling 2, ``[D, H]`` are
    sinks, and in its full layers ``[D, K·k]`` adds to the taps of each key head and value head.
    """
    sizes, width, kernel = config.attention, config.emb_dim, config.state_space.conv_kernel
    heads, dim, kv_heads = sizes.num_query_heads, sizes.relative_dim, sizes.num_kv_heads
    extent = sizes.relative_extent
    parts: Components = (
        projection("attention/relative_proj", width, heads * dim),
        projection("attention/relative_bias", dim, extent).replace(macs=heads * dim * extent),
        short_convolution("attention/kv/conv", kernel, 2 * kv_heads * sizes.head_dim),
        short_convolution("outputs/conv", kernel, 2 * width),
    )
    if sizes.projected_sinks:
        parts += (projection("attention/sinks_proj", width, heads),)
    if sizes.projected_taps:
        parts += (projection("attention/taps_proj", width, 2 * kv_heads * kernel),)
    return parts


def messages(config: ModelConfig) -> Components:
    """Gates of Inkling's loop: a layer's four inputs take from messages of its previous pass.

    ``[2·D, r]`` of an input and its message, ``[r, D]`` to forget and to take.
    """
    width, rank = config.emb_dim, config.stack.message_rank
    return (
        projection("messages/gate_down", 2 * width, rank, copies=4),
        projection("messages/gates", rank, width, copies=8),
    )


def query_key_convolutions(config: ModelConfig) -> Components:
    """ZAYA's convolutions over queries and keys: depthwise, then ``[k·h, h]`` in each head.

    Half of each value is the previous token's.
    """
    sizes = config.attention
    first, second = sizes.qk_kernels
    heads, dim = sizes.num_query_heads + sizes.num_kv_heads, sizes.head_dim
    state = (first + second - 2) * heads * dim + sizes.num_kv_heads * dim // 2
    depthwise = short_convolution("attention/qk/conv", first, heads * dim, bias=True)
    return (
        depthwise.replace(cache=Cache(state=state)),
        projection("attention/qk/conv_in_heads", second * dim, dim, bias=True, copies=heads),
    )
