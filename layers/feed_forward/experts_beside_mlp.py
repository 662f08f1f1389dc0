"""Experts beside a dense MLP, each between its own norms."""

from __future__ import annotations

from dataclasses import dataclass

import jax
from flax import nnx

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
