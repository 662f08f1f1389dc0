"""Mixtures of experts: routed ones, dropless or of a fixed capacity, and a shared one."""

from __future__ import annotations

import math
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from .building import Builder, Inputs
from .feed_forwards import MlpSpec
from .linears import ACTIVATIONS
from .routers import RouterSpec, Routing


@dataclass(frozen=True, kw_only=True)
class ExpertsSpec:
    """Routed experts of hidden width `hidden`, and what every token passes beside them.

    Attributes:
        activation: of the gate.
        bias: of the experts' matrices.
        clamp: GPT-OSS: gate and input are limited to this, and the input has 1 added; 0: plain.
        capacity_factor: each expert takes this many times its even share of a sequence, and drops
            the tokens beyond; 0: none is dropped and nothing padded.
        weigh_inputs: weights scale what the experts read instead of what they return (Llama 4).
        shared: an MLP for every token; `shared_gate`: scaled by a sigmoid of the token.
    """

    router: RouterSpec
    hidden: int
    activation: str = "silu"
    bias: bool = False
    clamp: float = 0.0
    capacity_factor: float = 0.0
    weigh_inputs: bool = False
    shared: MlpSpec | None = None
    shared_gate: bool = False
    scope: str = "moe"
    needs: frozenset[str] = frozenset()

    def make(self, build: Builder) -> Experts:
        """The weights of router and experts."""
        return Experts(self, build)


