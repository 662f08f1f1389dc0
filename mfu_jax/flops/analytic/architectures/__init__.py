"""config → list of layers, one small function a family.

A family is registered under the `decoder_block` names that it serves:

    @architecture("llama2", "mistral")
    def dense_decoder(shape: ModelShape) -> Model: ...
"""

from __future__ import annotations

# Importing a module registers its families: all of them stand here, so that which are known never
# depends on what else was imported.
from mfu_jax.flops.analytic.architectures import (
    dense,
    diffusion,
    gemma4,
    hf_decoder,
    hf_encoders,
    hf_gemma,
    mixtures,
)
from mfu_jax.flops.analytic.architectures.registry import architecture, build, known_blocks

__all__ = [
    "architecture",
    "build",
    "dense",
    "diffusion",
    "gemma4",
    "hf_decoder",
    "hf_encoders",
    "hf_gemma",
    "known_blocks",
    "mixtures",
]
