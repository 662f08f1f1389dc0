"""Token mixers other than plain attention: latent, sparse, compressed, recurrent.

Shapes as in `formulas`: T tokens, S sequence length, D model width, H heads, h head width.
"""

from __future__ import annotations

from mfu_jax.flops.analytic import names
from mfu_jax.flops.analytic.components import Cache, Component
from mfu_jax.flops.analytic.formulas import (
    Components,
    attention_scores,
    norm,
    projection,
    short_convolution,
    vector,
)
from mfu_jax.flops.masks import Causal, Mask, SlidingWindow, Strided


def latent_attention(
    width: int,
    heads: int,
    *,
    q_lora_rank: int,
    kv_lora_rank: int,
    nope_dim: int,
    rope_dim: int,
    v_dim: int,
    mask: Mask,
    bias: bool = False,
    name: str = "attention",
) -> Components:
    """Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434), without weight absorption.

    Queries through ``[D, q_rank]`` and ``[q_rank, H·(nope+rope)]``, or one matrix if there is
    no q-LoRA; keys and values through ``[D, kv_rank+rope]`` and ``[kv_rank, H·(nope+v)]``.
    """
    qk_dim = nope_dim + rope_dim
    if q_lora_rank:
        query: Components = (
            projection(f"{name}/q_a", width, q_lora_rank, bias=bias),
            norm(f"{name}/q_norm", q_lora_rank),
            projection(f"{name}/q_b", q_lora_rank, heads * qk_dim),
        )
    else:
        query = (projection(f"{name}/q_proj", width, heads * qk_dim),)
    return (
        *query,
        projection(f"{name}/kv_a", width, kv_lora_rank + rope_dim, bias=bias),
        norm(f"{name}/kv_norm", kv_lora_rank),
        projection(f"{name}/kv_b", kv_lora_rank, heads * (nope_dim + v_dim)),
        *_latent_scores(heads, qk_dim, v_dim, kv_lora_rank, rope_dim, mask, f"{name}/scores"),
        projection(f"{name}/o_proj", heads * v_dim, width, bias=bias),
    )


def _latent_scores(
    heads: int, qk_dim: int, v_dim: int, latent: int, rope: int, mask: Mask, name: str
) -> Components:
    """Scores of MLA. Decoding caches the latent and the rotary key, and attends to them directly:

    latent + rope multiply-adds for Q·K and latent for P·V, per head and pair; the up-projections
    move to the query and the output, at the same cost.
    """
    query, value = attention_scores(heads, qk_dim, v_dim, mask, name)
    return (
        query.replace(cache=Cache(latent + rope, decode_macs=heads * (latent + rope))),
        value.replace(cache=Cache(decode_macs=heads * latent)),
    )


def indexer(
    width: int,
    q_width: int,
    heads: int,
    dim: int,
    *,
    scored: bool,
    trained: bool = False,
    name: str = names.INDEXER,
) -> Components:
    """The lightning indexer of sparse attention (DeepSeek-V3.2, arXiv 2512.02556).

    ``q [T,q_width]@[q_width,H·h]``, one shared key ``[T,D]@[D,h]``, head weights ``[T,D]@[D,H]``,
    then for each causal pair H·h multiply-adds for the scores and H to sum over heads.

    Its inputs are detached: no gradient reaches the layers below. Its own weights get gradients
    only if an indexer loss trains them.

    Args:
        scored: False if the sequence is no longer than top-k: every key is selected and none is
            scored, but queries and keys are still projected.
        trained: whether an indexer loss trains the indexer's weights.
    """

    parts = (
        projection(f"{name}/q_proj", q_width, heads * dim),
        projection(f"{name}/k_proj", width, dim),
        norm(f"{name}/k_norm", dim, bias=True),
    )
    scoring: Components = (
        projection(f"{name}/weights_proj", width, heads),
        Component(
            name=f"{name}/scores",
            kind="attention",
            macs=heads * dim,
            mask=Causal(),
            cache=Cache(dim),
        ),
        Component(name=f"{name}/reduce", kind="attention", macs=heads, mask=Causal()),
    )
    if not scored:
        scoring = tuple(part.replace(macs=0) for part in scoring)
    return tuple(_detached(part, trained=trained) for part in (*parts, *scoring))


