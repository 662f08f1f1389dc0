"""Causal attention over packed documents, by several implementations with one signature.

Each takes queries [B, S, N, h], keys and values [B, S, K, h] (N a multiple of K) and segment ids
[B, S] (tokens see each other only within a segment), and returns [B, S, N, h].
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from .sharding import BATCH_AXES

AttentionOp = Callable[[jax.Array, jax.Array, jax.Array, jax.Array], jax.Array]

ATTENTION_OPS: dict[str, AttentionOp] = {}

_PLATFORMS = {"cudnn_flash": "gpu", "flash": "tpu", "splash": "tpu"}


def register_attention(name: str) -> Callable[[AttentionOp], AttentionOp]:
    """Registers an implementation under the name that `attention=` takes."""

    def register(op: AttentionOp) -> AttentionOp:
        ATTENTION_OPS[name] = op
        return op

    return register


def choose_attention(name: str, *, platform: str, dtype: str) -> str:
    """The implementation to use; ``auto`` is the platform's fastest.

    Raises:
        ValueError: `name` is a kernel of another platform, or does not support the dtype.
    """
    platform = "gpu" if platform == "cuda" else platform
    needed = _PLATFORMS.get(name, platform)
    if needed != platform:
        raise ValueError(
            f"attention={name} runs on {needed} only, and this is {platform}; "
            "attention=auto takes the fastest that the platform has"
        )
    if name == "cudnn_flash" and dtype == "float32":
        raise ValueError(
            "attention=cudnn_flash needs dtype=bfloat16 or float16; with float32 use "
            "attention=dot_product"
        )
    if name != "auto":
        return name
    if platform == "tpu":
        return "splash"
    if platform == "gpu" and dtype != "float32":
        return "cudnn_flash"
    return "dot_product"


def _mask(segment_ids: jax.Array) -> jax.Array:
    """[B, S] → [B, S, S]: which keys a query sees."""
    sequence = segment_ids.shape[1]
    causal = jnp.tril(jnp.ones((sequence, sequence), bool))
    return causal & (segment_ids[:, :, None] == segment_ids[:, None, :])


@register_attention("dot_product")
def dot_product(q: jax.Array, k: jax.Array, v: jax.Array, segment_ids: jax.Array) -> jax.Array:
    """Two einsums and a softmax in float32; every pair of positions is computed, then masked."""
    B, S, N, h = q.shape
    K = k.shape[2]
    grouped = q.reshape(B, S, K, N // K, h) / math.sqrt(h)
    with jax.named_scope("scores"):
        scores = jnp.einsum("bskgh,btkh->bkgst", grouped, k).astype(jnp.float32)
    mask = _mask(segment_ids)[:, None, None]
    probabilities = jax.nn.softmax(jnp.where(mask, scores, -1e30), axis=-1).astype(q.dtype)
    with jax.named_scope("values"):
        return jnp.einsum("bkgst,btkh->bskgh", probabilities, v).reshape(B, S, N, h)


@register_attention("jax")
def jax_attention(q: jax.Array, k: jax.Array, v: jax.Array, segment_ids: jax.Array) -> jax.Array:
    """`jax.nn.dot_product_attention`, compiled by XLA."""
    mask = _mask(segment_ids)[:, None]
    return jax.nn.dot_product_attention(q, k, v, mask=mask, implementation="xla")


@register_attention("cudnn_flash")
def cudnn_flash(q: jax.Array, k: jax.Array, v: jax.Array, segment_ids: jax.Array) -> jax.Array:
    """cuDNN's fused attention on NVIDIA (bfloat16 or float16)."""
    same_segment = (segment_ids[:, :, None] == segment_ids[:, None, :])[:, None]
    return jax.nn.dot_product_attention(
        q, k, v, mask=same_segment, is_causal=True, implementation="cudnn"
    )


def _over_shards(op: AttentionOp) -> AttentionOp:
    """Runs a kernel that XLA cannot partition on the batch rows and heads of each device."""

    @functools.wraps(op)
    def run(q: jax.Array, k: jax.Array, v: jax.Array, segment_ids: jax.Array) -> jax.Array:
        if jax.sharding.get_abstract_mesh().empty:
            return op(q, k, v, segment_ids)
        heads = PartitionSpec(BATCH_AXES, None, "tensor", None)
        specs = (heads, heads, heads, PartitionSpec(BATCH_AXES, None))
        return jax.shard_map(op, in_specs=specs, out_specs=heads, check_vma=False)(
            q, k, v, segment_ids
        )

    return run


@register_attention("flash")
@_over_shards
def flash(q: jax.Array, k: jax.Array, v: jax.Array, segment_ids: jax.Array) -> jax.Array:
    """JAX's Pallas flash attention for TPU. Without grouped heads: keys and values are repeated."""
    from jax.experimental.pallas.ops.tpu import flash_attention as kernel

    group = q.shape[2] // k.shape[2]
    q, k, v = (x.swapaxes(1, 2) for x in (q, jnp.repeat(k, group, 2), jnp.repeat(v, group, 2)))
    segments = kernel.SegmentIds(segment_ids, segment_ids)
    scale = 1 / math.sqrt(q.shape[-1])
    out = kernel.flash_attention(q, k, v, segment_ids=segments, causal=True, sm_scale=scale)
    return out.swapaxes(1, 2)


@register_attention("splash")
@_over_shards
def splash(q: jax.Array, k: jax.Array, v: jax.Array, segment_ids: jax.Array) -> jax.Array:
    """JAX's Pallas splash attention for TPU: skips blocks that are masked entirely."""
    from jax.experimental.pallas.ops.tpu import splash_attention as kernel

    _, S, N, h = q.shape
    mask = kernel.MultiHeadMask([kernel.CausalMask((S, S)) for _ in range(N)])
    attend = kernel.make_splash_mha(mask, head_shards=1, q_seq_shards=1)
    q, k, v = (x.swapaxes(1, 2) for x in (q / math.sqrt(h), k, v))
    segments = kernel.SegmentIds(segment_ids, segment_ids)
    return jax.vmap(attend)(q, k, v, segments).swapaxes(1, 2)
