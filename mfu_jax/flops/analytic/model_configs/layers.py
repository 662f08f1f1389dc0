"""Feed-forward and experts, how layers are stacked, and the tables below and above them."""

from __future__ import annotations

from mfu_jax.flops.analytic.model_configs.group import FieldGroup, field_group, hugging_face
from mfu_jax.flops.exact import Number

FULL, SLIDING, CHUNKED = "full_attention", "sliding_attention", "chunked_attention"
INDEXED, SHARED_INDEX, HYBRID = "indexed_attention", "shared_index_attention", "hybrid"
BLOCK_SPARSE, NGRAM_MEMORY, MESSAGES = "block_sparse_attention", "ngram_memory", "messages"
# Suffixes of kinds of indexed attention: keys without a rotary part; an earlier layer's latent.
NOPE, BORROWED = "_nope", "_borrowed"


@field_group
class FeedForwardConfig(FieldGroup):
    """The dense MLP.

    Attributes:
        use_bias: bias of the MLP and shared experts; in MaxText's families, also of attention.
        mlp_dims: hidden width of each layer's MLP, if they differ.
        activation_weights: learned scalars of the activation function.
    """

    mlp_dim: int = 0
    mlp_activations: tuple[str, ...] = ("silu", "linear")
    use_bias: bool = False
    use_double_wide_mlp: bool = False

    mlp_dims: tuple[int, ...] = hugging_face(())
    activation_weights: int = hugging_face(0)

    @property
    def gated(self) -> bool:
        """Whether the MLP has two input matrices: one activation each."""
        return len(self.mlp_activations) > 1


@field_group
class ExpertsConfig(FieldGroup):
    """Routed and shared experts, and which layers have them.

    Attributes:
        first_num_hash_layers: number of first layers that route by a hash of the token.
        routed_bias: bias of the router; `expert_bias`: of the routed experts.
        shared_expert_dim: hidden width of the shared expert, if it is not
            ``shared_experts · moe_mlp_dim``.
        latent_norms: norms before or after experts of the width `moe_expert_input_dim`.
        shared_expert_gate: a ``[D, 1]`` gate scales each shared expert.
        moe_beside_mlp: every layer has experts in addition to its MLP.
        idle_moe_mlp_dim: hidden width of as many routed experts that no token of text uses.
        router_rank: width of a router of four matrices; 0: it is one.
        zero_experts: further experts in the router, which compute nothing: FLOPs depend on the
            tokens; `zero_experts_per_tok`: how many of them a token is counted with.
    """

    num_experts: int = 1
    num_experts_per_tok: int = 1
    moe_mlp_dim: int = 0
    shared_experts: int = 0
    first_num_dense_layers: int = 0
    first_num_hash_layers: int = 0
    interleave_moe_layer_step: int = 1
    moe_expert_input_dim: int = 0
    capacity_factor: Number = 0
    routed_bias: bool = False

    expert_bias: bool = hugging_face(False)
    shared_expert_dim: int = hugging_face(0)
    shared_expert_gate: bool = hugging_face(False)
    latent_norms: int = hugging_face(0)
    moe_beside_mlp: bool = hugging_face(False)
    router_rank: int = hugging_face(0)
    zero_experts: int = hugging_face(0)
    zero_experts_per_tok: Number = hugging_face(0)
    idle_moe_mlp_dim: int = hugging_face(0)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require_at_most(
            "num_experts_per_tok", self.num_experts_per_tok, "num_experts", self.num_experts
        )