def _detached(part: Component, *, trained: bool) -> Component:
    """A part of an indexer: no gradient leaves it; it has gradients inside only if trained.

    Scores multiply two activations, whose gradients both lead to the indexer's own weights.
    """
    reads_other_parts = part.kind == "attention"
    return part.replace(right_gradient=trained, left_gradient=trained and reads_other_parts)


def gated_delta_net(
    width: int,
    *,
    key_heads: int,
    value_heads: int,
    key_dim: int,
    value_dim: int,
    kernel: int,
    chunk: int = 0,
    name: str = names.DELTA_NET,
) -> Components:
    """A gated delta net layer (arXiv 2412.06464): linear attention with a state ``[h_k, h_v]``.

    ``in_qkvz [D, 2·K + 2·V]`` with K = H_k·h_k and V = H_v·h_v, ``in_ba [D, 2·H_v]``, a depthwise
    convolution over q, k and v, and ``out [V, D]``.

    The recurrent form of the core makes four passes over each head's state per token: k·kᵀ, v·kᵀ,
    the decayed update, and the read-out, 4·h_k·h_v multiply-adds.

    Args:
        chunk: 0: the recurrent form (the model's FLOPs). A size C: the chunked program, which per
            token and head does k·kᵀ and q·kᵀ (2·C·h_k), the triangular solve applied to v and k
            (C·(h_k + h_v)), the in-chunk output (C·h_v), and three passes over the state.
    """
    keys, values = key_heads * key_dim, value_heads * value_dim
    core = Component(
        name=f"{name}/core",
        kind="attention",
        macs=value_heads * 4 * key_dim * value_dim,
        cache=Cache(state=value_heads * key_dim * value_dim),
    )
    if chunk:
        in_chunk = chunk * (3 * key_dim + 2 * value_dim)
        core = core.replace(
            name=f"{name}/{names.CORE_CHUNKED}",
            macs=value_heads * (in_chunk + 3 * key_dim * value_dim),
        )
    return (
        projection(f"{name}/in_proj_qkvz", width, 2 * keys + 2 * values),
        projection(f"{name}/in_proj_ba", width, 2 * value_heads),
        short_convolution(f"{name}/conv", kernel, 2 * keys + values),
        vector(f"{name}/decay", 2 * value_heads),
        core,
        norm(f"{name}/norm", value_dim),
        projection(f"{name}/out_proj", values, width),
    )


def mamba2(
    width: int,
    *,
    inner: int,
    heads: int,
    groups: int,
    state: int,
    kernel: int,
    chunk: int = 0,
    bias: bool = False,
    conv_bias: bool = True,
    name: str = "mamba2",
) -> Components:
    """A Mamba-2 layer (arXiv 2405.21060) with I inner channels, G groups and a state of N.

    ``in [D, 2·I + 2·G·N + H]``, a depthwise convolution over I + 2·G·N channels, ``out [I, D]``.
    The recurrence updates the state (x·Bᵀ) and reads it (C·h): 2·I·N multiply-adds per token.

    Args:
        chunk: 0: the recurrent form (the model's FLOPs). A size C: the chunked program: per token
            C·Bᵀ inside the chunk (C·G·N), its product with x (C·I), and the two passes over the
            state (2·I·N).
    """
    channels = inner + 2 * groups * state
    core = Component(
        name=f"{name}/core",
        kind="attention",
        macs=2 * inner * state,
        cache=Cache(state=inner * state),
    )
    if chunk:
        core = core.replace(
            name=f"{name}/{names.CORE_CHUNKED}",
            macs=chunk * (groups * state + inner) + 2 * inner * state,
        )
    return (
        projection(f"{name}/in_proj", width, inner + channels + heads, bias=bias),
        short_convolution(f"{name}/conv", kernel, channels, bias=conv_bias),
        vector(f"{name}/decay", 3 * heads),
        core,
        norm(f"{name}/norm", inner),
        projection(f"{name}/out_proj", inner, width, bias=bias),
    )


