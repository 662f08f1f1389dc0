"""Manifold-constrained hyper-connections: several residual streams, mixed around each part."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import nnx

from ..building import Builder
from ..normalizations import scaled_to_one

# DeepSeek-V4's value.
_SINKHORN_ROUNDS = 20
_EPSILON = 1e-6


class HyperConnection(nnx.Module):
    """Reads one input from n streams, and writes back the output and the mixed streams."""

    def __init__(self, streams: int, build: Builder) -> None:
        n, width = streams, streams * build.emb_dim
        self.norm = build.norm(width)
        self.mix = build.dense((width,), (2 * n + n * n,), ("streams", "norm"))
        self.bias = build.vector((2 * n + n * n,), 0.0, ("norm",))
        self.scale = build.vector((3,), 1.0, ("norm",))
        self.streams = n

    def __call__(self, streams: jax.Array, branch: Callable[[jax.Array], jax.Array]) -> jax.Array:
        """[batch, sequence, n, emb_dim] → the same."""
        n = self.streams
        with jax.named_scope("hyper_connection"):
            mixes = self.mix(self.norm(streams.reshape(*streams.shape[:2], -1)))
            parts = jnp.split(mixes.astype(jnp.float32), [n, 2 * n], axis=-1)
            biases = jnp.split(self.bias[...].astype(jnp.float32), [n, 2 * n])
            read, write, keep = (
                part * scale + bias
                for part, scale, bias in zip(parts, self.scale[...], biases, strict=True)
            )
            keep = _doubly_stochastic(keep.reshape(*keep.shape[:-1], n, n)).astype(streams.dtype)
            read = (jax.nn.sigmoid(read) + _EPSILON).astype(streams.dtype)
            write = (2 * jax.nn.sigmoid(write)).astype(streams.dtype)
            x = jnp.einsum("bsn,bsnd->bsd", read, streams)
        y = branch(x)
        with jax.named_scope("hyper_connection"):
            return jnp.einsum("bsnm,bsnd->bsmd", keep, streams) + write[..., None] * y[:, :, None]


def _doubly_stochastic(logits: jax.Array) -> jax.Array:
    """[..., n, n] → rows and columns that sum to 1 (Sinkhorn and Knopp)."""
    weights = jax.nn.softmax(logits, axis=-1) + _EPSILON
    weights = weights / (weights.sum(-2, keepdims=True) + _EPSILON)

    def rows_then_columns(_: int, weights: jax.Array) -> jax.Array:
        weights = weights / (weights.sum(-1, keepdims=True) + _EPSILON)
        return weights / (weights.sum(-2, keepdims=True) + _EPSILON)

    # Unrolled, the rounds of a few layers take minutes to compile.
    return jax.lax.fori_loop(0, _SINKHORN_ROUNDS - 1, rows_then_columns, weights)


class HyperHead(nnx.Module):
    """Joins the streams after the last layer, with weights computed from all of them."""

    def __init__(self, streams: int, build: Builder) -> None:
        width = streams * build.emb_dim
        self.mix = build.dense((width,), (streams,), ("streams", "norm"))
        self.bias = build.vector((streams,), 0.0, ("norm",))
        self.scale = build.vector((1,), 1.0, ("norm",))
        self.epsilon = build.epsilon

    def __call__(self, streams: jax.Array) -> jax.Array:
        """[batch, sequence, n, emb_dim] → [batch, sequence, emb_dim]."""
        flat = scaled_to_one(streams.reshape(*streams.shape[:2], -1), self.epsilon)
        mixes = self.mix(flat).astype(jnp.float32) * self.scale[...] + self.bias[...]
        weights = (jax.nn.sigmoid(mixes) + _EPSILON).astype(streams.dtype)
        return (streams * weights[..., None]).sum(axis=2)
