"""Token mixers: attention, latent and sparse attention, linear attention, state spaces."""

from __future__ import annotations

from typing import Literal

from mfu_jax.errors import UserError
from mfu_jax.flops.analytic.model_configs.group import FieldGroup, field_group, hugging_face
from mfu_jax.flops.exact import Number

AttentionType = Literal[
    "global", "local_sliding", "chunk", "mla", "full", "compressed", "block_diffusion"
]
"""MaxText's kinds; a mixed family's layers have masks of their own, whatever is given."""


@field_group
class AttentionConfig(FieldGroup):
    """Multi-head attention: heads, masks, and where a layer's keys and values come from.

    Attributes:
        attention_bias: bias of q, k and v; `attention_output_bias`: of the output projection.
        qk_norm: weights of the norms on queries and keys: ``""`` none, ``head`` (``[h]`` each),
            ``all_heads`` (``[H·h]`` and ``[K·h]``); `qk_norm_bias`: also a bias.
        attention_sinks: one learned logit per head.
        attention_output_gate: the query projection also produces a gate of the same size.
        attention_gate_width: width per head of a gate with its own projection.
        differential: the difference of two softmaxes weighs values of twice the width.
        value_head_dim: width of a value head, if it differs from `head_dim`.
        in_windows: fields of the config with the values that windowed layers have instead.
        bidirectional: no causal mask.
        relative_dim: width in which a query chooses among the learned biases of `relative_extent`
            distances.
        projected_sinks: the sinks come from the input; `projected_taps`: as do a convolution's.
        qk_kernels: of convolutions over queries and keys, per channel, then within heads (ZAYA).
    """

    num_query_heads: int = 0
    num_kv_heads: int = 0
    head_dim: int = 0
    attention_type: AttentionType = "global"
    attention_bias: bool = False
    use_qk_norm: bool = False
    sliding_window_size: int = 0
    sliding_window_pattern: int = 0
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

    attention_output_bias: bool = hugging_face(False)
    qk_norm: str = hugging_face("")
    qk_norm_bias: bool = hugging_face(False)
    attention_sinks: bool = hugging_face(False)
    attention_output_gate: bool = hugging_face(False)
    attention_gate_width: int = hugging_face(0)
    differential: bool = hugging_face(False)
    value_head_dim: int = hugging_face(0)
    in_windows: tuple[tuple[int | str, ...], ...] = hugging_face(())
    bidirectional: bool = hugging_face(False)
    relative_dim: int = hugging_face(0)
    relative_extent: int = hugging_face(0)
    projected_sinks: bool = hugging_face(False)
    projected_taps: bool = hugging_face(False)
    qk_kernels: tuple[int, ...] = hugging_face(())

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.num_kv_heads and self.num_query_heads % self.num_kv_heads:
            raise UserError(
                f"num_query_heads={self.num_query_heads} is not a multiple of "
                f"num_kv_heads={self.num_kv_heads}"
            )


@field_group
class LatentAttentionConfig(FieldGroup):
    """Ranks and head widths of multi-head latent attention (MLA).

    Attributes:
        gated_queries: the up-projection of the queries reads the latent before its norm, too, and
            also produces a gate as wide as the values (A.X-K2).
    """

    q_lora_rank: int = 0
    kv_lora_rank: int = 0
    qk_nope_head_dim: int = 0
    qk_rope_head_dim: int = 0
    v_head_dim: int = 0

    gated_queries: bool = hugging_face(False)


@field_group
class SparseAttentionConfig(FieldGroup):
    """DeepSeek's indexer, and V4's compressed keys and grouped outputs.

    Attributes:
        indexer_sparse_training: False with a loss means the indexer's warm-up, in which V3.2's
            queries attend to every key.
        index_share_pattern: for each layer F (its own indexer) or S (an earlier layer's).
        indexer_pool: tokens that one of the indexer's keys summarises; 0: each has its own.
    """

    use_indexer: bool = False
    indexer_n_heads: int = 0
    indexer_head_dim: int = 0
    indexer_topk: int = 0
    indexer_loss_scaling_factor: Number = 0
    indexer_sparse_training: bool = False
    use_index_share: bool = False
    index_share_pattern: str = ""
    indexer_pool: int = hugging_face(0)
    compress_ratios: tuple[int, ...] = ()
    o_groups: int = 0
    o_lora_rank: int = 0


@field_group
class LinearAttentionConfig(FieldGroup):
    """The gated delta net; Kimi's, whose decay differs per channel, only has value heads.

    Attributes:
        gdn_low_rank_gates: how many of Kimi's two gates, of decay and output, are products of two
            matrices, ``[D, h]`` and ``[h, H·h]``.
        scan_chunk_size: 0: the recurrence, which is the model's count; else a program that scans
            in chunks of this many tokens (including state-space layers).
    """

    gdn_num_key_heads: int = 0
    gdn_num_value_heads: int = 0
    gdn_key_head_dim: int = 0
    gdn_value_head_dim: int = 0
    gdn_conv_kernel_dim: int = 0
    gdn_low_rank_gates: int = hugging_face(0)
    scan_chunk_size: int = 0


@field_group
class StateSpaceConfig(FieldGroup):
    """Mamba layers, and LFM2's gated short convolution (`conv_kernel`, `conv_bias`).

    Attributes:
        recurrent_width: channels of a recurrence (RG-LRU, RWKV).
        mamba_rank: rank of Mamba-1's time step.
        mamba_norm: Mamba-1: norms over the time step, B and C; Mamba-2: a norm before the output.
    """

    mamba_inner: int = hugging_face(0)
    mamba_heads: int = hugging_face(0)
    mamba_groups: int = hugging_face(0)
    mamba_state: int = hugging_face(0)
    mamba_kernel: int = hugging_face(0)
    mamba_rank: int = hugging_face(0)
    mamba_bias: bool = hugging_face(False)
    mamba_output_bias: bool = hugging_face(False)
    mamba_conv_bias: bool = hugging_face(False)
    mamba_norm: bool = hugging_face(False)
    recurrent_width: int = hugging_face(0)
    conv_kernel: int = hugging_face(0)
    conv_bias: bool = hugging_face(False)
