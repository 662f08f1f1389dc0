"""Attention by the fused kernels of each platform; `attention_ops` has their signature."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from .attention_ops import (
    CHUNKS,
    SINKS,
    SOFT_CAP,
    VALUE_DIM,
    WINDOW,
    AttentionInputs,
    AttentionOp,
    Pattern,
    SplashBlocks,
    register_attention,
)
from .sharding import BATCH_AXES


@register_attention("cudnn_flash", supports=(WINDOW, CHUNKS))
def cudnn_flash(x: AttentionInputs) -> jax.Array:
    """cuDNN's fused attention on NVIDIA (bfloat16 or float16)."""
    segments = _in_chunks(x.segment_ids, x.pattern)
    same_segment = (segments[:, :, None] == segments[:, None, :])[:, None]
    window = (x.pattern.window - 1, 0) if x.pattern.window else None
    return jax.nn.dot_product_attention(
        x.q,
        x.k,
        x.v,
        mask=same_segment,
        is_causal=True,
        scale=x.pattern.scale,
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
    def run(x: AttentionInputs) -> jax.Array:
        if jax.sharding.get_abstract_mesh().empty:
            return op(x)
        heads = PartitionSpec(BATCH_AXES, None, "tensor", None)
        specs = {"q": heads, "k": heads, "v": heads, "segment_ids": PartitionSpec(BATCH_AXES, None)}
        if x.sinks is not None:
            specs["sinks"] = PartitionSpec("tensor")

        def local(arrays: dict[str, jax.Array]) -> jax.Array:
            return op(dataclasses.replace(x, **arrays))  # type: ignore[arg-type]

        over_shards = jax.shard_map(local, in_specs=(specs,), out_specs=heads, check_vma=False)
        return over_shards({name: getattr(x, name) for name in specs})

    return run


@register_attention("flash", supports=(CHUNKS,))
@_over_shards
def flash(x: AttentionInputs) -> jax.Array:
    """JAX's Pallas flash attention for TPU. Without grouped heads: keys and values are repeated."""
    from jax.experimental.pallas.ops.tpu import flash_attention as kernel

    group = x.q.shape[2] // x.k.shape[2]
    scale = x.pattern.scale_of(x.q.shape[-1])
    repeated = (x.q, jnp.repeat(x.k, group, 2), jnp.repeat(x.v, group, 2))
    q, k, v = (array.swapaxes(1, 2) for array in repeated)
    segment_ids = _in_chunks(x.segment_ids, x.pattern)
    segments = kernel.SegmentIds(segment_ids, segment_ids)
    out = kernel.flash_attention(q, k, v, segment_ids=segments, causal=True, sm_scale=scale)
    return out.swapaxes(1, 2)


@register_attention("splash", supports=(WINDOW, CHUNKS, SOFT_CAP, SINKS, VALUE_DIM))
@_over_shards
def splash(x: AttentionInputs) -> jax.Array:
    """JAX's Pallas splash attention for TPU: skips blocks that are masked entirely."""
    from jax.experimental.pallas.ops.tpu import splash_attention as kernel

    pattern = x.pattern
    _, S, N, h = x.q.shape
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
    q, k, v = (array.swapaxes(1, 2) for array in (x.q * pattern.scale_of(h), x.k, x.v))
    segments = kernel.SegmentIds(x.segment_ids, x.segment_ids)
    if x.sinks is None:
        return jax.vmap(attend)(q, k, v, segments).swapaxes(1, 2)
    with_sinks = jax.vmap(attend, in_axes=(0, 0, 0, 0, None))
    return with_sinks(q, k, v, segments, x.sinks.astype(jnp.float32)).swapaxes(1, 2)


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
