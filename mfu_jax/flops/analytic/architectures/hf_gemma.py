"""Hugging Face decoders that repeat no common pattern: gemma 3n and 4, DeepSeek V4."""

from __future__ import annotations

from mfu_jax.errors import UserError
from mfu_jax.flops.analytic import matmuls
from mfu_jax.flops.analytic.architectures import gemma4, parts
from mfu_jax.flops.analytic.architectures.hf_decoder import attention_mask, frame, norms
from mfu_jax.flops.analytic.architectures.registry import architecture
from mfu_jax.flops.analytic.components import Component, Model, layers_of
from mfu_jax.flops.analytic.matmuls import Components
from mfu_jax.flops.analytic.shapes.hf_decoder import FULL
from mfu_jax.flops.analytic.shapes.hf_gemma import HfGemmaShape
from mfu_jax.flops.analytic.shapes.model import ModelShape


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
