"""The decoder of most config.json families: lists each layer's token mixer and feed-forward."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Iterable

from mfu_jax.errors import UserError
from mfu_jax.flops.analytic import formulas, mixers, names
from mfu_jax.flops.analytic.architectures import blocks
from mfu_jax.flops.analytic.components import Layers, layers_of
from mfu_jax.flops.analytic.formulas import Components
from mfu_jax.flops.analytic.model_configs.layers import (
    BLOCK_SPARSE,
    BORROWED,
    CHUNKED,
    FULL,
    INDEXED,
    MESSAGES,
    NGRAM_MEMORY,
    NOPE,
    SHARED_INDEX,
    SLIDING,
)
from mfu_jax.flops.analytic.model_configs.model import ModelConfig
from mfu_jax.flops.masks import BidirectionalWindow, Full, Mask, TopK


def generic_decoder(config: ModelConfig) -> Layers:
    """Embedding, the layers as listed, final norm, output head."""

    def block(kind: tuple[str, str]) -> tuple[str, Components]:
        name = "_".join(part for part in (*kind, "layers") if part not in ("none", "dense"))
        return name, (
            *blocks.norms(config, config.stack.norms_per_layer),
            *_norm_gates(config, 1 + (kind[1] == "moe")),
            *_streams(config),
            *token_mixer(config, kind[0]),
            *_feed_forward(config, kind[1]),
        )

    def run(kind: tuple[tuple[str, str], bool, bool]) -> tuple[str, Components]:
        """One pass of a layer: the first has its weights; without a gradient, no backward."""
        (name, parts), (_, again, graded) = block(kind[0]), kind
        if again:
            parts = tuple(part.replace(parameters=0, active_parameters=None) for part in parts)
        else:  # no messages from an earlier pass
            parts = tuple(p.replace(macs=0) if p.name.startswith(MESSAGES) else p for p in parts)
        if not graded:
            parts = tuple(p.replace(left_gradient=False, right_gradient=False) for p in parts)
        return f"{name}{'_again' * again}{'' if graded else '_without_gradient'}", parts

    stack, memory = config.stack, config.engram
    closing: Components = ()
    if stack.stream_rank:
        closing = _low_rank_weights(config, "hyper_head")
    elif stack.mhc_expansion_rate > 1 and not stack.stream_mixing:  # else the mean
        closing = _stream_weights(config, "hyper_head", 1, 1)
    if stack.residual_sources:  # Q·Kᵀ and P·V, the outputs being keys and values
        macs = 2 * stack.residual_sources * config.emb_dim
        mixed = formulas.Component(name="attention_residuals", kind="attention", macs=macs)
        closing = (*closing, mixed)
    tables: Components = ()
    if memory.ngram_rows:
        tables = (formulas.table("ngram_tables", memory.ngram_rows, memory.engram_head_dim),)
    layers = layers_of(_passes(config), run)
    return blocks.decoder(config, layers, embedding=tables, closing=closing)


def _norm_gates(config: ModelConfig, copies: int) -> Components:
    """``[D, r], [r, D]``: each of `copies` norms gates its own output (A.X-K2)."""
    width, rank = config.emb_dim, config.stack.norm_gate_rank
    if not rank:
        return ()
    return (
        formulas.projection("norms/gate_in", width, rank, copies=copies),
        formulas.projection("norms/gate_out", rank, width, copies=copies),
    )


def _streams(config: ModelConfig) -> Components:
    """Hyper-connections around both blocks of a layer, over k residual streams.

    ``[k·D, 2·k]`` weights for a block's input and output, whose use is elementwise; with mixing k²
    more, which take k²·D multiply-adds between activations (the same as in `formulas`, but for
    norms without weights). With a rank, weights for each value of the input, and ``[k·D, k]``.
    """
    streams, mixing = config.stack.mhc_expansion_rate, config.stack.stream_mixing
    if streams == 1:
        return ()
    parts: list[formulas.Component] = []
    for name in ("hyper_connection/attention", "hyper_connection/mlp"):
        if config.stack.stream_rank:
            parts += _low_rank_weights(config, name)
            inputs = streams * config.emb_dim
            parts.append(formulas.projection(f"{name}/output", inputs, streams))
            continue
        parts += _stream_weights(config, name, 2 + streams * mixing, 2 + mixing)
        if mixing:
            mixed = streams**2 * config.emb_dim
            parts.append(
                formulas.Component(name=f"{name}/residual_mix", kind="attention", macs=mixed)
            )
    return tuple(parts)


def _low_rank_weights(config: ModelConfig, name: str) -> Components:
    """A norm of the k streams, and a weight for each of their values: ``[k·D, r], [r, k·D]``."""
    inputs, rank = config.stack.mhc_expansion_rate * config.emb_dim, config.stack.stream_rank
    return (
        formulas.norm(f"{name}/norm", inputs),
        formulas.projection(f"{name}/down", inputs, rank),
        formulas.projection(f"{name}/up", rank, inputs),
    )


def _stream_weights(config: ModelConfig, name: str, outputs: int, scales: int) -> Components:
    """``[k·D, outputs·k]``, a bias and learned scales."""
    streams = config.stack.mhc_expansion_rate
    return (
        formulas.projection(name, streams * config.emb_dim, outputs * streams, bias=True),
        formulas.vector(f"{name}/scale", scales),
    )


def _passes(config: ModelConfig) -> Counter[tuple[tuple[str, str], bool, bool]]:
    """Runs of layers by kind, whether it ran before, and whether a gradient flows through."""
    passes = config.stack.layer_passes or (1,) * config.num_decoder_layers
    runs: Counter[tuple[tuple[str, str], bool, bool]] = Counter()
    for kind, times, graded in zip(
        kinds_of_layers(config), passes, config.stack.graded_passes or passes, strict=True
    ):
        runs[kind, False, graded > 0] += 1
        runs[kind, True, True] += max(graded - 1, 0)
        runs[kind, True, False] += times - max(graded, 1)
    return +runs  # those that there are


def kinds_of_layers(config: ModelConfig) -> tuple[tuple[str, str], ...]:
    """Token mixer and feed-forward of each layer.

    Raises:
        UserError: the config lists too few layers.
    """
    layers, stack = config.num_decoder_layers, config.stack
    for name in ("layer_types", "feed_forward_types"):
        if len(kinds := config.value(name)) < layers:
            raise UserError(
                f"num_decoder_layers={layers}, but {name} has {len(kinds)} entries; expected "
                "one for each layer",
                hint=f"give {name} too",
            )
    return tuple(zip(stack.layer_types, stack.feed_forward_types, strict=False))[:layers]


def mask_of_layer(config: ModelConfig, kind: str) -> Mask:
    """The mask of an attention layer; `kind` as in `layer_types`."""
    if config.attention.bidirectional:
        window = config.attention.sliding_window_size
        return BidirectionalWindow(window) if kind == SLIDING and window else Full()
    masks = {FULL: blocks.global_mask, SLIDING: blocks.window_mask, CHUNKED: blocks.chunk_mask}
    if kind not in masks:
        raise _unknown(kind, masks)
    return masks[kind](config)


def _unknown(kind: str, known: Iterable[str]) -> UserError:
    return UserError(
        f"layer_types has {kind!r}; expected {', '.join(known)}",
        hint="count_model_flops(fn, *args) counts any JAX function",
    )


def token_mixer(config: ModelConfig, kind: str) -> Components:
    """The components of a token mixer; `kind` as in `layer_types`."""
    names = kind.split("+")
    known = (*_ATTENTION, *_MIXERS)
    for name in names:
        if name not in known:
            raise _unknown(name, known)
        if name in _NEEDS and not config.value(_NEEDS[name]):
            raise UserError(
                f"layer_types has {name!r}, but the model has no {_NEEDS[name]} for such layers",
                hint="correct it in the config.json",
            )
    mixed = (
        _MIXERS[name](config) if name in _MIXERS else _attention(config, name) for name in names
    )
    return tuple(part for parts in mixed for part in parts)


def _attention(config: ModelConfig, kind: str, selected: Mask | None = None) -> Components:
    if kind == SLIDING:
        config = config.replace(**{str(name): value for name, value in config.attention.in_windows})
    sizes, mask = config.attention, selected or mask_of_layer(config, kind)
    if sizes.attention_type == "mla":
        attended = mixers.latent_attention(config, mask, bias=sizes.attention_bias)
        return (*_gate(config), *attended)
    attended = blocks.attention(
        config,
        mask,
        bias=sizes.attention_bias,
        output_bias=sizes.attention_output_bias,
        output_gate=sizes.attention_output_gate,
        sinks=sizes.attention_sinks,
        value_dim=sizes.value_head_dim,
        qk_norm=bool(sizes.qk_norm),
        qk_norm_all_heads=sizes.qk_norm == "all_heads",
    )
    if sizes.qk_norm_bias:
        scales = next(part for part in attended if part.name.endswith("qk_norm"))
        attended = (*attended, scales.replace(name=f"{scales.name}_bias"))
    if sizes.differential:
        attended = (
            *map(_twice_as_wide, attended),
            formulas.vector("attention/lambdas", 4 * sizes.head_dim),
        )
    if sizes.qk_kernels:
        attended = (*attended, *mixers.query_key_convolutions(config))
    if sizes.relative_dim:
        attended = (*attended, *mixers.relative_positions(config))
    return (*_gate(config), *attended)


def _gate(config: ModelConfig) -> Components:
    """``[D, H·g]``: the gate that scales the heads' outputs."""
    sizes = config.attention
    outputs = sizes.num_query_heads * sizes.attention_gate_width
    if not outputs:
        return ()
    return (formulas.projection("attention/gate_proj", config.emb_dim, outputs),)


