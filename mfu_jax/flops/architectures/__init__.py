"""config → list of layers, one small function a family.

A family is registered under the `decoder_block` names that it serves:

    @architecture("llama2", "mistral")
    def dense_decoder(shape: ModelShape) -> Model: ...
"""

from __future__ import annotations

# Importing a module registers its families.
from mfu_jax.flops.architectures import dense as dense
from mfu_jax.flops.architectures import diffusion as diffusion
from mfu_jax.flops.architectures import gemma4 as gemma4
from mfu_jax.flops.architectures import hf_decoder as hf_decoder
from mfu_jax.flops.architectures import mixtures as mixtures
from mfu_jax.flops.architectures.registry import architecture as architecture
from mfu_jax.flops.architectures.registry import build as build
from mfu_jax.flops.architectures.registry import known_blocks as known_blocks
