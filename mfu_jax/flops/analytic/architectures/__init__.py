"""config → list of layers, one small function a family.

A family is registered under the `decoder_block` names that it serves:

    @architecture("llama2", "mistral")
    def dense_decoder(shape: ModelShape) -> Model: ...
"""

from __future__ import annotations

# Importing a module registers its families.
from mfu_jax.flops.analytic.architectures import dense as dense
from mfu_jax.flops.analytic.architectures import diffusion as diffusion
from mfu_jax.flops.analytic.architectures import gemma4 as gemma4
from mfu_jax.flops.analytic.architectures import hf_decoder as hf_decoder
from mfu_jax.flops.analytic.architectures import mixtures as mixtures
from mfu_jax.flops.analytic.architectures.registry import architecture as architecture
from mfu_jax.flops.analytic.architectures.registry import build as build
from mfu_jax.flops.analytic.architectures.registry import known_blocks as known_blocks
