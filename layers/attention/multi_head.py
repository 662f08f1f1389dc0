"""Multi-head, grouped-query and multi-query causal self-attention."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from ..building import Builder, Inputs
from ..normalizations import scaled_to_one
from ..sharding import BATCH_AXES, SEQUENCE_AXIS, axis_size, constrain
from .ops import CAUSAL, SINKS, AttentionInputs, AttentionPattern, attended
from .rope import Rope, apply_rope


@dataclass(frozen=True, kw_only=True)
class AttentionSpec:
    """MHA (arXiv 1706.03762, section 3.2), GQA (arXiv 2305.13245) or MQA (arXiv 1911.02150).

    Attributes:
        heads, kv_heads: query heads, and key/value heads; `kv_heads` divides `heads`.
        pattern: which keys a query sees.
        rope: rotary positions; None: no positions.
        rotary_dim: values of a head that are rotated; 0: all.
        bias: of queries, keys and values; `output_bias`: of the output projection.
        qk_norm: norms on queries and keys: ``head`` (over each head), ``all_heads`` (over all
            together), ``weightless`` (over each head, after the rotation); empty: none.
        value_norm: values are RMS-normalised, without weights.
        output_gate: queries come with a gate of the same size, which scales the heads' outputs.
        sinks: a learned logit for each query head takes its share of the softmax.
        shared_kv: keys double as values.
        keeps: the name under which this layer stores its keys and values for later layers.
        borrows: the name of stored keys and values to read instead of computing its own.
        temperature: (span, factor): queries at position p are scaled by
            1 + factor · ln(1 + ⌊(p + 1) / span⌋) (arXiv 2501.19399).
        output_width: of the result, if it differs from the residual stream's.
        fused: queries, keys and values, with equally many heads, are one product: over ``tensor``,
            activations and their gradients move once, not three times.
    """

    heads: int
    kv_heads: int
    head_dim: int
    pattern: AttentionPattern = CAUSAL
    rope: Rope | None = None
    rotary_dim: int = 0
    bias: bool = False
    output_bias: bool = False
    qk_norm: str = ""
    value_norm: bool = False
    output_gate: bool = False
    sinks: bool = False
    shared_kv: bool = False
    keeps: str = ""
    borrows: str = ""
    temperature: tuple[int, float] | None = None
    output_width: int = 0
    fused: bool = False
    scope: str = "self_attention"

    @property
    def needs(self) -> frozenset[str]:
        """What this layer needs from the attention implementation."""
        return self.pattern.needs | ({SINKS} if self.sinks else frozenset())

    def make(self, build: Builder) -> Attention:
        """The layer's weights."""
        return Attention(self, build)

    def replace(self, **changes: Any) -> AttentionSpec:
        """A copy with some attributes changed."""
        return dataclasses.replace(self, **changes)


