"""Which experts each token goes to, and with which weights."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from ..building import Builder, Inputs
from ..normalizations import scaled_to_one


class Routing(NamedTuple):
    """A router's choice.

    Attributes:
        experts: numbers of the chosen experts, [batch, sequence, k].
        weights: factors of their outputs, [batch, sequence, k], in float32.
    """

    experts: jax.Array
    weights: jax.Array


@dataclass(frozen=True, kw_only=True)
class RouterSpec:
    """How tokens choose experts.

    Attributes:
        experts: their number; each token goes to `per_token` of them.
        score: ``softmax`` or ``sigmoid`` of the logits.
        normalize: whether the chosen scores are divided by their sum.
        scale: factor of the weights.
        bias: ``logits``: trained, added to the logits. ``choice``: added to the scores only for the
            choice, and adjusted against the load instead of trained (arXiv 2408.15664).
        groups: number of groups of experts, of which a token may use `top_groups`
            (arXiv 2412.19437); 0: no groups.
        hashed: the token's id chooses the experts, and the scores weigh them.
        scaled: the router reads the RMS-normalised token times trained scales, and each expert's
            weight has a trained scale (Gemma 4).
        balance_weight: weight of the load-balancing loss; 0: no such loss.
    """

    experts: int
    per_token: int
    score: str = "softmax"
    normalize: bool = True
    scale: float = 1.0
    bias: str = ""
    groups: int = 0
    top_groups: int = 0
    hashed: bool = False
    scaled: bool = False
    balance_weight: float = 0.0

    def make(self, build: Builder) -> Router:
        """The router's weights."""
        return Router(self, build)


class Router(nnx.Module):
    """Logits, scores, choice, weights."""

    def __init__(self, spec: RouterSpec, build: Builder) -> None:
        axes = ("embed", "experts_routed")
        self.gate = build.dense((build.emb_dim,), (spec.experts,), axes, bias=spec.bias == "logits")
        if spec.bias == "choice":
            self.choice_bias = build.vector((spec.experts,), 0.0, ("norm",))
        if spec.scaled:
            self.input_scale = build.vector((build.emb_dim,), 1.0, ("norm",))
            self.expert_scale = build.vector((spec.experts,), 1.0, ("norm",))
        self.spec = spec
        self.epsilon = build.epsilon

    def __call__(self, x: jax.Array, inputs: Inputs) -> Routing:
        """x: [batch, sequence, width]. Notes the experts' loads and the balance loss."""
        spec = self.spec
        if spec.scaled:
            x = scaled_to_one(x, self.epsilon) / math.sqrt(x.shape[-1])
            x = x * self.input_scale[...].astype(x.dtype)
        logits = self.gate(x).astype(jnp.float32)
        scores = jax.nn.sigmoid(logits) if spec.score == "sigmoid" else jax.nn.softmax(logits)
        if spec.hashed:
            chosen = _hashed(inputs.tokens, spec.experts, spec.per_token)
        else:
            chosen = self._chosen(scores)
        weights = jnp.take_along_axis(scores, chosen, axis=-1)
        if spec.normalize:
            weights = weights / (weights.sum(-1, keepdims=True) + 1e-20)
        weights = weights * spec.scale
        if spec.scaled:
            weights = weights * self.expert_scale[...].astype(jnp.float32)[chosen]
        self._note(scores, chosen, inputs)
        return Routing(chosen, weights)

    def _chosen(self, scores: jax.Array) -> jax.Array:
        """[batch, sequence, experts] → the allowed experts with the highest scores."""
        spec, wanted = self.spec, jax.lax.stop_gradient(scores)
        if spec.bias == "choice":
            wanted = wanted + jax.lax.stop_gradient(self.choice_bias[...]).astype(jnp.float32)
        if spec.groups > 1:
            least = jnp.finfo(wanted.dtype).min  # above what `highest` has taken
            wanted = jnp.where(self._open(wanted), wanted, least)
        return highest(wanted, spec.per_token)

    def _open(self, wanted: jax.Array) -> jax.Array:
        """Whether an expert's group is chosen: by its two best scores, or its best if softmax."""
        spec = self.spec
        grouped = wanted.reshape(*wanted.shape[:-1], spec.groups, -1)
        best = 2 if spec.score == "sigmoid" else 1
        first = highest(grouped, min(best, grouped.shape[-1]))
        of_group = jnp.take_along_axis(grouped, first, axis=-1).sum(-1)
        chosen = highest(of_group, spec.top_groups)
        is_open = (chosen[..., None] == jnp.arange(spec.groups)).any(-2)
        return jnp.repeat(is_open, grouped.shape[-1], axis=-1)

    def _note(self, scores: jax.Array, chosen: jax.Array, inputs: Inputs) -> None:
        spec = self.spec
        load = jnp.zeros(spec.experts, jnp.float32).at[chosen.reshape(-1)].add(1.0)
        if spec.bias == "choice":
            inputs.notes["expert_load"] = load
        if spec.balance_weight:
            # Switch Transformers (arXiv 2101.03961, equation 4): 1 if the load is even.
            share = load / chosen.size
            even = (share * scores.mean(axis=tuple(range(scores.ndim - 1)))).sum() * spec.experts
            inputs.notes["balance_loss"] = spec.balance_weight * even


def highest(scores: jax.Array, count: int) -> jax.Array:
    """Indices of the largest, first those, as `jax.lax.top_k`, which gathers a split batch."""
    chosen = []
    for _ in range(count):
        chosen.append(jnp.argmax(scores, axis=-1))
        is_taken = jnp.arange(scores.shape[-1]) == chosen[-1][..., None]
        scores = jnp.where(is_taken, -jnp.inf, scores)
    return jnp.stack(chosen, axis=-1)


def _hashed(tokens: jax.Array, experts: int, per_token: int) -> jax.Array:
    """[batch, sequence] → [batch, sequence, k]: neighbours on a ring, by a hash of the id."""
    # Knuth's multiplicative hash; its high bits are well mixed.
    first = (tokens.astype(jnp.uint32) * jnp.uint32(2654435761)) >> 16
    ring = first[..., None] + jnp.arange(per_token, dtype=jnp.uint32)
    return (ring % experts).astype(jnp.int32)


def moved_bias(bias: jax.Array, load: jax.Array, rate: float) -> jax.Array:
    """The choice bias after a step: up for experts below the mean load, down for those above.

    Auxiliary-loss-free load balancing (arXiv 2408.15664, algorithm 1).

    Args:
        bias: [..., experts].
        load: tokens that each expert got, [..., experts].
    """
    mean = load.mean(axis=-1, keepdims=True)
    return bias + (rate * jnp.sign(mean - load)).astype(bias.dtype)
