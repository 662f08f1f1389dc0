"""Decoders of Hugging Face models: every layer names its token mixer and its feed-forward."""

from __future__ import annotations

from collections.abc import Callable

from mfu_jax.errors import UserError
from mfu_jax.flops.analytic import matmuls, mixers
from mfu_jax.flops.analytic.architectures import parts
from mfu_jax.flops.analytic.architectures.registry import architecture
from mfu_jax.flops.analytic.components import Layer, Model, layers_of
from mfu_jax.flops.analytic.matmuls import Components
from mfu_jax.flops.analytic.mixers import gated_short_convolution, mamba
from mfu_jax.flops.analytic.shapes.hf_decoder import CHUNKED, FULL, SLIDING, HfDecoderShape
from mfu_jax.flops.analytic.shapes.model import ModelShape
from mfu_jax.flops.analytic.towers.huggingface import tower_layers
from mfu_jax.flops.masks import BidirectionalWindow, Full, Mask


@architecture("hf_decoder")
def hf_decoder(shape: ModelShape) -> Model:
    """Embedding, the layers as listed, final norm, output head."""
    if not isinstance(shape, HfDecoderShape):
        raise UserError("decoder_block='hf_decoder' comes from a config.json; give that instead")

    def block(kind: tuple[str, str]) -> tuple[str, Components]:
        name = "_".join(part for part in (*kind, "layers") if part not in ("none", "dense"))
        return name, (
            *norms(shape, shape.norms_per_layer, "norms"),
            *token_mixer(shape, kind[0]),
            *_feed_forward(shape, kind[1]),
        )

    return frame(shape, layers_of(shape.kinds_of_layers(), block))


def frame(
    shape: HfDecoderShape,
    layers: tuple[Layer, ...],
    *,
    embedding: Components = (),
    closing: Components = (),
) -> Model:
    """`layers` between the tables and the head, with projections where the table is narrower.

    Args:
        embedding: further components beside the tables.
        closing: components between the last layer and the final norm.
    """
    width = shape.token_width or shape.emb_dim
    projected = width != shape.emb_dim
    first = [matmuls.table("tokens", shape.vocab_size, width)]
    if projected:
        first.append(matmuls.projection("project_in", width, shape.emb_dim))
    if parts.learned_positions(shape):
        first.append(matmuls.table("positions", shape.trainable_position_size, shape.emb_dim))
    if shape.embedding_norm:
        first.extend(norms(shape, 1, "embedding_norm"))
    last: list[matmuls.Component] = [
        *closing,
        *(norms(shape, 1, "final_norm") if shape.final_norm else ()),
    ]
    if projected:
        last.append(matmuls.projection("project_out", shape.emb_dim, width))
    output = parts.head(shape, width, bias=shape.head_bias)
    if shape.output_head:
        last.append(output)
    return Model(
        layers=(
            *tower_layers(shape),
            Layer(name="embedding", components=(*first, *embedding)),
            *layers,
            *parts.mtp_modules(shape, layers[-1].components, output),
            Layer(name="head", components=tuple(last)),
        )
    )


def norms(shape: HfDecoderShape, copies: int, name: str) -> Components:
    """`copies` norms over the model width; none where norms have no weights."""
    return parts.norms(shape, copies, name) if copies and shape.normalization != "none" else ()


def attention_mask(shape: HfDecoderShape, kind: str) -> Mask:
    """The mask of an attention layer."""
    if shape.bidirectional:
        window = shape.sliding_window_size
        return BidirectionalWindow(window) if kind == SLIDING and window else Full()
    return {
        FULL: parts.global_mask,
        SLIDING: parts.window_mask,
        CHUNKED: parts.chunk_mask,
    }[kind](shape)


def token_mixer(shape: HfDecoderShape, kind: str) -> Components:
    """The components that `kind` of `layer_types` stands for."""
    found: list[matmuls.Component] = []
    for name in kind.split("+"):
        try:
            found.extend(_MIXERS[name](shape, name))
        except KeyError:
            raise UserError(
                f"layer_types has {name!r}; expected {', '.join(_MIXERS)}; count_model_flops(fn, "
                f"*args) counts any JAX function"
            ) from None
    return tuple(found)


def _attention(shape: HfDecoderShape, kind: str) -> Components:
    mask = attention_mask(shape, kind)
    if shape.attention_type == "mla":
        return parts.latent_attention(shape, mask, bias=shape.attention_bias)
    attended = parts.attention(
        shape,
        mask,
        bias=shape.attention_bias,
        output_bias=shape.attention_output_bias,
        output_gate=shape.attention_output_gate,
        sinks=shape.attention_sinks,
        qk_norm=bool(shape.qk_norm),
        qk_norm_all_heads=shape.qk_norm == "all_heads",
    )
    if not shape.qk_norm_bias:
        return attended
    scales = next(part for part in attended if part.name.endswith("qk_norm"))
    return (*attended, scales.replace(name=f"{scales.name}_bias"))


def _delta_net(shape: HfDecoderShape, _: str) -> Components:
    return parts.delta_net(shape)


def _mamba(shape: HfDecoderShape, _: str) -> Components:
    return mamba(
        shape.emb_dim,
        inner=shape.mamba_inner,
        state=shape.mamba_state,
        rank=shape.mamba_rank,
        kernel=shape.mamba_kernel,
        bias=shape.mamba_bias,
        conv_bias=shape.mamba_conv_bias,
        inner_norms=shape.mamba_norm,
    )


def _mamba2(shape: HfDecoderShape, _: str) -> Components:
    mixed = mixers.mamba2(
        shape.emb_dim,
        inner=shape.mamba_inner,
        heads=shape.mamba_heads,
        groups=shape.mamba_groups,
        state=shape.mamba_state,
        kernel=shape.mamba_kernel,
        chunk=shape.scan_chunk_size,
        bias=shape.mamba_bias,
        conv_bias=shape.mamba_conv_bias,
    )
    out_bias = (shape.mamba_output_bias - shape.mamba_bias) * shape.emb_dim
    return tuple(
        part.replace(parameters=part.parameters + out_bias)
        if part.name.endswith("out_proj")
        else part
        for part in mixed
        if shape.mamba_norm or not part.name.endswith("/norm")
    )


def _short_convolution(shape: HfDecoderShape, _: str) -> Components:
    return gated_short_convolution(shape.emb_dim, kernel=shape.conv_kernel, bias=shape.conv_bias)


_MIXERS: dict[str, Callable[[HfDecoderShape, str], Components]] = {
    FULL: _attention,
    SLIDING: _attention,
    CHUNKED: _attention,
    "linear_attention": _delta_net,
    "mamba": _mamba,
    "mamba2": _mamba2,
    "conv": _short_convolution,
}


def _feed_forward(shape: HfDecoderShape, kind: str) -> Components:
    if kind == "none":
        return ()
    if kind == "dense":
        weights = shape.activation_weights
        scalars = (matmuls.vector("mlp/activation", weights),) if weights else ()
        return (*parts.mlp(shape), *scalars)
    if kind != "moe":
        raise UserError(f"feed_forward_types has {kind!r}; expected dense, moe or none")
    experts = parts.moe(shape, shared_dim=shape.shared_expert_dim or None, bias=shape.expert_bias)
    if shape.shared_expert_gate:
        return (*experts, matmuls.projection("moe/shared_gate", shape.emb_dim, 1))
    return experts