def _twice_as_wide(part: formulas.Component) -> formulas.Component:
    """In differential attention, each head weighs the values of two heads."""
    return part.replace(macs=2 * part.macs) if part.name.endswith("scores_pv") else part


def _indexed_attention(
    config: ModelConfig, *, scored: bool, nope: bool, borrowed: bool
) -> Components:
    """Latent attention to the keys that an indexer selected.

    Args:
        scored: by an indexer of its own; PyTorch scores every key, even if it selects them all.
        nope: keys have no rotary part.
        borrowed: an earlier layer's latent of keys and values.
    """
    latent, sizes = config.latent_attention, config.attention
    if nope:
        width = latent.qk_nope_head_dim + latent.qk_rope_head_dim
        config = config.replace(qk_nope_head_dim=width, qk_rope_head_dim=0)
    mask = TopK(config.sparse_attention.indexer_topk)
    return (
        *(mixers.indexer(config, scored=True) if scored else ()),
        *_gate(config),
        *mixers.latent_attention(config, mask, bias=sizes.attention_bias, borrowed=borrowed),
        formulas.vector("attention/sinks", sizes.attention_sinks * sizes.num_query_heads),
    )


def _block_sparse_attention(config: ModelConfig) -> Components:
    attended = _attention(config, FULL, TopK(config.sparse_attention.indexer_topk))
    return (*mixers.block_indexer(config), *attended)


