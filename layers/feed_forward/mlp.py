"""The dense feed-forward as a part of a layer."""

from __future__ import annotations

from dataclasses import dataclass

from ..building import Builder
from ..projections.linears import Mlp


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
        return Mlp(build, self.hidden, self.activations, use_bias=self.bias)
