"""`ModelShape`: the sizes that FLOPs and parameters are counted from, in MaxText's names."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

from mfu_jax.errors import UserError, nearest
from mfu_jax.flops.analytic.shapes.fields import _SHORT, _checked, shown
from mfu_jax.flops.exact import Number, integral


@dataclass(frozen=True, kw_only=True)
class ModelShape:
    """One architecture and one step. Sizes that an architecture lacks are 0.

    A family with fields of its own subclasses this. MaxText writes -1 for some absent sizes; it is
    read as 0.
    """

    model_name: str = ""
    decoder_block: str = "llama2"
    vocab_size: int
    num_decoder_layers: int
    emb_dim: int
    num_query_heads: int = 0
    num_kv_heads: int = 0
    head_dim: int = 0
    mlp_dim: int = 0
    mlp_activations: tuple[str, ...] = ("silu", "linear")
    logits_via_embedding: bool = False

    # biases, norms and positions: weights, but no FLOPs
    attention_bias: bool = False
    use_bias: bool = False
    use_qk_norm: bool = False
    normalization: str = "auto"
    position_embedding: str = "auto"
    trainable_position_size: int = 0

    # attention
    attention_type: str = "global"
    sliding_window_size: int = 0
    chunk_attn_window_size: int = 0
    nope_layer_interval: int = 0
    inhomogeneous_layer_cycle_interval: int = 1
    share_kv_projections: bool = False
    global_head_dim: int = 0
    global_num_kv_heads: int = 0
    num_kv_shared_layers: int = 0
    attention_output_dim: int = 0
    causal_block_size: int = 0
    prefix_length: int = 0
    logits_positions: int = 0
    packed_document_lengths: tuple[int, ...] = ()
    packed_document_length: int = 0

    # latent, sparse and compressed attention
    q_lora_rank: int = 0
    kv_lora_rank: int = 0
    qk_nope_head_dim: int = 0
    qk_rope_head_dim: int = 0
    v_head_dim: int = 0
    use_indexer: bool = False
    indexer_n_heads: int = 0
    indexer_head_dim: int = 0
    indexer_topk: int = 0
    indexer_loss_scaling_factor: Number = 0
    compress_ratios: tuple[int, ...] = ()
    o_groups: int = 0
    o_lora_rank: int = 0
    first_num_hash_layers: int = 0

    # gated delta net
    gdn_num_key_heads: int = 0
    gdn_num_value_heads: int = 0
    gdn_key_head_dim: int = 0
    gdn_value_head_dim: int = 0
    gdn_conv_kernel_dim: int = 0
    scan_chunk_size: int = 0  # 0: the recurrence, which is the model's count; else a program's

    # mixture of experts
    num_experts: int = 1
    num_experts_per_tok: int = 1
    moe_mlp_dim: int = 0
    shared_experts: int = 0
    first_num_dense_layers: int = 0
    interleave_moe_layer_step: int = 1
    moe_expert_input_dim: int = 0
    capacity_factor: Number = 0
    routed_bias: bool = False

    # other parts
    use_double_wide_mlp: bool = False
    hidden_size_per_layer_input: int = 0
    vocab_size_per_layer_input: int = 0
    mhc_expansion_rate: int = 1
    engram_layers: tuple[int, ...] = ()
    engram_num_heads: int = 0
    engram_head_dim: int = 0
    engram_max_ngram_size: int = 0
    engram_kernel_size: int = 0
    engram_vocab_bases: tuple[int, ...] = ()
    mtp_num_layers: int = 0

    # what is trained
    use_dpo: bool = False
    frozen: tuple[str, ...] = ()
    lora_rank: int = 0
    lora_targets: tuple[str, ...] = ()
    freeze_vision_encoder_params: bool = True
    freeze_audio_encoder_params: bool = True

    # vision and audio towers; what a sequence holds is not in a model's config
    use_multimodal: bool = False
    images_per_sequence: int = 0
    tiles_per_image: int = 0
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
    use_audio: bool = False
    audio_frames_per_sequence: int = 0
    d_model_for_audio: int = 0
    encoder_layers_for_audio: int = 0
    encoder_ffn_dim_for_audio: int = 0
    num_mel_bins_for_audio: int = 0
    downsample_hidden_size_for_audio: int = 0
    output_dim_for_audio: int = 0
    n_window_for_audio: int = 0

    # the step
    per_device_batch_size: Number = 1
    max_target_length: int = 2048
    encoder_length: int = 0
    gradient_accumulation_steps: int = 1
    make_vocab_size_divisible_by: int = 0  # Megatron's padding, in its conventions only

    def __post_init__(self) -> None:
        for name, kind in _kinds(type(self)).items():
            given = getattr(self, name)
            checked = _checked(name, kind, given)
            if name in _POSITIVE and checked <= 0:
                raise UserError(f"{name}={shown(given)}: expected a positive number")
            object.__setattr__(self, name, checked)
        if self.num_decoder_layers > _MOST_LAYERS:
            raise UserError(
                f"num_decoder_layers={self.num_decoder_layers}: expected at most {_MOST_LAYERS}"
            )

        for small, large in _AT_MOST:
            if getattr(self, small) > getattr(self, large):
                raise UserError(
                    f"{small}={getattr(self, small)} contradicts {large}={getattr(self, large)}; "
                    f"expected at most as many"
                )
        if self.num_kv_heads and self.num_query_heads % self.num_kv_heads:
            raise UserError(
                f"num_query_heads={self.num_query_heads} is no multiple of "
                f"num_kv_heads={self.num_kv_heads}"
            )
        if sum(self.packed_document_lengths) > self.max_target_length:
            raise UserError(
                f"packed_document_lengths sum to {sum(self.packed_document_lengths)}; expected at "
                f"most max_target_length={self.max_target_length}"
            )

    @classmethod
    def from_mapping(cls, values: Mapping[str, Any]) -> Self:
        """A shape from a mapping; keys that are no field are errors.

        Raises:
            UserError: naming the field.
        """
        names = _kinds(cls)
        for key in values:
            if key not in names:
                raise UserError(f"unknown key {key!r}{nearest(key, names)}")
        return cls.made(values, "the config")

    @classmethod
    def made(cls, values: Mapping[str, Any], where: str) -> Self:
        """A shape from its fields' values.

        Raises:
            UserError: `where` lacks one that every model has, or a value is wrong.
        """
        if missing := [name for name in _REQUIRED if name not in values]:
            raise UserError(f"{where} has no {', '.join(missing)}; give it as key=value")
        return cls(**values)

    @classmethod
    def field_kinds(cls) -> dict[str, str]:
        """Field → its type, as written."""
        return _kinds(cls)

    @classmethod
    def field_names(cls) -> tuple[str, ...]:
        """Every field."""
        return tuple(_kinds(cls))

    @property
    def sequences_per_step(self) -> Number:
        """Sequences of one device in one optimizer step; DPO's pairs have two each."""
        rows = self.per_device_batch_size * (1 + self.use_dpo)
        return integral(rows * self.gradient_accumulation_steps)

    def replace(self, **changes: Any) -> Self:
        """A copy with some fields changed, checked again."""
        return dataclasses.replace(self, **changes)

    def require(self, *names: str) -> None:
        """Raises a `UserError` that lists the fields of `names` which are absent."""
        missing = [name for name in names if not getattr(self, name)]
        if missing:
            raise UserError(
                f"decoder_block={self.decoder_block!r} needs {', '.join(missing)}: absent or 0 in "
                f"the config; give it as key=value"
            )

    @property
    def gated_mlp(self) -> bool:
        """Whether the MLP has two input matrices: one activation each."""
        return len(self.mlp_activations) > 1


_REQUIRED = ("vocab_size", "num_decoder_layers", "emb_dim")
_POSITIVE = (
    *_REQUIRED,
    "per_device_batch_size",
    "max_target_length",
    "gradient_accumulation_steps",
)


_AT_MOST = (
    ("num_experts_per_tok", "num_experts"),
    ("first_num_dense_layers", "num_decoder_layers"),
    ("num_kv_shared_layers", "num_decoder_layers"),
)
# More is no model, and would be listed one by one.
_MOST_LAYERS = 100_000


_KINDS: dict[type, dict[str, str]] = {}


def _kinds(cls: type[ModelShape]) -> dict[str, str]:
    """Field → its annotation; annotations are text (postponed evaluation)."""
    if cls not in _KINDS:
        _KINDS[cls] = {field.name: str(field.type) for field in dataclasses.fields(cls)}
    return _KINDS[cls]


_SHORT.maxlevel = 2
