"""The dense feed-forward as a part of a layer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from ..building import Builder
from ..projections.linears import ACTIVATIONS


@dataclass(frozen=True, kw_only=True)
class MlpSpec:
    """An MLP of hidden width `hidden`, gated if it has two activations."""

    hidden: int
    activations: tuple[str, ...]
    bias: bool = False
    scope: str = "mlp"
    needs: frozenset[str] = frozenset()

    def make(self, build: Builder) -> Mlp:
        """The MLP's weights."""
        return Mlp(self, build)


class Mlp(nnx.Module):
    """Plain, ``wo(act(wi(x)))``, or gated, ``wo(act(wi_0(x)) · wi_1(x))`` (arXiv 2002.05202)."""

    def __init__(self, spec: MlpSpec, build: Builder) -> None:
        width, hidden, inwards = build.emb_dim, spec.hidden, ("embed", "mlp")
        self.activations = spec.activations
        first = "wi_0" if len(self.activations) > 1 else "wi"
        self.wi_0 = build.dense((width,), (hidden,), inwards, bias=spec.bias, name=first)
        if len(self.activations) > 1:
            self.wi_1 = build.dense((width,), (hidden,), inwards, bias=spec.bias, name="wi_1")
        outwards = ("mlp", "embed")
        self.wo = build.dense((hidden,), (width,), outwards, bias=spec.bias, name="wo")

    def __call__(self, x: jax.Array, inputs: Any = None) -> jax.Array:
        """[batch, sequence, emb_dim] → the same."""
        with jax.named_scope("wi_0"):
            hidden = checkpoint_name(self.wi_0(x), "mlpwi_0")
        hidden = ACTIVATIONS[self.activations[0]](hidden)
        if len(self.activations) > 1:
            with jax.named_scope("wi_1"):
                gate = checkpoint_name(self.wi_1(x), "mlpwi_1")
            hidden = hidden * ACTIVATIONS[self.activations[1]](gate)
        with jax.named_scope("wo"):
            return checkpoint_name(self.wo(hidden), "mlpwo")
