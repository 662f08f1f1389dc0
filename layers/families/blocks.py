"""What families share: their table; attention, MLP and experts from the config."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from ..attention.indexer import DENSE, SPARSE, IndexerSpec
from ..attention.multi_head import AttentionSpec
from ..attention.ops import AttentionPattern, SplashBlocks
from ..attention.rope import DynamicNtkRope, Llama3Rope, LongRope, Rope, YarnRope
from ..feed_forward.experts import ExpertsSpec
from ..feed_forward.mlp import MlpSpec
from ..feed_forward.routers import RouterSpec
from ..stack.block import LayerSpec
from ..vision.encoder import VisionSpec
from .towers import vision_spec

# GPT-style blocks: LayerNorm, learned positions.
_GPT_BLOCKS = ("gpt2", "gpt3")


@dataclass(frozen=True, kw_only=True)
class ModelSpec:
    """A decoder: its layers, and what comes before and after them.

    Attributes:
        normalization: a name of `NORMS`.
        learned_positions: rows of the position table; 0: none.
        embedding_scale: factor of the embedding.
        logits_soft_cap: logits l become ``cap · tanh(l / cap)``; 0: no cap.
        streams: residual streams of hyper-connections; 0: a plain residual.
        hyper_head: whether trained weights join the streams; else they are summed.
        per_layer_width: of the layers' own inputs; 0: none.
        vision: the tower for images; None: no images.
    """

    layers: tuple[LayerSpec, ...]
    normalization: str = "rmsnorm"
    learned_positions: int = 0
    embedding_scale: float = 1.0
    logits_soft_cap: float = 0.0
    streams: int = 0
    hyper_head: bool = False
    per_layer_width: int = 0
    vision: VisionSpec | None = None

    @property
    def needs(self) -> frozenset[str]:
        """What the model needs from the attention implementation."""
        return frozenset().union(*(layer.needs for layer in self.layers))


FamilyFunction = TypeVar("FamilyFunction", bound=Callable[..., ModelSpec])
_FAMILIES: dict[str, Callable[..., ModelSpec]] = {}


def family(*blocks: str) -> Callable[[FamilyFunction], FamilyFunction]:
    """Registers a function of the config for the given `decoder_block` names."""

    def register(function: FamilyFunction) -> FamilyFunction:
        _FAMILIES.update(dict.fromkeys(blocks, function))
        return function

    return register


def model_spec(config: Any) -> ModelSpec:
    """The layers of a config.

    Args:
        config: an object with the model's fields in MaxText's names (``configs/base.yml``).
    """
    spec = _FAMILIES[config.decoder_block](config)
    return dataclasses.replace(spec, vision=vision_spec(config))


def model(
    config: Any, layers: tuple[LayerSpec, ...], *, normalization: str = "rmsnorm", **changes: Any
) -> ModelSpec:
    """`layers` between the embedding and the head of most families."""
    if config.decoder_block in _GPT_BLOCKS:
        normalization = "layernorm"
    if config.normalization != "auto":
        normalization = config.normalization
    rows = config.trainable_position_size or config.max_target_length
    options: dict[str, Any] = {
        "learned_positions": 0 if uses_rope(config) else rows,
        "logits_soft_cap": config.final_logits_soft_cap,
        **changes,
    }
    return ModelSpec(layers=layers, normalization=normalization, **options)


def alternating(
    config: Any, interval: int, whole: Any, nearby: Any = None, *, count: int = 0, **layer: Any
) -> tuple[LayerSpec, ...]:
    """Layers of which every `interval`-th is global, the others local.

    Args:
        whole: the mixer of global layers.
        nearby: of local layers; None: the same in the config's window.
        count: of layers, if it is not the config's.
        layer: what all layers have.
    """
    nearby = nearby or window(config, whole)
    return tuple(
        LayerSpec(mixer=nearby if i % interval else whole, **layer)
        for i in range(1, 1 + (count or config.num_decoder_layers))
    )


def uses_rope(config: Any) -> bool:
    """Whether positions rotate queries and keys; otherwise they have an embedding table."""
    if config.position_embedding != "auto":
        return bool(config.position_embedding == "rope")
    return config.decoder_block not in _GPT_BLOCKS


def rope(config: Any) -> Rope:
    """The config's rotary positions."""
    kind = config.rope_type
    if kind == "default" or (kind == "llama3.1" and not config.rope_use_scale):
        base, factor = config.rope_max_timescale, config.rope_linear_scaling_factor
        return Rope(timescale=base, factor=factor)
    return _STRETCHED[kind](config)


def _stretched(
    config: Any, kind: Callable[..., Rope], factor: float, pretrained: int, **options: Any
) -> Rope:
    """With the config's factor and pretrained length, or else the given (MaxText's) defaults."""
    return kind(
        timescale=config.rope_max_timescale,
        factor=config.rope_factor or factor,
        pretrained=config.original_max_position_embeddings or pretrained,
        **options,
    )


