"""Hugging Face decoders that repeat no common pattern: gemma 3n and 4, DeepSeek V4."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from mfu_jax.errors import UserError
from mfu_jax.flops import matmuls
from mfu_jax.flops.architectures import gemma4, mixtures, parts
from mfu_jax.flops.architectures.hf_decoder import attention_mask, frame, norms
from mfu_jax.flops.architectures.hf_shape import FULL, HfDecoderShape
from mfu_jax.flops.architectures.registry import architecture
from mfu_jax.flops.components import Component, Model, layers_of
from mfu_jax.flops.matmuls import Components
from mfu_jax.flops.shape import ModelShape


@dataclass(frozen=True, kw_only=True)
class HfGemmaShape(HfDecoderShape):
    """Gemma 3n and 4: per-layer inputs, shared keys and values, AltUp.

    Attributes:
        mlp_dims: hidden width of each layer's MLP, where they differ.
        moe_beside_mlp: whether experts stand beside every MLP.
        altup_inputs: streams of AltUp; 0: none.
        laurel_rank: rank of the low-rank residual; 0: none.
    """

    decoder_block: str = "hf_gemma"
    mlp_dims: tuple[int, ...] = ()
    moe_beside_mlp: bool = False
    altup_inputs: int = 0
    laurel_rank: int = 0


@architecture("hf_gemma")
def hf_gemma(shape: ModelShape) -> Model:
    """Layers by kind, whether they borrow keys and values, and MLP width."""
    if not isinstance(shape, HfGemmaShape):
        raise UserError("decoder_block='hf_gemma' comes from a config.json; give that instead")
    count = shape.num_decoder_layers
    first_shared = count - shape.num_kv_shared_layers
    kinds = [
        (kind, i >= first_shared, shape.mlp_dims[i] if shape.mlp_dims else shape.mlp_dim)
        for i, (kind, _) in enumerate(shape.kinds_of_layers())
    ]

    def block(kind: tuple[str, bool, int]) -> tuple[str, Components]:
        mixer, borrowed, hidden = kind
        wide = borrowed and shape.use_double_wide_mlp
        name = f"{mixer}_layers{'_shared_kv' if borrowed else ''}"
        return name, (
            *_gemma_attention(shape, mixer, borrowed=borrowed),
            *parts.mlp(shape, (1 + wide) * hidden),
            *_gemma_extras(shape),
        )

    ple = shape.hidden_size_per_layer_input
    entry = gemma4.per_layer_embedding(shape) if ple else ()
    joined = _altup_projections(shape)
    return frame(shape, layers_of(kinds, block), embedding=(*entry, *joined), closing=joined)


def _gemma_attention(shape: HfGemmaShape, kind: str, *, borrowed: bool) -> Components:
    is_global = kind == FULL
    global_heads = shape.global_num_kv_heads if is_global else 0
    global_dim = shape.global_head_dim if is_global else 0
    return parts.attention(
        shape,
        attention_mask(shape, kind),
        bias=shape.attention_bias,
        qk_norm=True,
        kv_heads=global_heads or shape.num_kv_heads,
        head_dim=global_dim or shape.head_dim,
        shared_kv=is_global and shape.share_kv_projections,
        borrowed_kv=borrowed,
    )


def _gemma_extras(shape: HfGemmaShape) -> Components:
    """What stands beside attention and MLP: experts, per-layer inputs, AltUp, Laurel, norms."""
    width, ple = shape.emb_dim, shape.hidden_size_per_layer_input
    rank, streams = shape.laurel_rank, shape.altup_inputs
    extras: list[Component] = [*norms(shape, 4 + bool(ple), "norms")]
    if shape.moe_beside_mlp:
        extras.extend(parts.moe(shape))
        extras.extend(norms(shape, 3, "moe/norms"))
        extras.append(matmuls.vector("moe/router_scale", width))
        extras.append(matmuls.vector("moe/expert_scale", shape.num_experts))
    if ple:
        extras.extend(gemma4.per_layer_input(width, ple))
    if rank:
        extras.append(matmuls.projection("laurel/left", width, rank))
        extras.append(matmuls.projection("laurel/right", rank, width))
        extras.append(matmuls.norm("laurel/norm", width))
    if streams:
        extras.extend(_altup(width, streams))
    return tuple(extras)


def _altup(width: int, streams: int) -> Components:
    """Alternating updates (arXiv 2301.13310) over n streams: predict, then correct.

    Both read the router ``[D, n]``; its outputs give ``[n, n²]`` weights of the prediction, which
    mixes the streams (n²·D multiply-adds of activations), and ``[n, n]`` weights of the correction,
    which is elementwise.
    """
    router = matmuls.projection("altup/router", width, streams)
    return (
        router.replace(macs=2 * router.macs),
        matmuls.projection("altup/prediction", streams, streams**2),
        Component(name="altup/mix", kind="attention", macs=streams**2 * width),
        matmuls.projection("altup/correction", streams, streams),
        matmuls.norm("altup/norm", width),
        matmuls.vector("altup/scale", width),
    )


def _altup_projections(shape: HfGemmaShape) -> Components:
    """Into the other streams, or out of them: ``[D, D]`` each."""
    others = shape.altup_inputs - 1
    if others < 1:
        return ()
    width = shape.emb_dim
    return (matmuls.projection("altup/projections", width, width, copies=others),)


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