@field_group
class LayerStackConfig(FieldGroup):
    """What each layer consists of, its norms, and the streams between layers.

    Attributes:
        normalization: ``rmsnorm``, ``layernorm``, ``none`` (norms without weights) or ``auto``.
        mhc_expansion_rate: residual streams of manifold-constrained hyper-connections.
        stream_rank: rank of the weights of the streams (Qwen 4); 0: `stream_mixing` or neither.
        stream_mixing: whether the weights of the streams also mix them (from a config.json).
        mtp_num_layers: number of multi-token-prediction modules.
        layer_types: token mixer of each layer: ``full_attention``, ``sliding_attention``,
            ``chunked_attention``, ``indexed_attention`` (an indexer selects each query's keys),
            ``shared_index_attention`` (an earlier layer selects them), either with ``_nope`` (keys
            without a rotary part) and ``_borrowed`` (an earlier layer's latent),
            ``block_sparse_attention`` (it selects blocks of them),
            ``linear_attention`` (gated delta net), ``kimi_delta``, ``lightning_attention``,
            ``mamba``, ``mamba2``, ``conv`` (gated short convolution), ``recurrent`` (RG-LRU),
            ``rwkv``, ``ngram_memory``, ``messages``, ``none``; ``mamba2+full_attention``: both.
        feed_forward_types: feed-forward of each layer: ``dense``, ``moe``, ``rwkv`` or ``none``;
            ``dense+moe``: both.
        layer_passes: how often each layer runs, if not once (a looped model);
            `graded_passes`: how many of these a gradient flows through.
        message_rank: rank of the gates for the messages of a layer's previous pass.
        residual_sources: sum over all passes, layers and queries of the earlier outputs that a
            learned query chooses from (attention residuals).
        norms_per_layer: norms over the model width per layer; `norm_gate_rank`: rank of the gates
            after those before attention and experts.
        final_norm: whether a norm with weights follows the last layer.
        altup_inputs: streams of AltUp; 0: none.
        laurel_rank: rank of the low-rank residual; 0: none.
        shared_blocks: transformer blocks that ``hybrid`` layers cycle through (Zamba), with
            adapters of rank `shared_adapter_rank`, for attention if `shared_attention_adapters`.
        further_vectors: further weights of the whole model that no matmul reads, in addition to its
            norms and biases: norms inside a block, learned scales.
    """

    normalization: str = "auto"
    mhc_expansion_rate: int = 1
    mtp_num_layers: int = 0

    layer_types: tuple[str, ...] = hugging_face(())
    feed_forward_types: tuple[str, ...] = hugging_face(())
    stream_rank: int = hugging_face(0)
    stream_mixing: bool = hugging_face(False)
    layer_passes: tuple[int, ...] = hugging_face(())
    graded_passes: tuple[int, ...] = hugging_face(())
    message_rank: int = hugging_face(0)
    residual_sources: int = hugging_face(0)
    norms_per_layer: int = hugging_face(2)
    norm_gate_rank: int = hugging_face(0)
    final_norm: bool = hugging_face(True)
    altup_inputs: int = hugging_face(0)
    laurel_rank: int = hugging_face(0)
    shared_blocks: int = hugging_face(0)
    shared_adapter_rank: int = hugging_face(0)
    shared_attention_adapters: bool = hugging_face(False)
    further_vectors: int = hugging_face(0)


@field_group
class EmbeddingConfig(FieldGroup):
    """Tables of tokens and positions, per-layer inputs, and the output head.

    Attributes:
        token_width: width of the token table, if projections convert it to and from the model's.
        embedding_norm: whether a norm with weights follows the embedding.
        output_head: whether there are logits over the vocabulary; `head_bias`: with a bias;
            `head_transform`: after a matrix and a norm of their own.
    """

    logits_via_embedding: bool = False
    position_embedding: str = "auto"
    trainable_position_size: int = 0
    hidden_size_per_layer_input: int = 0
    vocab_size_per_layer_input: int = 0

    token_width: int = hugging_face(0)
    embedding_norm: bool = hugging_face(False)
    output_head: bool = hugging_face(True)
    head_bias: bool = hugging_face(False)
    head_transform: bool = hugging_face(False)


@field_group
class EngramConfig(FieldGroup):
    """n-gram memory in some layers.

    Attributes:
        ngram_rows: rows of all layers' tables, for ``ngram_memory`` in `layer_types`.
    """

    engram_layers: tuple[int, ...] = ()
    engram_num_heads: int = 0
    engram_head_dim: int = 0
    engram_max_ngram_size: int = 0
    engram_kernel_size: int = 0
    engram_vocab_bases: tuple[int, ...] = ()

    ngram_rows: int = hugging_face(0)
