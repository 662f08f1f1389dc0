"""`HfDecoderShape`: the sizes of Hugging Face decoders, beyond those that `ModelShape` has."""

from __future__ import annotations

from dataclasses import dataclass

from mfu_jax.errors import UserError
from mfu_jax.flops.analytic.shapes.model import ModelShape

FULL, SLIDING, CHUNKED = "full_attention", "sliding_attention", "chunked_attention"


@dataclass(frozen=True, kw_only=True)
class HfDecoderShape(ModelShape):
    """A decoder whose layers differ in the way that a ``config.json`` says.

    Attributes:
        layer_types: token mixer of each layer: ``full_attention``, ``sliding_attention``,
            ``chunked_attention``, ``linear_attention`` (gated delta net), ``mamba`` (Mamba-1),
            ``mamba2``, ``conv`` (gated short convolution), ``mamba2+full_attention`` (in parallel).
        feed_forward_types: feed-forward of each layer: ``dense``, ``moe`` or ``none``.
        norms_per_layer: norms over the model width in a layer; 0: none has weights.
        final_norm, embedding_norm: whether a norm with weights stands there.
        attention_output_bias: bias of the attention's output projection (q, k, v:
            ``attention_bias``; MLP and shared experts: ``use_bias``).
        expert_bias: bias of the routed experts.
        output_head: whether there are logits over the vocabulary; head_bias: with a bias.
        qk_norm: weights of the norms on queries and keys: ``""`` none, ``head`` (``[h]`` each),
            ``all_heads`` (``[H·h]`` and ``[K·h]``).
        qk_norm_bias: whether these norms have a bias too.
        attention_sinks: one learned logit a head.
        attention_output_gate: queries come with a gate of their size.
        bidirectional: no causal mask.
        activation_weights: learned scalars of the activation function, for each MLP.
        token_width: width of the token table, where projections lead to and from the model width.
        shared_expert_dim: hidden width of the shared expert where it is not
            ``shared_experts · moe_mlp_dim``.
        shared_expert_gate: whether a ``[D, 1]`` gate scales the shared expert.
        mamba_*: sizes of the state-space layers. `mamba_rank` is the rank of Mamba-1's time step.
        conv_kernel, conv_bias: of the gated short convolution.
        vision_tower: ``siglip``, ``llama4``, ``qwen3_5``, ``gemma3n`` or ``gemma4``, with its sizes
            in the ``…_for_vit`` fields; `image_tokens` an image becomes; `vision_pooling_head`,
            SigLIP's own; `vision_output_dim`, what Llama 4's projector reads; gemma 3n's hard
            tokens (`vision_vocab`, `audio_vocab`); gemma 4's heads, and the side of the square of
            tokens that it averages (`vision_pooling`).
        audio_*: a conformer: channels of its convolutions, heads, width of the depthwise `kernel`;
            queries of a block (`chunk`) and keys that they are multiplied with (`context`), of
            which the mask keeps `past` and `future` ones; relative positions; how many of its
            tokens become one (`reduction`).
    """

    decoder_block: str = "hf_decoder"
    layer_types: tuple[str, ...] = ()
    feed_forward_types: tuple[str, ...] = ()
    norms_per_layer: int = 2
    final_norm: bool = True
    embedding_norm: bool = False
    attention_output_bias: bool = False
    expert_bias: bool = False
    output_head: bool = True
    head_bias: bool = False
    qk_norm: str = ""
    qk_norm_bias: bool = False
    attention_sinks: bool = False
    attention_output_gate: bool = False
    bidirectional: bool = False
    activation_weights: int = 0
    token_width: int = 0
    shared_expert_dim: int = 0
    shared_expert_gate: bool = False
    mamba_inner: int = 0
    mamba_heads: int = 0
    mamba_groups: int = 0
    mamba_state: int = 0
    mamba_kernel: int = 0
    mamba_rank: int = 0
    mamba_bias: bool = False
    mamba_output_bias: bool = False
    mamba_conv_bias: bool = False
    mamba_norm: bool = False
    conv_kernel: int = 0
    conv_bias: bool = False
    vision_tower: str = ""
    vision_pooling_head: bool = False
    vision_output_dim: int = 0
    vision_vocab: int = 0
    vision_heads: int = 0
    vision_kv_heads: int = 0
    vision_head_dim: int = 0
    vision_pooling: int = 0
    image_tokens: int = 0
    audio_vocab: int = 0
    audio_channels: tuple[int, ...] = ()
    audio_heads: int = 0
    audio_kernel: int = 0
    audio_chunk: int = 0
    audio_context: int = 0
    audio_past: int = 0
    audio_future: int = 0
    audio_relative_positions: int = 0
    audio_reduction: int = 1

    def kinds_of_layers(self) -> tuple[tuple[str, str], ...]:
        """Token mixer and feed-forward of each layer.

        Raises:
            UserError: one of the lists is shorter than the model.
        """
        layers = self.num_decoder_layers
        lists = (self.layer_types, self.feed_forward_types)
        for name, kinds in zip(("layer_types", "feed_forward_types"), lists, strict=True):
            if len(kinds) < layers:
                raise UserError(
                    f"num_decoder_layers={layers}, but {name} has {len(kinds)} entries; expected "
                    f"one for each layer; give {name} too"
                )
        return tuple(zip(*lists, strict=False))[:layers]