_ATTENTION = (FULL, SLIDING, CHUNKED)
_MIXERS: dict[str, Callable[[ModelConfig], Components]] = {
    **{
        f"{kind}{nope}{borrowed}": functools.partial(
            _indexed_attention, scored=kind == INDEXED, nope=bool(nope), borrowed=bool(borrowed)
        )
        for kind in (INDEXED, SHARED_INDEX)
        for nope in ("", NOPE)
        for borrowed in ("", BORROWED)
    },
    BLOCK_SPARSE: _block_sparse_attention,
    NGRAM_MEMORY: mixers.ngram_memory,
    MESSAGES: mixers.messages,
    "linear_attention": mixers.gated_delta_net,
    "mamba": mixers.mamba,
    "mamba2": mixers.mamba2,
    "conv": mixers.gated_short_convolution,
    "lightning_attention": mixers.lightning_attention,
    "kimi_delta": mixers.kimi_delta_attention,
    "recurrent": mixers.gated_linear_recurrence,
    "rwkv": mixers.rwkv_time_mixing,
    "none": lambda config: (),
}
# The size without which a model has no such layers.
_NEEDS = {
    **dict.fromkeys((kind for kind in _MIXERS if kind.startswith(INDEXED)), "indexer_topk"),
    BLOCK_SPARSE: "indexer_pool",
    "linear_attention": "gdn_num_value_heads",
    "kimi_delta": "gdn_num_value_heads",
    "mamba": "mamba_inner",
    "mamba2": "mamba_heads",
    "conv": "conv_kernel",
    "recurrent": "recurrent_width",
    "rwkv": "recurrent_width",
}


