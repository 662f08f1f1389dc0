"""Costs of TransformerEngine's custom calls: fused attention, matmuls, and calls without any."""

from __future__ import annotations

import math
import re

from mfu_jax.flops.attention_kernels import BY_TARGET
from mfu_jax.flops.executed.kernels.cudnn import attention_cost, attention_pairs, note_on_lengths
from mfu_jax.flops.executed.kernels.registry import (
    KernelCall,
    KernelCost,
    UnknownCost,
    register_kernel,
)

# NVTE_Mask_Type of transformer_engine/fused_attn.h.
_CAUSAL, _FROM_BOTTOM_RIGHT, _PADDED = {2, 3, 4, 5}, {4, 5}, {1, 3, 5}
_INTEGER = re.compile(r"\b(\w+) = (-?\d+) : i64")
_WITHOUT_MATMULS = """
    te_act_lu_ffi te_dact_dbias_quantize_ffi te_dbias_quantize_ffi te_grouped_quantize_ffi
    te_grouped_quantize_v2_ffi te_norm_forward_ffi te_norm_backward_ffi te_topk_ffi
    te_scaled_softmax_forward_ffi te_scaled_softmax_backward_ffi
    te_scaled_masked_softmax_forward_ffi te_scaled_masked_softmax_backward_ffi
    te_scaled_upper_triang_masked_softmax_forward_ffi
    te_scaled_upper_triang_masked_softmax_backward_ffi
"""


@register_kernel(*(target for target in BY_TARGET if target.startswith("te_")))
def _attention(call: KernelCall) -> KernelCost:
    """2 · pairs · head width for each matmul; all sizes are attributes of the call."""
    sizes = _integers(call)
    try:
        queries, keys = sizes["q_max_seqlen"], sizes["kv_max_seqlen"]
        rows = sizes["input_batch"] * sizes["attn_heads"]
        mask = sizes["mask_type"]
        widths = sizes["qk_head_dim"], sizes["v_head_dim"]
    except KeyError as missing:
        raise call.instruction.error(f"attention call without {missing}") from None
    shift = keys - queries if mask in _FROM_BOTTOM_RIGHT else 0
    left, right = sizes.get("window_size_left", -1), sizes.get("window_size_right", -1)
    if mask in _CAUSAL:
        right = 0
    is_padded = mask in _PADDED or sizes.get("max_segments_per_seq", 1) > 1
    note = note_on_lengths(call, queries, keys) if is_padded else ""
    pairs = rows * attention_pairs(queries, keys, left, right, shift)
    return attention_cost(call, BY_TARGET[call.target], pairs, widths, note)


@register_kernel("te_gemm_v2_ffi", "te_gemm_ffi")
def _gemm(call: KernelCall) -> KernelCost | UnknownCost:
    """2·M·N·K for operands M·K, K·N and result M·N: the square root of their product is M·N·K."""
    left, right = call.operand(0), call.operand(2)  # the scales of each follow it
    if _integers(call).get("collective_op", 0):
        return UnknownCost(reason="it is a matmul and a collective in one", dtype=left.dtype)
    product = left.size * right.size * call.results[0].size
    volume = math.isqrt(product)
    if volume * volume != product:
        return UnknownCost(reason="its sizes are not those of one matmul", dtype=left.dtype)
    return KernelCost(flops=2 * volume, dtype=left.dtype)


def _integers(call: KernelCall) -> dict[str, int]:
    """Integer attributes of a typed call, by name."""
    text = call.instruction.attributes.get("backend_config", "")
    return {name: int(number) for name, number in _INTEGER.findall(text)}


@register_kernel(*_WITHOUT_MATMULS.split())
def _no_matmul(call: KernelCall) -> int:
    """Elementwise work and sums."""
    return 0
