"""Gemma 2 and 3: norms before and after each block, windows in most layers."""

from __future__ import annotations

from mfu_jax.flops.architectures.hf_decoder import FULL, SLIDING, HfDecoderShape
from mfu_jax.flops.huggingface.common import decoder, every, layer_types
from mfu_jax.flops.huggingface.fields import Fields
from mfu_jax.flops.huggingface.registry import model_type


@model_type("gemma2")
def gemma2(c: Fields) -> HfDecoderShape:
    """A local and a global layer in turn."""
    return decoder(
        c,
        norms_per_layer=4,
        layer_types=layer_types(c, every(2, FULL, SLIDING)),
        bidirectional=c.get("use_bidirectional_attention") is True,
    )


@model_type("gemma3_text")
def gemma3_text(c: Fields) -> HfDecoderShape:
    """Five local layers, then a global one; norms on queries and keys."""
    interval = c.size("sliding_window_pattern", 6)
    both_ways = c.get("use_bidirectional_attention") is True
    window = c.optional_size("sliding_window")
    return decoder(
        c,
        norms_per_layer=4,
        qk_norm="head",
        layer_types=layer_types(c, every(interval, FULL, SLIDING)),
        bidirectional=both_ways,
        # The field holds the whole window, which then reaches half to each side.
        sliding_window_size=window // 2 + 1 if both_ways and window else window,
    )
