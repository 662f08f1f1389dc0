"""Attention by each platform's fused kernels; `ops` defines their signature."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from ..jax_internals import cudnn_causal_attention
from ..sharding import BATCH_AXES, SEQUENCE_AXIS, axis_size
from .ops import (
    CONTEXT,
    SINKS,
    SOFT_CAP,
    SPLIT,
    STAGED,
    VALUE_DIM,
    WINDOW,
    AttentionInputs,
    AttentionPattern,
    SplashBlocks,
    over_shards,
    register_attention,
    with_gathered_keys,
)

LANES = 128  # of a TPU's vector registers; the splash kernel's blocks are multiples of it


@register_attention("cudnn_flash", supports=(WINDOW, VALUE_DIM))
def cudnn_flash(x: AttentionInputs) -> jax.Array:
    """cuDNN's fused attention on NVIDIA (bfloat16 or float16).

    A mask doubles its time (scripts/results/gpu_kernels.json), so rows of one segment have none.
    JAX (to 0.12) cannot map one over the stages of a pipeline: it takes it for one of every head.
    """
    same_segment = None
    if x.packed or x.pattern.chunk:
        segments = _in_chunks(x.segment_ids, x.pattern)
        same_segment = (segments[:, :, None] == segments[:, None, :])[:, None]
    if x.v.shape[-1] != x.k.shape[-1]:
        return cudnn_causal_attention(
            x.q,
            x.k,
            x.v,
            mask=same_segment,
            scale=x.pattern.scale_of(x.q.shape[-1]),
            window=x.pattern.window or None,
        )
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


def _in_chunks(segment_ids: jax.Array, pattern: AttentionPattern) -> jax.Array:
    """Segments [B, S], split at every chunk border."""
    if not pattern.chunk:
        return segment_ids
    length = segment_ids.shape[1]
    chunks = -(-length // pattern.chunk)
    return segment_ids * chunks + jnp.arange(length, dtype=segment_ids.dtype) // pattern.chunk


@register_attention("splash", supports=(WINDOW, SOFT_CAP, SINKS, VALUE_DIM, SPLIT, STAGED))
def splash(x: AttentionInputs) -> jax.Array:
    """JAX's Pallas splash attention for TPU: skips blocks that are masked entirely.

    Where sequences are split, each device has the queries of its part, and gathers all keys.
    """
    parts = axis_size(SEQUENCE_AXIS)
    if parts == 1:
        return over_shards(_splash_of_rows, x)
    x = with_gathered_keys(x)
    _, S, N, _ = x.q.shape
    attend = _splash_kernel(x.pattern, S, N, head_shards=axis_size("tensor"), q_seq_shards=parts)
    mesh = jax.sharding.get_abstract_mesh()
    of_kernel = NamedSharding(mesh, PartitionSpec("tensor", SEQUENCE_AXIS))
    kernel = (attend.manual_sharding_spec(of_kernel), attend)
    segments = (PartitionSpec(BATCH_AXES, None), x.segment_ids)
    return over_shards(_splashed, x, kernel, segments, queries=SEQUENCE_AXIS)


def _splash_of_rows(x: AttentionInputs) -> jax.Array:
    _, S, N, _ = x.q.shape
    return _splashed(x, _splash_kernel(x.pattern, S, N), x.segment_ids)


def _splash_kernel(
    pattern: AttentionPattern, S: int, N: int, *, head_shards: int = 1, q_seq_shards: int = 1
) -> Any:
    """The kernel for rows of `S` tokens and `N` heads, both counted over all shards."""
    from jax.experimental.pallas.ops.tpu import splash_attention as kernel

    shape = (S, S)
    mask: Any = _by_blocks(kernel.CausalMask)(shape)
    if pattern.window:
        mask = _by_blocks(kernel.LocalMask)(shape, (pattern.window - 1, 0), 0)
    if pattern.chunk:
        mask = kernel.splash_attention_mask.ChunkedCausalMask(shape, pattern.chunk)
    return kernel.make_splash_mha(
        kernel.MultiHeadMask([mask] * N),
        head_shards=head_shards,
        q_seq_shards=q_seq_shards,
        block_sizes=_block_sizes(pattern.blocks, S // q_seq_shards, S),
        attn_logits_soft_cap=pattern.soft_cap or None,
        residual_checkpoint_name=CONTEXT,
    )


class _Uniform(np.ndarray):
    """A block of a mask with one value throughout."""

    def any(self, *_: Any, **__: Any) -> Any:
        return self.flat[0]

    all = any


@functools.cache
def _by_blocks(kind: Any) -> Any:
    """A kind of causal mask that compares the positions of one partly full block of a diagonal.

    JAX reads a mask block by block and compares every pair: a minute for 131,072 tokens.
    """

    class ByBlocks(kind):
        @functools.cached_property
        def partly_full(self) -> dict[tuple[int, ...], np.ndarray]:
            return {}

        def __getitem__(self, index: tuple[slice, slice]) -> np.ndarray:
            queries, keys = (range(n)[one] for n, one in zip(self.shape, index, strict=True))
            least, most = queries[0] - keys[-1], queries[-1] - keys[0]  # keys before a query
            window, _ = getattr(self, "window_size", (self.shape[1], 0))
            is_full, is_empty = least >= 0 and most <= window, most < 0 or least > window
            if is_full or is_empty:
                return _uniform(is_full, (len(queries), len(keys)))
            diagonal = queries[0] - keys[0], len(queries), len(keys)
            if diagonal not in self.partly_full:
                self.partly_full[diagonal] = super().__getitem__(index)
            return self.partly_full[diagonal]

    return ByBlocks


@functools.cache
def _uniform(value: bool, shape: tuple[int, int]) -> np.ndarray:
    return np.broadcast_to(np.bool_(value), shape).view(_Uniform)


def splash_of_part(pattern: AttentionPattern, heads: int, queries: int, keys: int) -> Any:
    """The kernel of a ring's turn, which returns the sums of its softmax, too, without a gradient.

    As many queries as keys are one device's own, and causal; of others all see all. The backward
    kernel is the fused one whatever `pattern` says: the kernels of MaxText's ring have no other.
    """
    from jax.experimental.pallas.ops.tpu import splash_attention as kernel

    class Full(kernel.FullMask):
        def __getitem__(self, index: tuple[slice, slice]) -> np.ndarray:
            sizes = (len(range(n)[one]) for n, one in zip(self.shape, index, strict=True))
            return _uniform(True, tuple(sizes))

    shape, is_own = (queries, keys), queries == keys
    mask = _by_blocks(kernel.CausalMask)(shape) if is_own else Full(shape)
    attend = kernel.make_splash_mha(
        kernel.MultiHeadMask([mask] * heads),
        head_shards=1,
        q_seq_shards=1,
        block_sizes=_block_sizes(dataclasses.replace(pattern.blocks, fused=True), queries, keys),
        attn_logits_soft_cap=pattern.soft_cap or None,
        save_residuals=True,
    )
    if not is_own:  # no table of blocks
        attend.fwd_mask_info = attend.dkv_mask_info = type(attend.fwd_mask_info)(*(None,) * 5)
    return attend


def _splashed(x: AttentionInputs, attend: Any, of_keys: jax.Array) -> jax.Array:
    """Runs the kernel; `of_keys`: segments of the keys, of which there may be more than queries."""
    from jax.experimental.pallas.ops.tpu import splash_attention as kernel

    scale = x.pattern.scale_of(x.q.shape[-1])
    q, k, v = (array.swapaxes(1, 2) for array in (x.q * scale, x.k, x.v))
    segments = kernel.SegmentIds(x.segment_ids, of_keys)
    if x.sinks is None:
        return jax.vmap(attend)(q, k, v, segments).swapaxes(1, 2)
    with_sinks = jax.vmap(attend, in_axes=(0, 0, 0, 0, None))
    return with_sinks(q, k, v, segments, x.sinks.astype(jnp.float32)).swapaxes(1, 2)


def _block_sizes(blocks: SplashBlocks, queries: int, keys: int) -> Any:
    """Blocks that divide the queries and keys of a row on one device, as the kernel requires."""
    from jax.experimental.pallas.ops.tpu import splash_attention as kernel

    kv, kv_dkv = _fitting(blocks.kv, keys), _fitting(blocks.kv_dkv, keys)
    of_queries: dict[str, Any] = {
        "block_q_dq": _fitting(blocks.q_dq, queries),
        "block_kv_dq": _fitting(blocks.kv_dq, keys),
    }
    return kernel.BlockSizes(
        block_q=_fitting(blocks.q, queries),
        block_kv=kv,
        block_kv_compute=_fitting(blocks.kv_compute, kv),
        block_q_dkv=_fitting(blocks.q_dkv, queries),
        block_kv_dkv=kv_dkv,
        block_kv_dkv_compute=_fitting(blocks.kv_dkv_compute, kv_dkv),
        use_fused_bwd_kernel=blocks.fused,
        **({} if blocks.fused else of_queries),
    )


def _fitting(block: int, length: int) -> int:
    """The largest block up to the wanted size that divides `length`."""
    wanted = min(block, length)
    sizes = range(wanted - wanted % LANES, 0, -LANES)
    fitting = (size for size in (wanted, *sizes) if length % size == 0)
    return next(fitting, wanted)  # else the kernel reports what it requires