def compressed_attention(
    width: int,
    heads: int,
    kv_heads: int,
    head_dim: int,
    *,
    q_lora_rank: int,
    o_groups: int,
    o_lora_rank: int,
    window: int,
    ratio: int,
    topk: int = 0,
    sparse: bool = True,
    name: str = "attention",
) -> Components:
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
    parts = [
        projection(f"{name}/q_a", width, q_lora_rank),
        norm(f"{name}/q_norm", q_lora_rank),
        projection(f"{name}/q_b", q_lora_rank, heads * head_dim),
        projection(f"{name}/kv_proj", width, kv_heads * head_dim),
        norm(f"{name}/kv_norm", head_dim),
        vector(f"{name}/sinks", heads),
        *attention_scores(
            heads,
            head_dim,
            head_dim,
            SlidingWindow(window),
            f"{name}/scores",
            cache=Cache(kv_heads * head_dim),
        ),
    ]
    if ratio:
        parts.extend(_compressor(width, head_dim, ratio, overlap=topk > 0, name=name))
        mask = Strided(ratio, topk if sparse else 0)
        compressed = f"{name}/compressed_scores"
        kept = Cache(head_dim)
        parts.extend(attention_scores(heads, head_dim, head_dim, mask, compressed, cache=kept))
    parts.append(
        projection(f"{name}/o_a", heads * head_dim // o_groups, o_lora_rank, copies=o_groups)
    )
    parts.append(projection(f"{name}/o_b", o_groups * o_lora_rank, width))
    return tuple(parts)


def _compressor(width: int, dim: int, ratio: int, *, overlap: bool, name: str) -> Components:
    """Content and gate of compressed keys, ``[D, c·h]`` each, and a bias per position."""
    outputs = (1 + overlap) * dim
    return (
        projection(f"{name}/compressor", width, outputs, copies=2),
        vector(f"{name}/compressor_positions", ratio * outputs),
        norm(f"{name}/compressor_norm", dim),
    )


def compressed_indexer(
    width: int,
    q_width: int,
    heads: int,
    dim: int,
    *,
    ratio: int,
    trained: bool = False,
    name: str = names.INDEXER,
) -> Components:
    """The indexer over compressed keys: it compresses its own and scores them like `indexer`."""
    mask = Strided(ratio)
    parts = (
        projection(f"{name}/q_proj", q_width, heads * dim),
        *_compressor(width, dim, ratio, overlap=True, name=name),
        projection(f"{name}/weights_proj", width, heads),
        Component(
            name=f"{name}/scores",
            kind="attention",
            macs=heads * dim,
            mask=mask,
            cache=Cache(dim),
        ),
        Component(name=f"{name}/reduce", kind="attention", macs=heads, mask=mask),
    )
    return tuple(_detached(part, trained=trained) for part in parts)


def mamba(
    width: int,
    *,
    inner: int,
    state: int,
    rank: int,
    kernel: int,
    bias: bool = False,
    conv_bias: bool = True,
    inner_norms: bool = False,
    name: str = "mamba",
) -> Components:
    """A Mamba-1 layer (arXiv 2312.00752) with a time step of rank R.

    ``in [D, 2·I]``, a depthwise convolution over I channels, ``x [I, R + 2·N]``, ``dt [R, I]``,
    ``out [I, D]``. The recurrence updates the state elementwise, without a sum, and reads it (h·C):
    I·N multiply-adds per token.

    Args:
        inner_norms: norms over the time step, B and C (Jamba).
    """
    norms = (norm(f"{name}/norms", rank + 2 * state),) if inner_norms else ()
    return (
        projection(f"{name}/in_proj", width, 2 * inner, bias=bias),
        short_convolution(f"{name}/conv", kernel, inner, bias=conv_bias),
        projection(f"{name}/x_proj", inner, rank + 2 * state),
        projection(f"{name}/dt_proj", rank, inner, bias=True),
        vector(f"{name}/decay", inner * (state + 1)),
        *norms,
        Component(
            name=f"{name}/core",
            kind="attention",
            macs=inner * state,
            cache=Cache(state=inner * state),
        ),
        projection(f"{name}/out_proj", inner, width, bias=bias),
    )


def gated_short_convolution(
    width: int, *, kernel: int, bias: bool = False, name: str = "conv"
) -> Components:
    """LFM2's convolution block: ``in [D, 3·D]`` makes two gates and x, ``out [D, D]``."""
    return (
        projection(f"{name}/in_proj", width, 3 * width, bias=bias),
        short_convolution(f"{name}/conv", kernel, width, bias=bias),
        projection(f"{name}/out_proj", width, width, bias=bias),
    )
