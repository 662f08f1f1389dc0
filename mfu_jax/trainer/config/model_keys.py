"""The keys that describe a model, in MaxText's names, and those of its rematerialisation."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

RematPlace = Literal["remat", "device", "offload"]


@dataclass(frozen=True, kw_only=True)
class ModelKeys:
    """The model's part of a `Config`."""

    decoder_block: Literal[
        "default",
        "deepseek",
        "deepseek4",
        "envy",
        "gemma",
        "gemma2",
        "gemma3",
        "gemma4",
        "gemma4_small",
        "gpt2",
        "gpt3",
        "gpt_oss",
        "llama2",
        "llama4",
        "mistral",
        "mixtral",
        "olmo3",
        "qwen2",
        "qwen3",
        "qwen3_5",
        "qwen3_custom_moe",
        "qwen3_moe",
        "qwen3_next",
    ]
    vocab_size: int
    num_decoder_layers: int
    emb_dim: int
    mlp_dim: int
    mlp_activations: tuple[str, ...]
    normalization: Literal["rmsnorm", "layernorm", "auto"]
    position_embedding: Literal["rope", "learned", "auto"]
    trainable_position_size: int
    rope_max_timescale: int
    local_rope_max_timescale: int
    rope_type: Literal["default", "llama3.1", "yarn", "dynamic", "longrope"]
    rope_linear_scaling_factor: float
    rope_use_scale: bool
    rope_factor: float
    rope_short_factor: tuple[float, ...]
    rope_long_factor: tuple[float, ...]
    original_max_position_embeddings: int
    beta_fast: float
    beta_slow: float
    mscale: float
    rope_truncate: bool
    rope_attention_scaling: bool
    partial_rotary_factor: float
    normalization_layer_epsilon: float
    logits_via_embedding: bool
    final_logits_soft_cap: float
    use_bias: bool
    use_double_wide_mlp: bool

    num_query_heads: int
    num_kv_heads: int
    head_dim: int
    attention_type: Literal["global", "mla"]
    attention_bias: bool
    fused_qkv: bool
    use_qk_norm: bool
    query_pre_attn_scalar: float
    attn_logits_soft_cap: float
    sliding_window_size: int
    sliding_window_pattern: int
    chunk_attn_window_size: int
    nope_layer_interval: int
    inhomogeneous_layer_cycle_interval: int
    global_head_dim: int
    global_num_kv_heads: int
    share_kv_projections: bool
    num_kv_shared_layers: int
    attention_output_dim: int

    q_lora_rank: int
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    use_indexer: bool
    indexer_n_heads: int
    indexer_head_dim: int
    indexer_topk: int
    indexer_loss_scaling_factor: float
    indexer_sparse_training: bool
    compress_ratios: tuple[int, ...]
    o_groups: int
    o_lora_rank: int

    gdn_num_key_heads: int
    gdn_num_value_heads: int
    gdn_key_head_dim: int
    gdn_value_head_dim: int
    gdn_conv_kernel_dim: int
    gdn_chunk_size: int

    num_experts: int
    num_experts_per_tok: int
    moe_mlp_dim: int
    shared_experts: int
    first_num_dense_layers: int
    first_num_hash_layers: int
    interleave_moe_layer_step: int
    moe_expert_input_dim: int
    capacity_factor: float
    grouped_matmul: Literal["auto", "kernel", "xla"]
    norm_topk_prob: bool
    routed_score_func: Literal["auto", "softmax", "sigmoid"]
    routed_bias: bool
    routed_bias_update_rate: float
    routed_scaling_factor: float
    n_routing_groups: int
    topk_routing_group: int
    load_balance_loss_weight: float

    mtp_num_layers: int
    mtp_loss_scaling_factor: float
    mhc_expansion_rate: int
    hidden_size_per_layer_input: int
    vocab_size_per_layer_input: int
    engram_layers: tuple[int, ...]
    engram_num_heads: int
    engram_head_dim: int
    engram_max_ngram_size: int
    engram_kernel_size: int
    engram_vocab_bases: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class VisionKeys:
    """The vision tower, and the images of a sequence."""

    use_multimodal: bool
    images_per_sequence: int
    tiles_per_image: int
    freeze_vision_encoder_params: bool
    image_size_for_vit: int | tuple[int, ...]
    tile_size_for_vit: int
    patch_size_for_vit: int
    num_channels_for_vit: int
    hidden_size_for_vit: int
    intermediate_size_for_vit: int
    num_hidden_layers_for_vit: int
    num_attention_heads_for_vit: int
    num_position_embeddings_for_vit: int
    temporal_patch_size_for_vit: int
    spatial_merge_size_for_vit: int
    out_hidden_size_for_vit: int
    deepstack_visual_indexes_for_vit: tuple[int, ...]
    projector_input_dim_for_vit: int
    projector_output_dim_for_vit: int
    pixel_shuffle_ratio_for_vit: float


@dataclass(frozen=True, kw_only=True)
class RematKeys:
    """Which tensors of a layer are kept for the backward pass, and where."""

    remat_policy: Literal[
        "none",
        "minimal",
        "full",
        "minimal_with_context",
        "minimal_flash",
        "save_dot_with_context_except_mlp",
        "save_dot_except_mlpwi",
        "save_dot_except_mlp",
        "save_qkv_proj",
        "save_out_proj",
        "qkv_proj_offloaded",
        "minimal_offloaded",
        "names",
        "custom",
        "auto",
    ]
    remat_save_names: tuple[str, ...]
    decoder_layer_input: RematPlace
    context: RematPlace
    query_proj: RematPlace
    key_proj: RematPlace
    value_proj: RematPlace
    qkv_proj: RematPlace
    query_wa_proj: RematPlace
    kv_wa_proj: RematPlace
    out_proj: RematPlace
    mlpwi_0: RematPlace
    mlpwi_1: RematPlace
    mlpwo: RematPlace
    moe_mlpwi_0: RematPlace
    moe_mlpwi_1: RematPlace
    moe_mlpwo: RematPlace


@dataclass(frozen=True, kw_only=True)
class KernelKeys:
    """Blocks of the splash attention kernel."""

    sa_block_q: int
    sa_block_kv: int
    sa_block_kv_compute: int
    sa_block_q_dkv: int
    sa_block_kv_dkv: int
    sa_block_kv_dkv_compute: int
    sa_block_q_dq: int
    sa_block_kv_dq: int
    sa_use_fused_bwd_kernel: bool


@dataclass(frozen=True, kw_only=True)
class QuantizationKeys:
    """Matmuls in eight bits."""

    quantization: Literal["", "int8", "fp8", "fp8_e5m2", "fp8_full", "nanoo_fp8"]
    weight_quantization_calibration_method: str
    act_quantization_calibration_method: str
    bwd_quantization_calibration_method: str


@dataclass(frozen=True, kw_only=True)
class FinetuningKeys:
    """Which weights are trained."""

    frozen: tuple[str, ...]
    lora_rank: int
    lora_alpha: float
    lora_targets: tuple[str, ...]
    use_dpo: bool
    dpo_beta: float
    dpo_label_smoothing: float
