"""Families with experts in some layers: Llama 4, Switch, and Qwen's with linear attention."""

from __future__ import annotations

from mfu_jax.flops.analytic import formulas, mixers, names
from mfu_jax.flops.analytic.architectures import blocks
from mfu_jax.flops.analytic.components import Layers, layer, layers_of
from mfu_jax.flops.analytic.formulas import Components
from mfu_jax.flops.analytic.model_configs.model import ModelConfig


def llama4(config: ModelConfig) -> Layers:
    """Chunked attention except in every n-th layer; experts in every m-th layer."""
    interval = config.attention.nope_layer_interval
    step = max(config.experts.interleave_moe_layer_step, 1)

    def block(kind: tuple[bool, bool]) -> tuple[str, Components]:
        is_global, dense = kind
        mask = blocks.global_mask(config) if is_global else blocks.chunk_mask(config)
        name = "global" if is_global else "chunked"
        return f"{name}_dense_layers" if dense else f"{name}_moe_layers", (
            *blocks.norms(config, 2),
            # Its query and key norms have no weights.
            *blocks.attention(config, mask, qk_norm=False),
            *blocks.feed_forward(config, dense=dense),
        )

    kinds = (
        (interval > 0 and i % interval == 0, i % step != 0)
        for i in range(1, config.num_decoder_layers + 1)
    )
    return blocks.decoder(config, layers_of(kinds, block))


def envy(config: ModelConfig) -> Layers:
    """Switch-style: experts in every n-th layer, a dense MLP in the others."""
    step = max(config.experts.interleave_moe_layer_step, 1)
    attended = (*blocks.norms(config, 3), *blocks.attention(config, blocks.global_mask(config)))

    def block(dense: bool) -> tuple[str, Components]:
        name = "dense_layers" if dense else "moe_layers"
        return name, (*attended, *blocks.feed_forward(config, dense=dense))

    kinds = (i % step != 0 for i in range(1, config.num_decoder_layers + 1))
    return blocks.decoder(config, layers_of(kinds, block))


def qwen3_custom_moe(config: ModelConfig) -> Layers:
    """Attention projects to a narrower latent for the experts; a projection leads back."""
    config.require("attention_output_dim", "moe_expert_input_dim")
    latent = config.experts.moe_expert_input_dim
    block = (
        *blocks.norms(config, 2),
        *blocks.attention(
            config,
            blocks.global_mask(config),
            qk_norm=True,
            output_width=config.attention.attention_output_dim,
        ),
        formulas.norm("latent_norm", latent),
        *blocks.moe(config, width=latent),
        formulas.projection("up_proj", latent, config.emb_dim),
    )
    return blocks.decoder(config, (layer("layers", *block, repeats=config.num_decoder_layers),))


def qwen3_next(config: ModelConfig) -> Layers:
    """Gated delta nets, gated full attention in every n-th layer, experts with a shared one."""
    config.require(
        "gdn_num_key_heads",
        "gdn_num_value_heads",
        "gdn_key_head_dim",
        "gdn_value_head_dim",
        "gdn_conv_kernel_dim",
        "inhomogeneous_layer_cycle_interval",
    )
    experts = blocks.feed_forward(config)
    if config.experts.num_experts > 1 and config.experts.shared_experts:
        experts = (*experts, formulas.projection(names.SHARED_GATE, config.emb_dim, 1))
    token_mixers = {
        "full_attention_layers": blocks.attention(
            config, blocks.global_mask(config), output_gate=True, qk_norm=True
        ),
        "delta_net_layers": mixers.gated_delta_net(config),
    }
    interval = config.attention.inhomogeneous_layer_cycle_interval
    before = blocks.norms(config, 2)
    kinds = (
        "delta_net_layers" if i % interval else "full_attention_layers"
        for i in range(1, config.num_decoder_layers + 1)
    )
    return blocks.decoder(
        config, layers_of(kinds, lambda kind: (kind, (*before, *token_mixers[kind], *experts)))
    )
