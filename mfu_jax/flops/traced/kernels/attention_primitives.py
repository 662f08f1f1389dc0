"""JAX's attention primitives: the FLOPs that the mathematics needs, and the mask in use."""

from __future__ import annotations

from typing import Any, NamedTuple

from mfu_jax.flops.attention_kernels import BY_PRIMITIVE, OF_VALUE_WIDTH, AttentionKernel
from mfu_jax.flops.traced.masks.pairs import Band


class FusedAttention(NamedTuple):
    """FLOPs over all pairs, the numbers of queries and keys, and the mask's band."""

    flops: int
    sizes: tuple[int, int]
    band: Band


def fused_attention(eqn: Any) -> FusedAttention:
    """2 · pairs · head width for each matmul that the model needs, excluding recomputed scores.

    Queries are [B, T, N, H], or [B, N, T, H] in layout 1; keys and values likewise.
    """
    kernel = BY_PRIMITIVE[eqn.primitive.name]
    if "config" in eqn.params:
        return _of_transformer_engine(eqn, kernel)
    q, _, v = (operand.aval.shape for operand in eqn.invars[:3])
    sequence, heads = (1, 2) if int(eqn.params["layout"]) == 0 else (2, 1)
    queries, keys = q[sequence], v[sequence]
    pairs = q[0] * q[heads] * queries * keys
    flops = 2 * pairs * _widths(kernel, q[3], v[3])
    return FusedAttention(flops, (queries, keys), _band(eqn.params, kernel))


def _widths(kernel: AttentionKernel, key: int, value: int) -> int:
    return sum(value if product in OF_VALUE_WIDTH else key for product in kernel.needed)


def _of_transformer_engine(eqn: Any, kernel: AttentionKernel) -> FusedAttention:
    """Q is [B, T, N, H], or QKV packed as [B, T, 3, N, H]; K and V may share [B, S, 2, K, H]."""
    config = eqn.params["config"]
    q, k, v = (operand.aval.shape for operand in eqn.invars[:3])
    if "3HD" in config.qkv_layout.name:
        k = v = q
    elif "2HD" in config.qkv_layout.name:
        v = k
    queries, keys = q[1], k[1]
    pairs = q[0] * q[-2] * queries * keys
    flops = 2 * pairs * _widths(kernel, q[-1], v[-1])
    return FusedAttention(flops, (queries, keys), _transformer_engine_band(config, queries, keys))


def _transformer_engine_band(config: Any, queries: int, keys: int) -> Band:
    mask = config.attn_mask_type.name
    shift = queries - keys if "BOTTOM_RIGHT" in mask else 0
    left, right = config.window_size
    if "CAUSAL" in mask:
        right = 0
    return Band(shift - right if right >= 0 else None, shift + left if left >= 0 else None)


def _band(params: Any, kernel: AttentionKernel) -> Band:
    mask_type = getattr(params.get(kernel.mask_type), "name", "")
    is_causal = params.get("use_causal_mask", False) or "CAUSAL" in mask_type
    window = params.get(kernel.window) or 0
    return Band(0 if is_causal else None, window - 1 if window else None)
