"""Encoders and encoder-decoders: BERT, ViT, CLIP, T5, Whisper.

Shapes as in `formulas`: S sequence length, D model width, F hidden width of the MLP, V vocabulary,
N tokens of an image or of a source sequence.
"""

from __future__ import annotations

import math

from mfu_jax.flops.analytic import formulas, names
from mfu_jax.flops.analytic.architectures import blocks
from mfu_jax.flops.analytic.components import Component, Layers, layer
from mfu_jax.flops.analytic.formulas import Components
from mfu_jax.flops.analytic.model_configs.model import ModelConfig
from mfu_jax.flops.analytic.towers.encoder import encoder_block, vision_layers
from mfu_jax.flops.masks import Causal, Full, Mask


def _layer_norm(name: str, width: int, copies: int = 1) -> Component:
    return formulas.norm(name, width, bias=True, copies=copies)


def _tables(config: ModelConfig) -> Components:
    """Tokens and learned positions."""
    positions = config.embedding.trainable_position_size
    return (
        formulas.table("tokens", config.vocab_size, config.emb_dim),
        formulas.table(names.POSITIONS, positions, config.emb_dim),
    )


def bert(config: ModelConfig) -> Layers:
    """Tables and a norm, post-norm encoder layers, and the heads of the trained class."""
    width = config.emb_dim
    last: list[Component] = []
    for head in config.encoder.output_heads:
        last.extend(_text_head(config, head))
    return (
        layer(
            "embedding",
            *_tables(config),
            formulas.table("token_types", config.encoder.token_types, width),
            _layer_norm("norm", width),
        ),
        layer(
            "layers",
            *encoder_block(width, config.feed_forward.mlp_dim, Full()),
            repeats=config.num_decoder_layers,
        ),
        layer("head", *tuple(last)),
    )


def _text_head(config: ModelConfig, head: str) -> Components:
    width = config.emb_dim
    if head == "mlm":
        tied = config.embedding.logits_via_embedding
        # If untied, the PyTorch model stores the logits' bias twice.
        second = () if tied else (formulas.vector("logits_bias", config.vocab_size),)
        return (
            formulas.projection("transform", width, width, bias=True),
            _layer_norm("transform_norm", width),
            formulas.head(config.vocab_size, width, tied=tied, bias=True),
            *second,
        )
    outputs, tokens = {
        "pooler": (config.encoder.pooled_width or width, 1),
        "next_sentence": (2, 1),
        "classifier": (config.encoder.num_labels, 1),
        "token_classifier": (config.encoder.num_labels, None),
    }[head]
    return (formulas.projection(head, width, outputs, bias=True, tokens=tokens),)


def _patches(config: ModelConfig, width: int, *, bias: bool, images: int = 1) -> Components:
    """The patch embedding ``[channels·p², D]`` at N patches, a class token, one position each."""
    patches = _image_patches(config)
    pixels = config.vision.num_channels_for_vit * config.vision.patch_size_for_vit**2
    projected = formulas.projection("patches", pixels, width, bias=bias, tokens=patches * images)
    return (
        projected.replace(left_gradient=False),  # pixels are data
        formulas.vector("class_token", width),
        formulas.table(names.POSITIONS, patches + 1, width),
    )


def _image_patches(config: ModelConfig) -> int:
    config.require("image_size_for_vit", "patch_size_for_vit")
    return math.prod(config.vision.patch_grid)


def vit(config: ModelConfig) -> Layers:
    """Patches and a class token through pre-norm encoder layers; a sequence is one image.

    The image determines the number of tokens, whatever ``max_target_length`` is.
    """
    width, tokens = config.emb_dim, _image_patches(config) + 1
    block = encoder_block(
        width,
        config.feed_forward.mlp_dim,
        Full(queries=tokens),
        tokens=tokens,
        bias=config.attention.attention_bias,
    )
    heads = [part for head in config.encoder.output_heads for part in _text_head(config, head)]
    return (
        layer("embedding", *_patches(config, width, bias=True)),
        layer("layers", *block, repeats=config.num_decoder_layers),
        layer("head", _layer_norm("final_norm", width), *heads),
    )


