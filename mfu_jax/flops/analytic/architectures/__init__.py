"""Turns a config into a list of layers, with one small function per family.

A family is registered under the `decoder_block` names that it handles:

    @architecture("llama2", "mistral")
    def dense_decoder(config: ModelConfig) -> Model: ...

Adding one: its file is imported below; an entry of `FAMILIES` in
tests/flops/analytic/test_architectures_traced.py compares it with layers/families/.
"""

from __future__ import annotations

# Importing a module registers its families. All are imported here, so that the set of known
# families never depends on other imports.
from mfu_jax.flops.analytic.architectures import (
    deepseek,
    diffusion,
    encoders,
    gemma4,
    generic_decoder,
    mixtures,
    plain_decoders,
    zamba,
)
from mfu_jax.flops.analytic.architectures.registry import architecture, build, known_blocks

__all__ = [
    "architecture",
    "build",
    "deepseek",
    "diffusion",
    "encoders",
    "gemma4",
    "generic_decoder",
    "known_blocks",
    "mixtures",
    "plain_decoders",
    "zamba",
]
