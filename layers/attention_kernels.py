"""Attention by the fused kernels of each platform; `attention_ops` has their signature."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from .attention_ops import (
    CAUSAL,
    CHUNKS,
    SINKS,
    SOFT_CAP,
    VALUE_DIM,
    WINDOW,
    AttentionOp,
    Pattern,
    SplashBlocks,
    register_attention,
)
from .sharding import BATCH_AXES


@register_attention("cudnn_flash", supports=(WINDOW, CHUNKS))
def cudnn_flash(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    segment_ids: jax.Array,
    *,
    pattern: Pattern = CAUSAL,
    sinks: jax.Array | None = None,
    picked: jax.Array | None = None,
) -> jax.Array:
    """cuDNN's fused attention on NVIDIA (bfloat16 or float16)."""
    segments = _in_chunks(segment_ids, pattern)
    same_segment = (segments[:, :, None] == segments[:, None, :])[:, None]
    window = (pattern.window - 1, 0) if pattern.window else None
    return jax.nn.dot_product_attention(
        q,
        k,
        v,
        mask=same_segment,
        is_causal=True,
        scale=pattern.scale,
        local_window_size=window,
        implementation="cudnn",
    )


def _in_chunks(segment_ids: jax.Array, pattern: Pattern) -> jax.Array:
    """Segments [B, S] cut at every chunk."""
    if not pattern.chunk:
        return segment_ids
    length = segment_ids.shape[1]
    chunks = -(-length // pattern.chunk)
    return segment_ids * chunks + jnp.arange(length, dtype=segment_ids.dtype) // pattern.chunk


def _over_shards(op: AttentionOp) -> AttentionOp:
    """Runs a kernel that XLA cannot partition on the batch rows and heads of each device."""

    @functools.wraps(op)
    def run(
        q: jax.Array,
        k: jax.Array,
        v: jax.Array,
        segment_ids: jax.Array,
        *,
        pattern: Pattern = CAUSAL,
        sinks: jax.Array | None = None,
        picked: jax.Array | None = None,
    ) -> jax.Array:
        if jax.sharding.get_abstract_mesh().empty:
            return op(q, k, v, segment_ids, pattern=pattern, sinks=sinks)
        heads = PartitionSpec(BATCH_AXES, None, "tensor", None)
        specs = [heads, heads, heads, PartitionSpec(BATCH_AXES, None)]
        arrays = [q, k, v, segment_ids]
        if sinks is not None:
            specs.append(PartitionSpec("tensor"))
            arrays.append(sinks)

        def local(*arrays: jax.Array) -> jax.Array:
            q, k, v, segments, *rest = arrays
            return op(q, k, v, segments, pattern=pattern, sinks=rest[0] if rest else None)

        return jax.shard_map(local, in_specs=tuple(specs), out_specs=heads, check_vma=False)(
            *arrays
        )

    return run


@register_attention("flash", supports=(CHUNKS,))
@_over_shards
def flash(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    segment_ids: jax.Array,
    *,
    pattern: Pattern = CAUSAL,
    sinks: jax.Array | None = None,
    picked: jax.Array | None = None,
) -> jax.Array:
    """JAX's Pallas flash attention for TPU. Without grouped heads: keys and values are repeated."""
    from jax.experimental.pallas.ops.tpu import flash_attention as kernel

    group = q.shape[2] // k.shape[2]
    scale = pattern.scale_of(q.shape[-1])
    q, k, v = (x.swapaxes(1, 2) for x in (q, jnp.repeat(k, group, 2), jnp.repeat(v, group, 2)))
    segment_ids = _in_chunks(segment_ids, pattern)
    segments = kernel.SegmentIds(segment_ids, segment_ids)
    out = kernel.flash_attention(q, k, v, segment_ids=segments, causal=True, sm_scale=scale)
    return out.swapaxes(1, 2)


@register_attention("splash", supports=(WINDOW, CHUNKS, SOFT_CAP, SINKS, VALUE_DIM))
@_over_shards
def splash(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    segment_ids: jax.Array,
    *,
    pattern: Pattern = CAUSAL,
    sinks: jax.Array | None = None,
    picked: jax.Array | None = None,
) -> jax.Array:
    """JAX's Pallas splash attention for TPU: skips blocks that are masked entirely."""
    from jax.experimental.pallas.ops.tpu import splash_attention as kernel

    _, S, N, h = q.shape
    shape = (S, S)
    mask: Any = kernel.CausalMask(shape)
    if pattern.window:
        mask = kernel.LocalMask(shape, (pattern.window - 1, 0), 0)
    if pattern.chunk:
        mask = kernel.splash_attention_mask.ChunkedCausalMask(shape, pattern.chunk)
    attend = kernel.make_splash_mha(
        kernel.MultiHeadMask([mask] * N),
        head_shards=1,
        q_seq_shards=1,
        block_sizes=_block_sizes(pattern.blocks, S),
        attn_logits_soft_cap=pattern.soft_cap or None,
    )
    q, k, v = (x.swapaxes(1, 2) for x in (q * pattern.scale_of(h), k, v))
    segments = kernel.SegmentIds(segment_ids, segment_ids)
    if sinks is None:
        return jax.vmap(attend)(q, k, v, segments).swapaxes(1, 2)
    with_sinks = jax.vmap(attend, in_axes=(0, 0, 0, 0, None))
    return with_sinks(q, k, v, segments, sinks.astype(jnp.float32)).swapaxes(1, 2)


def _block_sizes(blocks: SplashBlocks, length: int) -> Any:
    from jax.experimental.pallas.ops.tpu import splash_attention as kernel

    def most(size: int) -> int:
        return min(size, length)

    of_queries: dict[str, Any] = {
        "block_q_dq": most(blocks.q_dq),
        "block_kv_dq": most(blocks.kv_dq),
    }
    return kernel.BlockSizes(
        block_q=most(blocks.q),
        block_kv=most(blocks.kv),
        block_kv_compute=most(blocks.kv_compute),
        block_q_dkv=most(blocks.q_dkv),
        block_kv_dkv=most(blocks.kv_dkv),
        block_kv_dkv_compute=most(blocks.kv_dkv_compute),
        use_fused_bwd_kernel=blocks.fused,
        **({} if blocks.fused else of_queries),
    )
