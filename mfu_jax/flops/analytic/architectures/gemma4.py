"""Gemma 4: wider global layers whose keys are their values; the small ones reuse layers' keys."""

from __future__ import annotations

from mfu_jax.flops.analytic import matmuls
from mfu_jax.flops.analytic.architectures import parts
from mfu_jax.flops.analytic.architectures.registry import architecture
from mfu_jax.flops.analytic.components import Component, Model, layers_of
from mfu_jax.flops.analytic.matmuls import Components
from mfu_jax.flops.analytic.shapes.model import ModelShape

_INTERVAL = 6
_INTERVAL_E2B = 5


@architecture("gemma4")
def gemma4(shape: ModelShape) -> Model:
    """Five local layers, then a global one with heads of its own; dense, or experts too."""
    if shape.num_experts > 1:
        # The shared expert is as wide as the dense MLP would be.
        feed_forward: Components = (
            *parts.moe(shape, shared_dim=shape.mlp_dim),
            *parts.norms(shape, 3, "moe/norms"),
            matmuls.vector("moe/router_scale", shape.emb_dim),
            matmuls.vector("moe/expert_scale", shape.num_experts),
        )
    else:
        feed_forward = parts.mlp(shape)

    def block(is_global: bool) -> tuple[str, Components]:
        return "global_layers" if is_global else "local_layers", (
            *parts.norms(shape, 4),
            matmuls.vector("layer_scale", 1),
            *_attention(shape, is_global=is_global),
            *feed_forward,
        )

    kinds = ((i + 1) % _INTERVAL == 0 for i in range(shape.num_decoder_layers))
    return parts.decoder(shape, layers_of(kinds, block))


@architecture("gemma4_small")
def gemma4_small(shape: ModelShape) -> Model:
    """E2B and E4B: the last layers reuse keys and values; each layer has inputs of its own."""
    is_e2b = "e2b" in shape.model_name or shape.use_double_wide_mlp
    interval = _INTERVAL_E2B if is_e2b else _INTERVAL
    first_shared = shape.num_decoder_layers - shape.num_kv_shared_layers
    width, ple = shape.emb_dim, shape.hidden_size_per_layer_input

    def block(kind: tuple[bool, bool]) -> tuple[str, Components]:
        is_global, borrowed = kind
        name = "global_layers" if is_global else "local_layers"
        wide = borrowed and shape.use_double_wide_mlp
        return f"{name}_shared_kv" if borrowed else name, (
            *parts.norms(shape, 5 if ple else 4),
            matmuls.vector("layer_scale", 1),
            *_attention(shape, is_global=is_global, borrowed_kv=borrowed),
            *parts.mlp(shape, (1 + wide) * shape.mlp_dim),
            *(per_layer_input(width, ple) if ple else ()),
        )

    kinds = (
        ((i + 1) % interval == 0, 0 < first_shared <= i) for i in range(shape.num_decoder_layers)
    )
    return parts.decoder(
        shape, layers_of(kinds, block), embedding=per_layer_embedding(shape) if ple else ()
    )


def _attention(shape: ModelShape, *, is_global: bool, borrowed_kv: bool = False) -> Components:
    if not is_global:
        return parts.attention(
            shape,
            parts.window_mask(shape),
            qk_norm=True,
            shared_kv=False,
            borrowed_kv=borrowed_kv,
        )
    return parts.attention(
        shape,
        parts.global_mask(shape),
        qk_norm=True,
        borrowed_kv=borrowed_kv,
        kv_heads=shape.global_num_kv_heads or shape.num_kv_heads,
        head_dim=shape.global_head_dim or shape.head_dim,
    )


def per_layer_embedding(shape: ModelShape) -> Components:
    """A table of every layer's inputs ``[V, L·P]``, and a projection ``[D, L·P]`` added to it."""
    outputs = shape.num_decoder_layers * shape.hidden_size_per_layer_input
    rows = shape.vocab_size_per_layer_input or shape.vocab_size
    return (
        matmuls.table("per_layer_tokens", rows, outputs),
        matmuls.projection("per_layer_projection", shape.emb_dim, outputs),
        matmuls.norm("per_layer_norm", shape.hidden_size_per_layer_input),
    )


def per_layer_input(width: int, ple: int) -> tuple[Component, ...]:
    """Each layer gates ``[D, P]`` its own inputs and adds them back ``[P, D]``."""
    return (
        matmuls.projection("per_layer/gate", width, ple),
        matmuls.projection("per_layer/projection", ple, width),
    )