def _feed_forward(config: ModelConfig, kind: str) -> Components:
    if kind == "none":
        return ()
    if kind == "dense":
        weights = config.feed_forward.activation_weights
        scalars = (formulas.vector("mlp/activation", weights),) if weights else ()
        return (*blocks.mlp(config), *scalars)
    if kind == "rwkv":
        return mixers.rwkv_channel_mixing(config)
    if kind == "dense+moe":
        return (*_feed_forward(config, "dense"), *_feed_forward(config, "moe"))
    if kind != "moe":
        raise UserError(
            f"feed_forward_types has {kind!r}; expected dense, moe, dense+moe, rwkv or none"
        )
    sizes = config.experts
    width, latent = config.emb_dim, sizes.moe_expert_input_dim
    biased = config.feed_forward.use_bias
    experts = blocks.moe(
        config,
        width=latent or width,
        shared_dim=sizes.shared_expert_dim or None,
        bias=sizes.expert_bias,
    )
    if latent:  # routed by the layer's input, computed on a narrower one
        experts = (
            formulas.projection(names.ROUTER, width, sizes.num_experts, bias=sizes.routed_bias),
            formulas.projection("moe/latent/in_proj", width, latent, bias=biased),
            *(part for part in experts if part.name != names.ROUTER),
            formulas.norm("moe/latent/norm", latent, copies=sizes.latent_norms),
            formulas.projection("moe/latent/out_proj", latent, width, bias=biased),
        )
    if sizes.router_rank:
        experts = (*_deep_router(config), *(part for part in experts if part.name != names.ROUTER))
    if sizes.idle_moe_mlp_dim:
        others = config.replace(moe_mlp_dim=sizes.idle_moe_mlp_dim, shared_experts=0)
        idle = blocks.moe(others, bias=sizes.expert_bias)
        unused = {"macs": 0, "active_parameters": 0}
        experts += tuple(part.replace(name=f"idle_{part.name}", **unused) for part in idle)
    if not sizes.shared_expert_gate:
        return experts
    gates = max(sizes.shared_experts, 1)
    return (*experts, formulas.projection(names.SHARED_GATE, config.emb_dim, gates))


def _deep_router(config: ModelConfig) -> Components:
    """``[D, r]``, a norm, two of ``[r, r]``, and ``[r, E]``."""
    sizes, rank = config.experts, config.experts.router_rank
    return (
        formulas.projection(f"{names.ROUTER}/down", config.emb_dim, rank, bias=True),
        formulas.norm(f"{names.ROUTER}/norm", rank),
        formulas.projection(f"{names.ROUTER}/hidden", rank, rank, bias=True, copies=2),
        formulas.projection(names.ROUTER, rank, sizes.num_experts + sizes.zero_experts),
    )
