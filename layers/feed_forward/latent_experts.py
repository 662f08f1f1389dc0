"""Experts that work on a latent narrower than the residual stream."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import jax
from flax import nnx

from ..attention.multi_head import AttentionSpec
from ..building import Builder, Inputs
from .experts import ExpertsSpec


@dataclass(frozen=True, kw_only=True)
class LatentExpertsSpec:
    """Attention with a result of width `width`, experts of that width, a projection back."""

    attention: AttentionSpec
    experts: ExpertsSpec
    width: int
    scope: str = "latent"

    @property
    def needs(self) -> frozenset[str]:
        """What the part needs from the attention implementation."""
        return self.attention.needs

    def make(self, build: Builder) -> LatentExperts:
        """The weights of all three parts."""
        return LatentExperts(self, build)


class LatentExperts(nnx.Module):
    """``up(experts(norm(attention(x))))``."""

    def __init__(self, spec: LatentExpertsSpec, build: Builder) -> None:
        self.attention = spec.attention.make(build)
        self.norm = build.norm(spec.width)
        self.experts = spec.experts.make(dataclasses.replace(build, emb_dim=spec.width))
        self.up = build.dense((spec.width,), (build.emb_dim,), ("mlp", "embed"))

    def __call__(self, x: jax.Array, inputs: Inputs) -> jax.Array:
        """[batch, sequence, emb_dim] → the same."""
        with jax.named_scope("self_attention"):
            latent = self.attention(x, inputs)
        with jax.named_scope("moe"):
            latent = self.experts(self.norm(latent), inputs)
        with jax.named_scope("up_proj"):
            return self.up(latent)
