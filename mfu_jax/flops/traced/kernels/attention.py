"""Attention in a jaxpr: JAX's fused primitives, and which Pallas kernels are attention."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

from mfu_jax.flops.attention_kernels import (
    BY_PRIMITIVE,
    OF_VALUE_WIDTH,
    AttentionKernel,
    kernel_in_scope,
    kernels_named,
)
from mfu_jax.flops.traced.jaxprs import first_array
from mfu_jax.flops.traced.masks.pairs import Band

_TPU_SEQUENCES = -2  # dimension of Q and K that holds positions: [..., heads, positions, width]


def attention_kernel(eqn: Any) -> AttentionKernel | None:
    """The registered kernel that a `pallas_call` runs; None if it is not an attention kernel."""
    kernels = kernels_named(pallas_name(eqn))
    if len(kernels) < 2:
        return kernels[0] if kernels else None
    # dK and dV come last; another result as large as Q is dQ, the rest is scratch space.
    query_size = max(v.aval.size for v in eqn.invars)
    has_dq = any(v.aval.size >= query_size for v in eqn.outvars[:-2])
    return next((kernel for kernel in kernels if ("dQ" in kernel.products) == has_dq), None)


def mesh_attention_kernel(eqn: Any, stack: str) -> AttentionKernel | None:
    """The same for a kernel on a mesh, which has no name of its own: from the scopes around it.

    None before JAX 0.10, where such a kernel has no operands and results of its own.
    """
    if len(eqn.invars) < 3:
        return None
    operands, results = (tuple(v.aval.shape for v in side) for side in (eqn.invars, eqn.outvars))
    return kernel_in_scope(stack, operands, results)


def sequence_sizes(eqn: Any, kernel: AttentionKernel) -> tuple[int, int]:
    """Numbers of queries and keys of a kernel.

    Splash attention may store Q, K and V transposed, [width, positions], but never its results.
    """
    q, k = (v.aval.shape for v in eqn.invars[first_array(eqn) :][:2])
    if kernel.sequence_dim != _TPU_SEQUENCES:
        assert kernel.sequence_dim is not None
        return q[kernel.sequence_dim], k[kernel.sequence_dim]
    results = eqn.outvars[-2:] if "dK" in kernel.products else eqn.outvars
    if "dK" in kernel.products:
        keys = _positions(k, results)
        return _other(q, _other(k, keys)), keys
    queries = _positions(q, results)
    return queries, _other(k, _other(q, queries))


def _positions(shape: Sequence[int], results: Sequence[Any]) -> int:
    """Of the last two dimensions, the one that some result has as its positions."""
    shapes = (v.aval.shape for v in results)
    found = {result[-2] for result in shapes if len(result) == len(shape)}
    *_, a, b = shape
    return b if b in found and a not in found else a


def _other(shape: Sequence[int], size: int) -> int:
    """Of the last two dimensions, the one that does not have this size."""
    *_, a, b = shape
    return b if a == size else a


def flops_of_all_pairs(eqn: Any, kernel: AttentionKernel) -> int:
    """FLOPs of an attention kernel's matmuls over every query-key pair."""
    q, _, v = (v.aval.shape for v in eqn.invars[first_array(eqn) :][:3])
    queries, keys = sequence_sizes(eqn, kernel)
    width, of_values = q[-1], v[-1]
    if kernel.sequence_dim == _TPU_SEQUENCES:
        width, of_values = _other(q, queries), _other(v, keys)
    widths = (of_values if product in OF_VALUE_WIDTH else width for product in kernel.products)
    return 2 * (math.prod(q) // width) * keys * sum(widths)


def pallas_name(eqn: Any) -> str:
    """The name of a `pallas_call` in HLO."""
    return str(eqn.params.get("name") or eqn.params["jaxpr"].debug_info.func_name)


class FusedAttention(NamedTuple):
    """FLOPs over all pairs, the numbers of queries and keys, and the mask's band."""

    flops: int
    sizes: tuple[int, int]
    band: Band


def fused_attention(eqn: Any) -> FusedAttention:
    """2 · pairs · head width for each matmul that the model needs, excluding recomputed scores.

    Queries are [B, T, N, H], or [B, N, T, H] in layout 1; keys and values likewise. Transformer
    Engine may pack QKV as [B, T, 3, N, H], or K and V as [B, S, 2, K, H].
    """
    kernel, params = BY_PRIMITIVE[eqn.primitive.name], eqn.params
    q, k, v = (operand.aval.shape for operand in eqn.invars[:3])
    if "config" in params:
        layout = params["config"].qkv_layout.name
        if "3HD" in layout:
            k = v = q
        elif "2HD" in layout:
            v = k
        queries, keys, heads = q[1], k[1], q[-2]
        band = _transformer_engine_band(params["config"], queries, keys)
    else:
        sequence = 1 if int(params["layout"]) == 0 else 2
        queries, keys, heads = q[sequence], v[sequence], q[3 - sequence]
        band = _band(params, kernel)
    widths = (v[-1] if product in OF_VALUE_WIDTH else q[-1] for product in kernel.needed)
    flops = 2 * q[0] * heads * queries * keys * sum(widths)
    return FusedAttention(flops, (queries, keys), band)


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
