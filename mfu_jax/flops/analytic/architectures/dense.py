"""Decoders whose layers are all alike, or alternate between global and local attention."""

from __future__ import annotations

from typing import Any

from mfu_jax.flops.analytic.architectures import parts
from mfu_jax.flops.analytic.architectures.registry import architecture
from mfu_jax.flops.analytic.components import Layer, Model, layers_of
from mfu_jax.flops.analytic.matmuls import Components
from mfu_jax.flops.analytic.shapes.model import ModelShape

# MaxText's GPT-3 files set a position table of this many rows.
_GPT3_POSITIONS = 16384


@architecture("default", "llama2", "mistral", "gemma", "gpt2")
def dense_decoder(shape: ModelShape) -> Model:
    """L × (attention, MLP or experts), every layer alike."""
    return uniform(shape)


@architecture("qwen3", "qwen3_moe")
def qwen3(shape: ModelShape) -> Model:
    """Like llama, with norms on queries and keys."""
    return uniform(shape, qk_norm=True)


@architecture("qwen2")
def qwen2(shape: ModelShape) -> Model:
    """Like llama, with a bias on q, k and v only."""
    return uniform(shape, output_bias=shape.use_bias)


@architecture("mixtral")
def mixtral(shape: ModelShape) -> Model:
    """Like llama, with experts."""
    return uniform(shape)


@architecture("gpt3")
def gpt3(shape: ModelShape) -> Model:
    """LayerNorm, learned positions, a bias everywhere, plain MLP."""
    positions = shape.trainable_position_size or _GPT3_POSITIONS
    return uniform(shape.replace(use_bias=True, trainable_position_size=positions))


def uniform(shape: ModelShape, **attention: Any) -> Model:
    """Attention, MLP or experts, and two norms, `num_decoder_layers` times."""
    block = (
        *parts.norms(shape, 2),
        *parts.attention(shape, parts.layer_mask(shape), **attention),
        *parts.feed_forward(shape),
    )
    return parts.decoder(
        shape, (Layer(name="layers", components=block, repeats=shape.num_decoder_layers),)
    )


@architecture("gemma2")
def gemma2(shape: ModelShape) -> Model:
    """A local and a global layer in turn; MaxText's `num_decoder_layers` counts the pairs."""
    return alternating(shape, _local_global(2, 2 * shape.num_decoder_layers), norms=4)


@architecture("gemma3")
def gemma3(shape: ModelShape) -> Model:
    """Five local layers, then a global one; norms before and after, and on queries and keys."""
    return alternating(shape, _local_global(6, shape.num_decoder_layers), norms=4, qk_norm=True)


@architecture("olmo3")
def olmo3(shape: ModelShape) -> Model:
    """Three local layers, then a global one; norms after, and over all heads' queries and keys."""
    return alternating(
        shape,
        _local_global(4, shape.num_decoder_layers),
        norms=2,
        qk_norm=True,
        qk_norm_all_heads=True,
    )


@architecture("gpt_oss")
def gpt_oss(shape: ModelShape) -> Model:
    """A local and a global layer in turn, experts with biases, and a sink logit for each head."""
    biased = shape.replace(use_bias=True, routed_bias=True)
    return alternating(biased, _local_global(2, shape.num_decoder_layers), norms=2, sinks=True)


def alternating(
    shape: ModelShape, kinds: tuple[str, ...], *, norms: int, **attention: Any
) -> Model:
    """Layers of kind ``local`` (sliding window) and ``global``, otherwise alike."""
    masks = {"local": parts.window_mask(shape), "global": parts.global_mask(shape)}

    def block(kind: str) -> tuple[str, Components]:
        return f"{kind}_layers", (
            *parts.norms(shape, norms),
            *parts.attention(shape, masks[kind], **attention),
            *parts.feed_forward(shape),
        )

    return parts.decoder(shape, layers_of(kinds, block))


def _local_global(interval: int, layers: int) -> tuple[str, ...]:
    """Every `interval`-th layer is global, the others local."""
    return tuple("global" if (i + 1) % interval == 0 else "local" for i in range(layers))