def clip(config: ModelConfig) -> Layers:
    """A causal text encoder and a vision encoder, each projected to a shared width.

    Each text of the batch is compared with each of its images; pairs across devices are extra.
    """
    text, vision = config.emb_dim, config.vision.hidden_size_for_vit
    shared = config.encoder.projection_width
    images = config.step.images_per_sequence
    tokens = _image_patches(config) + 1
    compared = config.step.per_device_batch_size * images * shared
    similarity = Component(name="similarity", kind="attention", macs=compared, tokens=1)
    return (
        layer("text/embedding", *_tables(config)),
        layer(
            "text/layers",
            *encoder_block(text, config.feed_forward.mlp_dim, blocks.global_mask(config)),
            repeats=config.num_decoder_layers,
        ),
        layer(
            "text/head",
            _layer_norm("final_norm", text),
            formulas.projection("projection", text, shared, tokens=1),
        ),
        layer(
            "vision/embedding",
            *_patches(config, vision, bias=False, images=images),
            _layer_norm("norms", vision, copies=2),
        ),
        vision_layers(config, tokens, images),
        layer(
            "vision/head",
            formulas.projection("projection", vision, shared, tokens=images),
            formulas.vector("logit_scale", 1),
            similarity,
        ),
    )


def t5(config: ModelConfig) -> Layers:
    """T5: an encoder over the source, a decoder with cross attention; RMSNorm, no bias.

    The first layer of each stack, or every layer, has a table of relative positions: one value per
    bucket and head.
    """
    width, sizes = config.emb_dim, config.feed_forward
    heads, head_dim = config.attention.num_query_heads, config.attention.head_dim
    source = config.step.encoder_length or config.step.max_target_length
    relative = (formulas.table("relative_positions", config.encoder.position_buckets, heads),)
    in_first, in_all = ((), relative) if config.encoder.positions_in_every_layer else (relative, ())

    def attend(mask: Mask, name: str, tokens: int | None, keys: int | None) -> Components:
        return formulas.attention(
            width, heads, heads, head_dim, mask, tokens=tokens, kv_tokens=keys, name=name
        )

    def forward(tokens: int | None) -> Components:
        return formulas.mlp(width, sizes.mlp_dim, gated=sizes.gated, tokens=tokens)

    encoder = layer(
        "encoder/layers",
        *in_all,
        formulas.norm("norms", width, copies=2),
        *attend(Full(queries=source), "attention", source, source),
        *forward(source),
        repeats=config.encoder.num_encoder_layers,
    )
    decoder = layer(
        "decoder/layers",
        *in_all,
        formulas.norm("norms", width, copies=3),
        *attend(Causal(), "attention", None, None),
        *attend(Full(keys=source), "cross_attention", None, source),
        *forward(None),
        repeats=config.num_decoder_layers,
    )
    final = formulas.norm("final_norm", width)
    tables = layer("embedding", formulas.table("tokens", config.vocab_size, width), *in_first)
    if "encoder" in config.encoder.output_heads:
        return (tables, encoder, layer("encoder/head", final))
    return (
        tables,
        encoder,
        layer("encoder/head", final),
        layer("decoder/embedding", *in_first),
        decoder,
        layer("head", final, *_logits(config)),
    )


def whisper(config: ModelConfig) -> Layers:
    """Whisper: two convolutions of kernel 3 (the second halves the length), encoder, decoder.

    The audio determines the encoder's length, two mel frames per token. Keys have no bias.
    """
    width, source, sizes = config.emb_dim, config.step.encoder_length, config.encoder
    encoder = (
        _layer_norm("norms", width, copies=2),
        *_whisper_attention(width, Full(queries=source), "attention", source, source),
        *formulas.mlp(width, sizes.encoder_mlp_dim, gated=False, bias=True, tokens=source),
    )
    decoder = (
        _layer_norm("norms", width, copies=3),
        *_whisper_attention(width, Causal(), "attention", None, None),
        *_whisper_attention(width, Full(keys=source), "cross_attention", None, source),
        *formulas.mlp(width, config.feed_forward.mlp_dim, gated=False, bias=True),
    )
    frames = formulas.projection("conv1", 3 * sizes.audio_bins, width, bias=True, tokens=2 * source)
    final = _layer_norm("final_norm", width)
    return (
        layer(
            "encoder/embedding",
            frames.replace(left_gradient=False),  # audio is data
            formulas.projection("conv2", 3 * width, width, bias=True, tokens=source),
            formulas.table(names.POSITIONS, source, width),
        ),
        layer("encoder/layers", *encoder, repeats=sizes.num_encoder_layers),
        layer("encoder/head", final),
        layer("decoder/embedding", *_tables(config)),
        layer("decoder/layers", *decoder, repeats=config.num_decoder_layers),
        layer("head", final, *_logits(config)),
    )


def _logits(config: ModelConfig) -> Components:
    if "logits" not in config.encoder.output_heads:
        return ()
    return (blocks.head(config, config.emb_dim),)


def _whisper_attention(
    width: int, mask: Mask, name: str, tokens: int | None, keys: int | None
) -> Components:
    attended = formulas.attention(
        width, 1, 1, width, mask, bias=True, tokens=tokens, kv_tokens=keys, name=name
    )
    return tuple(
        part.replace(parameters=width * width) if part.name.endswith("k_proj") else part
        for part in attended
    )
