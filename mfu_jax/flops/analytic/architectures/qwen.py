"""Qwen's decoders with a latent for the experts, or with linear attention."""

from __future__ import annotations

from mfu_jax.flops.analytic import formulas, mixers, names
from mfu_jax.flops.analytic.architectures import blocks
from mfu_jax.flops.analytic.components import Layers, layer, layers_of
from mfu_jax.flops.analytic.model_configs.model import ModelConfig


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
