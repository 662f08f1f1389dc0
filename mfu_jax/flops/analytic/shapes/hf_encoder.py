"""Sizes of Hugging Face's encoders and encoder-decoders."""

from __future__ import annotations

from dataclasses import dataclass

from mfu_jax.flops.analytic.shapes.model import ModelShape


@dataclass(frozen=True, kw_only=True)
class HfEncoderShape(ModelShape):
    """A stack of encoder layers and what stands on it.

    Attributes:
        output_heads: ``mlm`` (transform and logits), ``pooler`` (the first token, ``[D, D]``),
            ``next_sentence``, ``classifier`` (one token a sequence), ``token_classifier``,
            ``logits`` (the decoder's).
        num_labels: classes of the classifiers.
        token_types: rows of the table of segment types.
        pooled_width: outputs of the pooler.
        projection_width: width in which CLIP compares texts and images.
        num_encoder_layers, encoder_heads, encoder_mlp_dim: of an encoder beside the decoder.
        position_buckets: rows of T5's table of relative positions.
        audio_bins: mel bins of the input of Whisper.
    """

    decoder_block: str = "hf_bert"
    output_heads: tuple[str, ...] = ()
    num_labels: int = 0
    token_types: int = 0
    pooled_width: int = 0
    projection_width: int = 0
    num_encoder_layers: int = 0
    encoder_heads: int = 0
    encoder_mlp_dim: int = 0
    position_buckets: int = 0
    audio_bins: int = 0
