"""cuDNN's fused attention as JAX calls it: what the mathematics needs, and the mask it is given."""

from __future__ import annotations

from typing import Any, NamedTuple

from mfu_jax.flops.traced.pairs import Band

FORWARD = ("dot_product_attention_fwd_wrapper", "dot_product_attention_fp8_fwd_wrapper")
BACKWARD = ("dot_product_attention_bwd_wrapper", "dot_product_attention_fp8_bwd_wrapper")


class FusedAttention(NamedTuple):
    """FLOPs over all pairs, the numbers of queries and keys, and the mask."""

    flops: int
    sizes: tuple[int, int]
    band: Band


def fused_attention(eqn: Any) -> FusedAttention:
    """Q·Kᵀ and P·V forward; dV, dP, dQ and dK backward (the scores that are done again are not).

    Queries are [B, T, N, H] or, in layout 1, [B, N, T, H]; keys and values alike.
    """
    q, _, v = (operand.aval.shape for operand in eqn.invars[:3])
    sequence, heads = (1, 2) if int(eqn.params["layout"]) == 0 else (2, 1)
    queries, keys = q[sequence], v[sequence]
    one_of_each = 2 * q[0] * q[heads] * queries * keys * (q[3] + v[3])
    passes = 1 if eqn.primitive.name in FORWARD else 2
    return FusedAttention(passes * one_of_each, (queries, keys), _band(eqn.params))


def _band(params: Any) -> Band:
    mask_type = params.get("mask_type")
    is_causal = params.get("use_causal_mask", False) or "CAUSAL" in getattr(mask_type, "name", "")
    window = params.get("sliding_window_length") or 0
    return Band(0 if is_causal else None, window - 1 if window else None)
