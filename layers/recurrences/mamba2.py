"""Mamba-2 (arXiv 2405.21060): a state that decays by one scalar per head and token."""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from ..attention.ops import WHOLE
from ..building import Builder, Inputs
from .convolutions import short_convolution
from .delta_net import chunk_decays, from_chunks, in_chunks


@dataclass(frozen=True, kw_only=True)
class Mamba2Spec:
    """A state [inner / heads, state] for each head.

    Attributes:
        inner: channels of all heads together.
        groups: number of groups of heads that share B and C.
        kernel: tokens of the convolution before the recurrence.
        chunk: tokens computed at once.
    """

    inner: int
    heads: int
    groups: int
    state: int
    kernel: int
    chunk: int = 64
    scope: str = "mamba2"
    needs: frozenset[str] = frozenset({WHOLE})

    def make(self, build: Builder) -> Mamba2:
        """The layer's weights."""
        return Mamba2(self, build)


class Mamba2(nnx.Module):
    """Projection, convolution, the recurrence, a gated norm, the output projection."""

    def __init__(self, spec: Mamba2Spec, build: Builder) -> None:
        D, inner, H = build.emb_dim, spec.inner, spec.heads
        channels = inner + 2 * spec.groups * spec.state
        self.in_proj = build.dense((D,), (inner + channels + H,), ("embed", "mlp"))
        self.kernel = build.matrix((spec.kernel, channels), spec.kernel, ("conv", "mlp"))
        self.kernel_bias = build.vector((channels,), 0.0, ("mlp",))
        self.log_decay = build.vector((H,), 0.0, ("norm",))
        self.time_bias = build.vector((H,), 1.0, ("norm",))
        self.skip = build.vector((H,), 1.0, ("norm",))
        self.norm = build.norm(inner, "rmsnorm")
        self.out = build.dense((inner,), (D,), ("mlp", "embed"))
        self.spec = spec

    def __call__(self, x: jax.Array, inputs: Inputs) -> jax.Array:
        """[batch, sequence, emb_dim] → the same."""
        spec = self.spec
        B, S, _ = x.shape
        shared = spec.groups * spec.state
        with jax.named_scope("in_proj"):
            joined = checkpoint_name(self.in_proj(x), "qkv_proj")
        z, xbc, time = jnp.split(joined, [spec.inner, 2 * spec.inner + 2 * shared], axis=-1)
        xbc = short_convolution(xbc, self.kernel[...], inputs.segment_ids)
        xbc = jax.nn.silu(xbc + self.kernel_bias[...].astype(xbc.dtype))
        u, b, c = jnp.split(xbc, [spec.inner, spec.inner + shared], axis=-1)
        u = u.reshape(B, S, spec.heads, -1)
        b, c = (y.reshape(B, S, spec.groups, spec.state) for y in (b, c))
        time = jax.nn.softplus(time.astype(jnp.float32) + self.time_bias[...])
        log_decay = -jnp.exp(self.log_decay[...].astype(jnp.float32)) * time
        with jax.named_scope("core"):
            y = chunked_state_space(
                u * time[..., None].astype(u.dtype),
                b,
                c,
                log_decay,
                inputs.segment_ids,
                chunk=spec.chunk,
            )
        y = y.astype(x.dtype) + u * self.skip[...].astype(x.dtype)[:, None]
        y = self.norm(y.reshape(B, S, -1) * jax.nn.silu(z))
        with jax.named_scope("out"):
            return checkpoint_name(self.out(y), "out_proj")


def chunked_state_space(
    u: jax.Array,
    b: jax.Array,
    c: jax.Array,
    log_decay: jax.Array,
    segment_ids: jax.Array,
    *,
    chunk: int,
) -> jax.Array:
    """The state-space recurrence, a chunk at a time (arXiv 2405.21060, section 6).

    For each head, ``S ← exp(g)·S + u·bᵀ``, and the result is ``S·c``; a document starts from 0.

    Args:
        u: [B, S, H, p].
        b: [B, S, G, n], each for H / G heads; c alike.
        log_decay: g, [B, S, H].
        segment_ids: [B, S].
        chunk: tokens at once; an incomplete chunk is padded.

    Returns:
        [B, S, H, p] in float32.
    """
    B, length, H, p = u.shape
    G, n = b.shape[2:]
    between, from_start, to_end, across = chunk_decays(log_decay, segment_ids, chunk)
    u, b, c = (in_chunks(x, chunk) for x in (u, b, c))
    grouped = (*u.shape[:2], G, H // G)
    with jax.named_scope("overlaps"):
        overlaps = jnp.einsum("kbgcn,kbgdn->kbgcd", c, b)
    weights = overlaps[:, :, :, None] * between.reshape(*grouped, chunk, chunk)
    u = u.reshape(*grouped, chunk, p)
    with jax.named_scope("inside"):
        inside = jnp.einsum("kbghcd,kbghdp->kbghcp", weights, u)
    ending = u * to_end.reshape(*grouped, chunk, 1)
    reading = from_start.reshape(*grouped, chunk, 1)

    def one_chunk(state: jax.Array, step: tuple[jax.Array, ...]) -> tuple[jax.Array, jax.Array]:
        inside, ending, reading, b, c, across = step
        y = inside + jnp.einsum("bghpn,bgcn->bghcp", state, c) * reading
        return state * across + jnp.einsum("bghcp,bgcn->bghpn", ending, b), y

    steps = (inside, ending, reading, b, c, across.reshape(*grouped, 1, 1))
    y = jax.lax.scan(one_chunk, jnp.zeros((B, G, H // G, p, n), jnp.float32), steps)[1]
    return from_chunks(y.reshape(-1, B, H, chunk, p), length)
