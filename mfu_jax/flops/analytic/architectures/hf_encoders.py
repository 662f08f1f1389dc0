"""Encoders and encoder-decoders of Hugging Face: BERT, ViT, CLIP, T5, Whisper.

Shapes as in `matmuls`: S sequence length, D model width, F hidden width of the MLP, V vocabulary,
N tokens of an image or of a source sequence.
"""

from __future__ import annotations

import math

from mfu_jax.errors import UserError
from mfu_jax.flops.analytic import matmuls
from mfu_jax.flops.analytic.architectures import parts
from mfu_jax.flops.analytic.architectures.registry import architecture
from mfu_jax.flops.analytic.components import Component, Layer, Model
from mfu_jax.flops.analytic.matmuls import Components
from mfu_jax.flops.analytic.shapes.hf_encoder import HfEncoderShape
from mfu_jax.flops.analytic.shapes.model import ModelShape
from mfu_jax.flops.masks import Causal, Full, Mask


def _checked(shape: ModelShape) -> HfEncoderShape:
    if not isinstance(shape, HfEncoderShape):
        block = shape.decoder_block
        raise UserError(f"decoder_block={block!r} comes from a config.json; give that instead")
    return shape


def _layer_norm(name: str, width: int, copies: int = 1) -> Component:
    return matmuls.norm(name, width, bias=True, copies=copies)


def _block(
    width: int,
    hidden: int,
    mask: Mask,
    *,
    tokens: int | None = None,
    bias: bool = True,
    images: int = 1,
) -> Components:
    """Two LayerNorms, attention, a plain MLP; of `images` images of N tokens each.

    The number of heads does not matter: H heads of width D/H make as many multiply-adds as one.
    """
    positions = None if tokens is None else tokens * images
    attended = matmuls.attention(
        width, 1, 1, width, mask, bias=bias, output_bias=True, tokens=positions
    )
    return (
        _layer_norm("norms", width, copies=2),
        *(p.replace(macs=p.macs * images) if p.mask is not None else p for p in attended),
        *matmuls.mlp(width, hidden, gated=False, bias=True, tokens=positions),
    )


@architecture("hf_bert")
def hf_bert(shape: ModelShape) -> Model:
    """Tables and a norm, post-norm encoder layers, the heads of the class that is trained."""
    shape = _checked(shape)
    width = shape.emb_dim
    last: list[Component] = []
    for head in shape.output_heads:
        last.extend(_text_head(shape, head))
    return Model(
        layers=(
            Layer(
                name="embedding",
                components=(
                    matmuls.table("tokens", shape.vocab_size, width),
                    matmuls.table("positions", shape.trainable_position_size, width),
                    matmuls.table("token_types", shape.token_types, width),
                    _layer_norm("norm", width),
                ),
            ),
            Layer(
                name="layers",
                components=_block(width, shape.mlp_dim, Full()),
                repeats=shape.num_decoder_layers,
            ),
            Layer(name="head", components=tuple(last)),
        )
    )


def _text_head(shape: HfEncoderShape, head: str) -> Components:
    width = shape.emb_dim
    if head == "mlm":
        tied = shape.logits_via_embedding
        # Untied, PyTorch's model holds the bias of the logits twice.
        second = () if tied else (matmuls.vector("logits_bias", shape.vocab_size),)
        return (
            matmuls.projection("transform", width, width, bias=True),
            _layer_norm("transform_norm", width),
            matmuls.head(shape.vocab_size, width, tied=tied, bias=True),
            *second,
        )
    outputs, tokens = {
        "pooler": (shape.pooled_width or width, 1),
        "next_sentence": (2, 1),
        "classifier": (shape.num_labels, 1),
        "token_classifier": (shape.num_labels, None),
    }[head]
    return (matmuls.projection(head, width, outputs, bias=True, tokens=tokens),)