class Experts(nnx.Module):
    """``Σ weight · expert(x)`` over the chosen experts, plus the shared expert."""

    def __init__(self, spec: ExpertsSpec, build: Builder) -> None:
        E, D, F = spec.router.experts, build.emb_dim, spec.hidden
        inwards, outwards = ("experts", "embed", "mlp"), ("experts", "mlp", "embed")
        self.router = spec.router.make(build)
        self.wi_0 = build.matrix((E, D, F), D, inwards)
        self.wi_1 = build.matrix((E, D, F), D, inwards)
        self.wo = build.matrix((E, F, D), F, outwards)
        if spec.bias:
            self.wi_0_bias = build.vector((E, F), 0.0, ("experts", "mlp"))
            self.wi_1_bias = build.vector((E, F), 0.0, ("experts", "mlp"))
            self.wo_bias = build.vector((E, D), 0.0, ("experts", "embed"))
        if spec.shared is not None:
            self.shared = spec.shared.make(build)
            if spec.shared_gate:
                self.shared_gate = build.dense((D,), (1,), ("embed", "norm"))
        self.spec = spec
        self.dtype = build.dtype

    def __call__(self, x: jax.Array, inputs: Inputs) -> jax.Array:
        """[batch, sequence, width] → the same."""
        with jax.named_scope("router"):
            routing = self.router(x, inputs)
        with jax.named_scope("experts"):
            y = self.routed(x, routing)
        if self.spec.shared is None:
            return y
        with jax.named_scope("shared"):
            return y + self._shared(x)

    def routed(self, x: jax.Array, routing: Routing) -> jax.Array:
        """The weighted sum of the chosen experts' outputs, [batch, sequence, width]."""
        if self.spec.capacity_factor:
            return self._with_capacity(x, routing)
        return self._dropless(x, routing)

    def _shared(self, x: jax.Array) -> jax.Array:
        y: jax.Array = self.shared(x)
        return y * jax.nn.sigmoid(self.shared_gate(x)) if self.spec.shared_gate else y

    def _dropless(self, x: jax.Array, routing: Routing) -> jax.Array:
        """Rows sorted by expert, multiplied group by group."""
        E, k = self.spec.router.experts, self.spec.router.per_token
        flat = x.reshape(-1, x.shape[-1])
        expert_of = routing.experts.reshape(-1)
        weight_of = routing.weights.reshape(-1, 1).astype(x.dtype)
        order = jnp.argsort(expert_of, stable=True)
        sizes = jnp.zeros(E, jnp.int32).at[expert_of].add(1)
        rows = flat[order // k]
        if self.spec.weigh_inputs:
            rows = rows * weight_of[order]
        sorted_experts = expert_of[order]

        def multiply(rows: jax.Array, kernel: nnx.Param, bias: str) -> jax.Array:
            product = jax.lax.ragged_dot(rows, kernel[...].astype(self.dtype), sizes)
            return product + self._bias(bias)[sorted_experts] if self.spec.bias else product

        with jax.named_scope("wi_0"):
            gate = checkpoint_name(multiply(rows, self.wi_0, "wi_0_bias"), "moe_mlpwi_0")
        with jax.named_scope("wi_1"):
            up = checkpoint_name(multiply(rows, self.wi_1, "wi_1_bias"), "moe_mlpwi_1")
        with jax.named_scope("wo"):
            out = multiply(self._activated(gate, up), self.wo, "wo_bias")
            out = checkpoint_name(out, "moe_mlpwo")
        back = out[jnp.argsort(order)]
        if not self.spec.weigh_inputs:
            back = back * weight_of
        return back.reshape(-1, k, x.shape[-1]).sum(axis=1).reshape(x.shape)

    def _with_capacity(self, x: jax.Array, routing: Routing) -> jax.Array:
        """Each expert has slots for its share of a sequence, filled in the sequence's order."""
        B, S, D = x.shape
        E, k = self.spec.router.experts, self.spec.router.per_token
        capacity = min(math.ceil(self.spec.capacity_factor * S * k / E), S * k)
        expert_of = routing.experts.reshape(B, S * k)
        weights = routing.weights.reshape(B, S * k, 1).astype(x.dtype)
        chosen = jax.nn.one_hot(expert_of, E, dtype=jnp.int32)
        place = jnp.take_along_axis(jnp.cumsum(chosen, axis=1), expert_of[..., None], -1)[..., 0]
        is_kept = place <= capacity
        slot = jnp.where(is_kept, expert_of * capacity + place - 1, E * capacity)
        rows = jnp.repeat(x, k, axis=1)
        if self.spec.weigh_inputs:
            rows = rows * weights
        batch = jnp.arange(B)[:, None]
        filled = jnp.zeros((B, E * capacity + 1, D), x.dtype).at[batch, slot].set(rows)
        slots = filled[:, :-1].reshape(B, E, capacity, D)

        def multiply(slots: jax.Array, kernel: nnx.Param, bias: str) -> jax.Array:
            product = jnp.einsum("becd,edf->becf", slots, kernel[...].astype(self.dtype))
            return product + self._bias(bias)[:, None] if self.spec.bias else product

        with jax.named_scope("wi_0"):
            gate = checkpoint_name(multiply(slots, self.wi_0, "wi_0_bias"), "moe_mlpwi_0")
        with jax.named_scope("wi_1"):
            up = checkpoint_name(multiply(slots, self.wi_1, "wi_1_bias"), "moe_mlpwi_1")
        with jax.named_scope("wo"):
            out = multiply(self._activated(gate, up), self.wo, "wo_bias")
            out = checkpoint_name(out, "moe_mlpwo")
        back = out.reshape(B, E * capacity, D)[batch, jnp.minimum(slot, E * capacity - 1)]
        back = jnp.where(is_kept[..., None], back, 0)
        if not self.spec.weigh_inputs:
            back = back * weights
        return back.reshape(B, S, k, D).sum(axis=2)

    def _bias(self, name: str) -> jax.Array:
        bias: jax.Array = getattr(self, name)[...]
        return bias.astype(self.dtype)

    def _activated(self, gate: jax.Array, up: jax.Array) -> jax.Array:
        if not self.spec.clamp:
            return ACTIVATIONS[self.spec.activation](gate) * up
        # GPT-OSS: a swish of slope 1.702, with both sides limited.
        gate = jnp.minimum(gate, self.spec.clamp)
        up = jnp.clip(up, -self.spec.clamp, self.spec.clamp)
        return gate * jax.nn.sigmoid(1.702 * gate) * (up + 1)


@dataclass(frozen=True, kw_only=True)
class ExpertsBesideMlpSpec:
    """Gemma 4: experts beside the dense MLP, each between norms of its own."""

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
