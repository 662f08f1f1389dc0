"""Experts as a part of something larger: beside a dense MLP, or on a narrower latent."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import jax
from flax import nnx

from ..attention.multi_head import AttentionSpec
from ..building import Builder, Inputs
from .experts import ExpertsSpec
from .mlp import MlpSpec


@dataclass(frozen=True, kw_only=True)
class ExpertsBesideMlpSpec:
    """Gemma 4: experts beside the dense MLP, each between its own norms."""

    experts: ExpertsSpec
    mlp: MlpSpec
    scope: str = "moe"
    needs: frozenset[str] = frozenset()

    def make(self, build: Builder) -> ExpertsBesideMlp:
        """The weights of both."""
        return ExpertsBesideMlp(self, build)


class ExpertsBesideMlp(nnx.Module):
    """``norm(mlp(norm(x))) + norm(experts(norm(x)))``; the router reads x itself."""

    def __init__(self, spec: ExpertsBesideMlpSpec, build: Builder) -> None:
        self.pre_mlp_norm, self.post_mlp_norm = build.norm(), build.norm()
        self.pre_experts_norm, self.post_experts_norm = build.norm(), build.norm()
        self.mlp = spec.mlp.make(build)
        self.experts = spec.experts.make(build)

    def __call__(self, x: jax.Array, inputs: Inputs) -> jax.Array:
        """[batch, sequence, emb_dim] → the same."""
        with jax.named_scope("shared"):
            dense = self.post_mlp_norm(self.mlp(self.pre_mlp_norm(x)))
        with jax.named_scope("router"):
            routing = self.experts.router(x, inputs)
        with jax.named_scope("experts"):
            routed = self.experts.routed(self.pre_experts_norm(x), routing)
        return dense + self.post_experts_norm(routed)


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
