"""Sizes of Gemma's decoders as Hugging Face has them."""

from __future__ import annotations

from dataclasses import dataclass

from mfu_jax.flops.analytic.shapes.hf_decoder import HfDecoderShape


@dataclass(frozen=True, kw_only=True)
class HfGemmaShape(HfDecoderShape):
    """Gemma 3n and 4: per-layer inputs, shared keys and values, AltUp.

    Attributes:
        mlp_dims: hidden width of each layer's MLP, where they differ.
        moe_beside_mlp: whether experts stand beside every MLP.
        altup_inputs: streams of AltUp; 0: none.
        laurel_rank: rank of the low-rank residual; 0: none.
    """

    decoder_block: str = "hf_gemma"
    mlp_dims: tuple[int, ...] = ()
    moe_beside_mlp: bool = False
    altup_inputs: int = 0
    laurel_rank: int = 0