def _yarn(config: Any) -> Rope:
    return _stretched(
        config,
        YarnRope,
        40.0,
        4096,
        fast=config.beta_fast,
        slow=config.beta_slow,
        truncate=config.rope_truncate,
        scales_output=config.rope_attention_scaling,
    )


def _dynamic(config: Any) -> Rope:
    length = config.max_target_length
    return _stretched(config, DynamicNtkRope, 1.0, length, length=length)


def _longrope(config: Any) -> Rope:
    is_long = config.max_target_length > config.original_max_position_embeddings
    factors = config.rope_long_factor if is_long else config.rope_short_factor
    return _stretched(config, LongRope, 1.0, 0, factors=tuple(factors))


_STRETCHED: dict[str, Callable[[Any], Rope]] = {
    "llama3.1": lambda config: _stretched(config, Llama3Rope, 8.0, 8192),
    "yarn": _yarn,
    "dynamic": _dynamic,
    "longrope": _longrope,
}


def attention(config: Any, **changes: Any) -> AttentionSpec:
    """Multi-head attention as the config describes it, over all earlier keys."""
    bias = config.attention_bias or config.use_bias
    options: dict[str, Any] = {
        "heads": config.num_query_heads,
        "kv_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "pattern": pattern(config),
        "rope": rope(config) if uses_rope(config) else None,
        "rotary_dim": round(config.head_dim * config.partial_rotary_factor),
        "bias": bias,
        "output_bias": bias,
        "qk_norm": "head" if config.use_qk_norm else "",
        "fused": config.fused_qkv and not config.lora_rank,  # adapters are separate
        **changes,
    }
    if options["rotary_dim"] == options["head_dim"]:
        options["rotary_dim"] = 0
    return AttentionSpec(**options)


def pattern(config: Any, **changes: Any) -> AttentionPattern:
    """The scale and soft cap of the config's scores, without window or chunks."""
    wanted = config.query_pre_attn_scalar
    return AttentionPattern(
        **{
            "scale": wanted**-0.5 if wanted else None,
            "soft_cap": config.attn_logits_soft_cap,
            "blocks": splash_blocks(config),
            **changes,
        }
    )


def splash_blocks(config: Any) -> SplashBlocks:
    """The blocks of the splash kernel, under MaxText's names."""
    names = {field.name for field in dataclasses.fields(SplashBlocks)} - {"fused"}
    sizes = {name: getattr(config, f"sa_block_{name}") for name in names}
    return SplashBlocks(**sizes, fused=config.sa_use_fused_bwd_kernel)


def window(config: Any, spec: AttentionSpec) -> AttentionSpec:
    """The same attention with the config's sliding window, if it has one."""
    inside = dataclasses.replace(spec.pattern, window=config.sliding_window_size)
    return spec.replace(pattern=inside)


def indexer(config: Any) -> IndexerSpec:
    """The indexer that picks the keys of sparse attention."""
    stage = SPARSE if config.indexer_sparse_training else DENSE
    return IndexerSpec(
        heads=config.indexer_n_heads,
        head_dim=config.indexer_head_dim,
        topk=config.indexer_topk,
        loss=stage if config.indexer_loss_scaling_factor else "",
    )


def streams(config: Any) -> int:
    """Residual streams of hyper-connections; 0: a plain residual."""
    return config.mhc_expansion_rate if config.mhc_expansion_rate > 1 else 0


def mlp(config: Any, hidden: int | None = None) -> MlpSpec:
    """The dense MLP, of hidden width `hidden` or else `mlp_dim`."""
    return MlpSpec(
        hidden=config.mlp_dim if hidden is None else hidden,
        activations=tuple(config.mlp_activations),
        bias=config.use_bias,
    )


def router(config: Any, **changes: Any) -> RouterSpec:
    """A softmax router over the config's experts."""
    options: dict[str, Any] = {
        "experts": config.num_experts,
        "per_token": config.num_experts_per_tok,
        "normalize": config.norm_topk_prob,
        "scale": config.routed_scaling_factor,
        "bias": "logits" if config.routed_bias else "",
        "balance_weight": config.load_balance_loss_weight,
        **changes,
    }
    return RouterSpec(**options)


def experts(config: Any, routed: RouterSpec | None = None, **changes: Any) -> ExpertsSpec:
    """The config's routed experts, and a shared one if the config has any."""
    shared = None
    if config.shared_experts:
        shared = mlp(config, config.shared_experts * config.moe_mlp_dim)
    options: dict[str, Any] = {
        "router": routed or router(config),
        "hidden": config.moe_mlp_dim,
        "activation": config.mlp_activations[0],
        "bias": config.use_bias,
        "capacity_factor": max(config.capacity_factor, 0.0),
        "slots_by_matmul": config.slots_by_matmul,
        "whole_routing": config.whole_routing,
        "whole_gradients": config.whole_expert_gradients,
        "shared": shared,
        "whole": config.shard_exp_on_fsdp,
        **changes,
    }
    return ExpertsSpec(**options)


def feed_forward(config: Any) -> MlpSpec | ExpertsSpec:
    """The experts if the model has any, else its MLP."""
    return mlp(config) if config.num_experts == 1 else experts(config)
