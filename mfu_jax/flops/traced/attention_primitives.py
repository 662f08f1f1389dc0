"""JAX's attention primitives: the FLOPs that the mathematics needs, and the mask they are given."""

from __future__ import annotations

from typing import Any, NamedTuple

from mfu_jax.flops.attention_kernels import BY_PRIMITIVE, OF_VALUE_WIDTH, AttentionKernel
from mfu_jax.flops.traced.masks.pairs import Band


class FusedAttention(NamedTuple):
    """FLOPs over all pairs, the numbers of queries and keys, and the mask."""

    flops: int
    sizes: tuple[int, int]
    band: Band


def fused_attention(eqn: Any) -> FusedAttention:
    """2 · pairs · head width for each matmul that the model needs, without recomputed scores.

    Queries are [B, T, N, H], or [B, N, T, H] in layout 1; keys and values alike.
    """
    kernel = BY_PRIMITIVE[eqn.primitive.name]
    q, _, v = (operand.aval.shape for operand in eqn.invars[:3])
    sequence, heads = (1, 2) if int(eqn.params["layout"]) == 0 else (2, 1)
    queries, keys = q[sequence], v[sequence]
    pairs = q[0] * q[heads] * queries * keys
    widths = sum(v[3] if product in OF_VALUE_WIDTH else q[3] for product in kernel.needed)
    return FusedAttention(2 * pairs * widths, (queries, keys), _band(eqn.params, kernel))


def _band(params: Any, kernel: AttentionKernel) -> Band:
    mask_type = getattr(params.get(kernel.mask_type), "name", "")
    is_causal = params.get("use_causal_mask", False) or "CAUSAL" in mask_type
    window = params.get(kernel.window) or 0
    return Band(0 if is_causal else None, window - 1 if window else None)