def _patches(shape: ModelShape, width: int, *, bias: bool, images: int = 1) -> Components:
    """The patch embedding ``[channels·p², D]`` at N patches, a class token, a position each."""
    patches = image_patches(shape)
    pixels = shape.num_channels_for_vit * shape.patch_size_for_vit**2
    projected = matmuls.projection("patches", pixels, width, bias=bias, tokens=patches * images)
    return (
        projected.replace(left_gradient=False),  # pixels are data
        matmuls.vector("class_token", width),
        matmuls.table("positions", patches + 1, width),
    )


def image_patches(shape: ModelShape) -> int:
    """Patches of one image."""
    shape.require("image_size_for_vit", "patch_size_for_vit")
    size = shape.image_size_for_vit
    sides = size if isinstance(size, tuple) else (size, size)
    return math.prod(side // shape.patch_size_for_vit for side in sides)


@architecture("hf_vit")
def hf_vit(shape: ModelShape) -> Model:
    """Patches and a class token through pre-norm encoder layers; a sequence is one image.

    The image gives the number of tokens, whatever ``max_target_length`` is.
    """
    shape = _checked(shape)
    width, tokens = shape.emb_dim, image_patches(shape) + 1
    block = _block(
        width, shape.mlp_dim, Full(queries=tokens), tokens=tokens, bias=shape.attention_bias
    )
    heads = [part for head in shape.output_heads for part in _text_head(shape, head)]
    return Model(
        layers=(
            Layer(name="embedding", components=_patches(shape, width, bias=True)),
            Layer(name="layers", components=block, repeats=shape.num_decoder_layers),
            Layer(name="head", components=(_layer_norm("final_norm", width), *heads)),
        )
    )


@architecture("hf_clip")
def hf_clip(shape: ModelShape) -> Model:
    """A causal text encoder and a vision encoder, each projected into a shared width.

    Every text of the batch is compared with every image of it; across devices there are more.
    """
    shape = _checked(shape)
    text, vision, shared = shape.emb_dim, shape.hidden_size_for_vit, shape.projection_width
    images = shape.images_per_sequence
    tokens = image_patches(shape) + 1
    compared = shape.per_device_batch_size * images * shared
    similarity = Component(name="similarity", kind="attention", macs=compared, tokens=1)
    return Model(
        layers=(
            Layer(
                name="text/embedding",
                components=(
                    matmuls.table("tokens", shape.vocab_size, text),
                    matmuls.table("positions", shape.trainable_position_size, text),
                ),
            ),
            Layer(
                name="text/layers",
                components=_block(text, shape.mlp_dim, parts.global_mask(shape)),
                repeats=shape.num_decoder_layers,
            ),
            Layer(
                name="text/head",
                components=(
                    _layer_norm("final_norm", text),
                    matmuls.projection("projection", text, shared, tokens=1),
                ),
            ),
            Layer(
                name="vision/embedding",
                components=(
                    *_patches(shape, vision, bias=False, images=images),
                    _layer_norm("norms", vision, copies=2),
                ),
            ),
            Layer(
                name="vision/layers",
                components=_block(
                    vision,
                    shape.intermediate_size_for_vit,
                    Full(queries=tokens),
                    tokens=tokens,
                    images=images,
                ),
                repeats=shape.num_hidden_layers_for_vit,
            ),
            Layer(
                name="vision/head",
                components=(
                    matmuls.projection("projection", vision, shared, tokens=images),
                    matmuls.vector("logit_scale", 1),
                    similarity,
                ),
            ),
        )
    )


@architecture("hf_t5")
def hf_t5(shape: ModelShape) -> Model:
    """T5: an encoder over the source, a decoder with cross attention; RMSNorm, no bias.

    A table of relative positions, one value a bucket and head, in the first layer of each stack.
    """
    shape = _checked(shape)
    width, heads, head_dim = shape.emb_dim, shape.num_query_heads, shape.head_dim
    source = shape.encoder_length or shape.max_target_length
    relative = matmuls.table("relative_positions", shape.position_buckets, heads)

    def attend(mask: Mask, name: str, tokens: int | None, keys: int | None) -> Components:
        return matmuls.attention(
            width, heads, heads, head_dim, mask, tokens=tokens, kv_tokens=keys, name=name
        )

    def forward(tokens: int | None) -> Components:
        return matmuls.mlp(width, shape.mlp_dim, gated=shape.gated_mlp, tokens=tokens)

    encoder = Layer(
        name="encoder/layers",
        components=(
            matmuls.norm("norms", width, copies=2),
            *attend(Full(queries=source), "attention", source, source),
            *forward(source),
        ),
        repeats=shape.num_encoder_layers,
    )
    decoder = Layer(
        name="decoder/layers",
        components=(
            matmuls.norm("norms", width, copies=3),
            *attend(Causal(), "attention", None, None),
            *attend(Full(keys=source), "cross_attention", None, source),
            *forward(None),
        ),
        repeats=shape.num_decoder_layers,
    )
    final = matmuls.norm("final_norm", width)
    tables = Layer(
        name="embedding", components=(matmuls.table("tokens", shape.vocab_size, width), relative)
    )
    if "encoder" in shape.output_heads:
        return Model(layers=(tables, encoder, Layer(name="encoder/head", components=(final,))))
    return Model(
        layers=(
            tables,
            encoder,
            Layer(name="encoder/head", components=(final,)),
            Layer(name="decoder/embedding", components=(relative,)),
            decoder,
            Layer(name="head", components=(final, *_logits(shape))),
        )
    )


@architecture("hf_whisper")
def hf_whisper(shape: ModelShape) -> Model:
    """Whisper: two convolutions of kernel 3 (the second halves the length), encoder, decoder.

    The audio gives the encoder's length, two mel frames a token. Keys have no bias.
    """
    shape = _checked(shape)
    width, source = shape.emb_dim, shape.encoder_length
    encoder = (
        _layer_norm("norms", width, copies=2),
        *_whisper_attention(width, Full(queries=source), "attention", source, source),
        *matmuls.mlp(width, shape.encoder_mlp_dim, gated=False, bias=True, tokens=source),
    )
    decoder = (
        _layer_norm("norms", width, copies=3),
        *_whisper_attention(width, Causal(), "attention", None, None),
        *_whisper_attention(width, Full(keys=source), "cross_attention", None, source),
        *matmuls.mlp(width, shape.mlp_dim, gated=False, bias=True),
    )
    frames = matmuls.projection("conv1", 3 * shape.audio_bins, width, bias=True, tokens=2 * source)
    final = _layer_norm("final_norm", width)
    return Model(
        layers=(
            Layer(
                name="encoder/embedding",
                components=(
                    frames.replace(left_gradient=False),  # audio is data
                    matmuls.projection("conv2", 3 * width, width, bias=True, tokens=source),
                    matmuls.table("positions", source, width),
                ),
            ),
            Layer(name="encoder/layers", components=encoder, repeats=shape.num_encoder_layers),
            Layer(name="encoder/head", components=(final,)),
            Layer(
                name="decoder/embedding",
                components=(
                    matmuls.table("tokens", shape.vocab_size, width),
                    matmuls.table("positions", shape.trainable_position_size, width),
                ),
            ),
            Layer(name="decoder/layers", components=decoder, repeats=shape.num_decoder_layers),
            Layer(name="head", components=(final, *_logits(shape))),
        )
    )


def _logits(shape: HfEncoderShape) -> Components:
    if "logits" not in shape.output_heads:
        return ()
    return (parts.head(shape, shape.emb_dim),)


def _whisper_attention(
    width: int, mask: Mask, name: str, tokens: int | None, keys: int | None
) -> Components:
    attended = matmuls.attention(
        width, 1, 1, width, mask, bias=True, tokens=tokens, kv_tokens=keys, name=name
    )
    return tuple(
        part.replace(parameters=width * width) if part.name.endswith("k_proj") else part
        for part in attended
    )