class Attention(nnx.Module):
    """Projections, norms, rotary positions, masked attention, output projection."""

    def __init__(self, spec: AttentionSpec, build: Builder) -> None:
        q_axes, kv_axes = ("q_heads", "head_dim"), ("kv_heads", "head_dim")
        width, q_shape, kv_shape = (
            (build.emb_dim,),
            (spec.heads, spec.head_dim * (1 + spec.output_gate)),
            (spec.kv_heads, spec.head_dim),
        )
        axes = ("embed", *q_axes), ("embed", *kv_axes)
        if spec.fused:
            joined = ("embed", "qkv", *q_axes)
            self.qkv = build.dense(width, (3, *q_shape), joined, bias=spec.bias)
        else:
            self.query = build.dense(width, q_shape, axes[0], bias=spec.bias, name="q_proj")
        if not spec.borrows and not spec.fused:
            self.key = build.dense(width, kv_shape, axes[1], bias=spec.bias, name="k_proj")
            if not spec.shared_kv:
                self.value = build.dense(width, kv_shape, axes[1], bias=spec.bias, name="v_proj")
        if spec.qk_norm in ("head", "all_heads"):
            of_head = spec.qk_norm == "head"
            self.query_norm = build.norm(spec.head_dim * (1 if of_head else spec.heads))
            if not spec.borrows:
                self.key_norm = build.norm(spec.head_dim * (1 if of_head else spec.kv_heads))
        if spec.sinks:
            self.sinks = build.vector((spec.heads,), 0.0, ("q_heads",))
        self.out = build.dense(
            (spec.heads, spec.head_dim),
            (spec.output_width or build.emb_dim,),
            (*q_axes, "embed"),
            bias=spec.output_bias,
            name="o_proj",
        )
        self.spec = spec
        self.attention = build.attention
        self.packed = build.packed
        self.saves_rotated = build.saves_rotated and not spec.fused
        self.epsilon = build.epsilon

    def __call__(self, x: jax.Array, inputs: Inputs) -> jax.Array:
        """[batch, sequence, emb_dim] → the same, or the spec's `output_width`."""
        spec = self.spec
        made = self._fused(x) if spec.fused else {}
        q = self._heads(x, "query", made)
        gate = None
        if spec.output_gate:
            q, gate = jnp.split(q, 2, axis=-1)
        q = self._placed(self._normed(q, "query_norm"), inputs, "query")
        if spec.temperature is not None:
            q = q * _temperature(inputs.positions, *spec.temperature).astype(q.dtype)
        k, v = inputs.kept[spec.borrows] if spec.borrows else self._keys_and_values(x, inputs, made)
        if spec.keeps:
            inputs.kept[spec.keeps] = (k, v)
        with jax.named_scope("attention_op"):
            sinks = self.sinks[...] if spec.sinks else None
            of = AttentionInputs(
                q,
                k,
                v,
                inputs.segment_ids,
                pattern=spec.pattern,
                sinks=sinks,
                images=inputs.images,
                packed=self.packed,
            )
            context = attended(self.attention, of)
        if gate is not None:
            context = context * jax.nn.sigmoid(gate)
        with jax.named_scope("out"):
            return checkpoint_name(self.out(context), "out_proj")

    def _heads(self, x: jax.Array, name: str, made: Mapping[str, jax.Array]) -> jax.Array:
        """Queries, keys or values [batch, sequence, heads, head_dim], saved under their name."""
        if made:
            return made[name]
        with jax.named_scope(name):
            heads: jax.Array = getattr(self, name)(x)
            is_rotated = self.saves_rotated and name != "value"
            return heads if is_rotated else _saved(heads, f"{name}_proj")

    def _fused(self, x: jax.Array) -> dict[str, jax.Array]:
        """Queries, keys and values from one product, by name."""
        with jax.named_scope("qkv_proj"):
            joined = checkpoint_name(self.qkv(x), "qkv_proj")
            if axis_size(SEQUENCE_AXIS) > 1:
                joined = constrain(joined, BATCH_AXES, SEQUENCE_AXIS, None, "tensor", None)
            return {name: joined[:, :, i] for i, name in enumerate(("query", "key", "value"))}

    def _keys_and_values(
        self, x: jax.Array, inputs: Inputs, made: Mapping[str, jax.Array]
    ) -> tuple[jax.Array, jax.Array]:
        """This layer's own keys and values; `made` has them if they are fused."""
        k = self._heads(x, "key", made)
        v = k if self.spec.shared_kv else self._heads(x, "value", made)
        if self.spec.value_norm:
            v = scaled_to_one(v, self.epsilon)
        return self._placed(self._normed(k, "key_norm"), inputs, "key"), v

    def _normed(self, x: jax.Array, name: str) -> jax.Array:
        """Queries or keys [batch, sequence, heads, head_dim] after their weighted norm."""
        if self.spec.qk_norm not in ("head", "all_heads"):
            return x
        with jax.named_scope(name):
            joined = x if self.spec.qk_norm == "head" else x.reshape(*x.shape[:2], -1)
            normed: jax.Array = getattr(self, name)(joined)
            return normed.reshape(x.shape)

    def _placed(self, x: jax.Array, inputs: Inputs, name: str) -> jax.Array:
        """Queries or keys, rotated by position."""
        spec = self.spec
        if spec.rope is not None:
            positions = inputs.grid if spec.rope.sections else inputs.positions
            assert positions is not None  # the decoder sets both for a model with images
            with jax.named_scope("rope"):
                x = apply_rope(x, positions, spec.rope, rotary_dim=spec.rotary_dim)
        if spec.qk_norm == "weightless":
            x = scaled_to_one(x, self.epsilon)
        return _saved(x, f"{name}_proj") if self.saves_rotated else x


def _saved(x: jax.Array, name: str) -> jax.Array:
    """Heads [batch, sequence, heads, head_dim] under a name for remat.

    Where sequences are split, the saved tensor is, too: attention gathers keys and values, and XLA
    would save them whole. It is pinned after the name, where JAX inserts an operation of its own.
    """
    named: jax.Array = checkpoint_name(x, name)
    if axis_size(SEQUENCE_AXIS) == 1:
        return named
    return constrain(named, BATCH_AXES, SEQUENCE_AXIS, "tensor", None)


def _temperature(positions: jax.Array, span: int, factor: float) -> jax.Array:
    """[batch, sequence] → [batch, sequence, 1, 1]."""
    spans = jnp.floor((positions.astype(jnp.float32) + 1) / span)
    return (1 + factor * jnp.log1p(spans))[..., None, None]
