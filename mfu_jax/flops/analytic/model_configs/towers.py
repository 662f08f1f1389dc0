"""Vision and audio towers of a decoder, and models that are themselves encoders.

What a sequence contains (images, audio frames) is not in a model's config: it is in `Step`.
"""

from __future__ import annotations

from mfu_jax.flops.analytic.model_configs.group import FieldGroup, field_group, hugging_face
from mfu_jax.flops.exact import Number


@field_group
class VisionConfig(FieldGroup):
    """A vision tower, and the patches of models that read only images.

    Attributes:
        image_size_for_vit: pixels per side, or height and width.
        vision_tower: ``siglip``, ``llama4``, ``qwen3_5``, ``gemma3n`` or ``gemma4``: the tower in
            a ``config.json``.
        image_tokens: number of tokens per image.
        vision_pooling_head: whether SigLIP has its own pooling head.
        vision_output_dim: input width of Llama 4's projector.
        vision_vocab: number of Gemma 3n's hard tokens.
        vision_heads, vision_kv_heads, vision_head_dim: Gemma 4's heads.
        vision_pooling: side of the square of tokens that Gemma 4 averages.
    """

    use_multimodal: bool = False
    image_size_for_vit: int | tuple[int, ...] = 0
    tile_size_for_vit: int = 0
    patch_size_for_vit: int = 0
    temporal_patch_size_for_vit: int = 1
    num_channels_for_vit: int = 3
    hidden_size_for_vit: int = 0
    intermediate_size_for_vit: int = 0
    num_hidden_layers_for_vit: int = 0
    num_attention_heads_for_vit: int = 0
    num_position_embeddings_for_vit: int = 0
    spatial_merge_size_for_vit: int = 0
    out_hidden_size_for_vit: int = 0
    deepstack_visual_indexes_for_vit: tuple[int, ...] = ()
    projector_input_dim_for_vit: int = 0
    projector_output_dim_for_vit: int = 0
    pixel_shuffle_ratio_for_vit: Number = 1

    vision_tower: str = hugging_face("")
    image_tokens: int = hugging_face(0)
    vision_pooling_head: bool = hugging_face(False)
    vision_output_dim: int = hugging_face(0)
    vision_vocab: int = hugging_face(0)
    vision_heads: int = hugging_face(0)
    vision_kv_heads: int = hugging_face(0)
    vision_head_dim: int = hugging_face(0)
    vision_pooling: int = hugging_face(0)

    @property
    def image_sides(self) -> tuple[int, ...]:
        """Height and width of an image in pixels."""
        size = self.image_size_for_vit
        return size if isinstance(size, tuple) else (size, size)

    @property
    def patch_grid(self) -> tuple[int, int]:
        """Rows and columns of an image's whole patches."""
        height, width = self.image_sides
        return height // self.patch_size_for_vit, width // self.patch_size_for_vit


@field_group
class AudioConfig(FieldGroup):
    """An audio tower; the ``audio_*`` fields belong to a conformer.

    Attributes:
        audio_vocab: number of Gemma 3n's hard tokens.
        audio_channels: channels of the two convolutions.
        audio_kernel: width of the depthwise convolution.
        audio_chunk: queries per block; `audio_context`: the keys they are multiplied with, of
            which the mask keeps `audio_past` and `audio_future`.
        audio_relative_positions: number of relative positions that have a key.
        audio_reduction: how many of its tokens are merged into one.
    """

    use_audio: bool = False
    d_model_for_audio: int = 0
    encoder_layers_for_audio: int = 0
    encoder_ffn_dim_for_audio: int = 0
    num_mel_bins_for_audio: int = 0
    downsample_hidden_size_for_audio: int = 0
    output_dim_for_audio: int = 0
    n_window_for_audio: int = 0

    audio_vocab: int = hugging_face(0)
    audio_channels: tuple[int, ...] = hugging_face(())
    audio_heads: int = hugging_face(0)
    audio_kernel: int = hugging_face(0)
    audio_chunk: int = hugging_face(0)
    audio_context: int = hugging_face(0)
    audio_past: int = hugging_face(0)
    audio_future: int = hugging_face(0)
    audio_relative_positions: int = hugging_face(0)
    audio_reduction: int = hugging_face(1)


@field_group
class EncoderConfig(FieldGroup):
    """BERT, ViT, CLIP, T5, Whisper: an encoder, alone or in front of a decoder.

    Attributes:
        output_heads: ``mlm`` (transform and logits), ``pooler`` (the first token, ``[D, D]``),
            ``next_sentence``, ``classifier`` (one token per sequence), ``token_classifier``,
            ``logits`` (the decoder's), ``encoder`` (no decoder), ``none``.
        num_labels: classes of the classifiers.
        token_types: rows of the segment-type table.
        pooled_width: output width of the pooler.
        projection_width: width in which CLIP compares texts and images.
        num_encoder_layers, encoder_mlp_dim: sizes of an encoder with a decoder.
        position_buckets: rows of T5's relative-position table.
        positions_in_every_layer: whether not only the first layer has such a table (UMT5).
        audio_bins: mel bins of Whisper's input.
    """

    output_heads: tuple[str, ...] = hugging_face(())
    num_labels: int = hugging_face(0)
    token_types: int = hugging_face(0)
    pooled_width: int = hugging_face(0)
    projection_width: int = hugging_face(0)
    num_encoder_layers: int = hugging_face(0)
    encoder_mlp_dim: int = hugging_face(0)
    position_buckets: int = hugging_face(0)
    positions_in_every_layer: bool = hugging_face(False)
    audio_bins: int = hugging_face(0)
