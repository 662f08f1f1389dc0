"""Costs of cuDNN's custom calls: flash attention forward and backward, and convolutions."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from mfu_jax.flops.attention_kernels import BY_TARGET, OF_VALUE_WIDTH, AttentionKernel, Product
from mfu_jax.flops.count import Beyond
from mfu_jax.flops.executed.formulas.matmuls import (
    CUDNN_CONVOLUTIONS,
    convolution_flops_of,
    result_shape,
)
from mfu_jax.flops.executed.formulas.tiles import beyond_convolution, json_integers, pairs_in_blocks
from mfu_jax.flops.executed.kernels.registry import (
    KernelCall,
    KernelCost,
    UnknownCost,
    register_kernel,
)


def attention_pairs(queries: int, keys: int, left: int, right: int, shift: int = 0) -> int:
    """Pairs in which query i sees key j from ``i + shift − left`` to ``i + shift + right``.

    Args:
        queries: number of queries.
        keys: number of keys.
        left: the bound on earlier keys; −1 for none.
        right: the bound on later keys; −1 for none.
        shift: where the first query stands among the keys: cuDNN aligns both at the top left.

    >>> attention_pairs(4, 4, -1, 0), attention_pairs(4, 4, 1, 0), attention_pairs(2, 4, -1, 0, 2)
    (10, 7, 7)
    """

    def keys_before(first: int) -> int:
        """Keys before ``i + first``, of all queries: min(max(i + first, 0), keys) summed."""
        last = first + queries - 1
        return _sum_to(last) - _sum_to(first - 1) - _sum_to(last - keys) + _sum_to(first - 1 - keys)

    end = keys_before(shift + right + 1) if right >= 0 else queries * keys
    return end - (keys_before(shift - left) if left >= 0 else 0)


def _sum_to(n: int) -> int:
    """0 + 1 + … + n; 0 if n is negative."""
    return max(0, n) * (n + 1) // 2


@register_kernel(*(target for target in BY_TARGET if target.startswith("__cudnn$")))
def _attention(call: KernelCall) -> KernelCost | UnknownCost:
    """2 · pairs · head width for each of the kernel's matmuls."""
    kernel = BY_TARGET[call.target]
    pairs, in_blocks, note = _pairs(call, kernel)
    widths = _head_width(call, 1), _head_width(call, 2)
    cost = attention_cost(call, kernel, pairs, widths, note)
    whole = attention_cost(call, kernel, in_blocks, widths, note)
    return replace(cost, beyond=Beyond(assumed=whole.flops - cost.flops))


def attention_cost(
    call: KernelCall, kernel: AttentionKernel, pairs: int, widths: tuple[int, int], note: str
) -> KernelCost:
    """Cost of a kernel over pairs of query and key; `widths` are the head widths of K and V."""
    key, value = widths

    def flops(products: tuple[Product, ...]) -> int:
        return sum(2 * pairs * (value if p in OF_VALUE_WIDTH else key) for p in products)

    return KernelCost(
        flops=flops(kernel.products),
        rematerialized=flops(kernel.recomputed),
        dtype=call.operand(0).dtype,
        note=note,
    )


def note_on_lengths(call: KernelCall, queries: int, keys: int) -> str:
    """What is assumed where the lengths of sequences are data."""
    return (
        f"{call.target}: sequence lengths are data; counted as if every sequence were "
        f"{queries} × {keys} long"
    )


def _fmha_config(call: KernelCall) -> dict[str, Any]:
    config = call.config.get("cudnn_fmha_backend_config")
    if not isinstance(config, dict):
        raise call.instruction.error("attention call without cudnn_fmha_backend_config")
    return config


def _pairs(call: KernelCall, kernel: AttentionKernel) -> tuple[int, int, str]:
    """Pairs that the mask keeps in all heads of the batch, those of their blocks, and a note.

    The note says that lengths are data.
    """
    config = _fmha_config(call)
    scores = config.get("intermediate_tensor_shape")
    dims = json_integers(scores.get("dimensions") if isinstance(scores, dict) else None)
    if len(dims) != 4:
        raise call.instruction.error("attention scores that are not [batch, heads, query, key]")
    batch, heads, queries, keys = dims
    mask = str(config.get(kernel.mask_type, "NO_MASK"))
    window = config.get(kernel.window, 0)
    if not isinstance(window, int):
        raise call.instruction.error(f"{kernel.window} that is not a number")
    is_padded = "PADDING" in mask or config.get("max_seg_per_batch", 1) not in (0, 1)
    note = note_on_lengths(call, queries, keys) if is_padded else ""
    left, right = (window - 1 if window > 0 else -1, 0) if "CAUSAL" in mask else (-1, -1)
    pairs, in_blocks = (
        batch * heads * count(queries, keys, left, right)
        for count in (attention_pairs, pairs_in_blocks)
    )
    return pairs, in_blocks, note


def _head_width(call: KernelCall, operand: int) -> int:
    """The last dimension of ``[batch, sequence, heads, width]``."""
    shape = call.operand(operand)
    if len(shape.dims) != 4:
        raise call.instruction.error(f"attention operand {shape} that does not have 4 dimensions")
    return shape.dims[-1]


@register_kernel(*CUDNN_CONVOLUTIONS, "__cudnn$convForwardGraph")
def _convolution(call: KernelCall) -> KernelCost:
    arrays = (call.operand(0), call.operand(1), result_shape(call.instruction))
    roles = CUDNN_CONVOLUTIONS.get(call.target, (0, 1, 2))
    ordered = [arrays[i] for i in roles]
    flops = convolution_flops_of(call.instruction, ordered)
    kind = call.target.removeprefix("__cudnn$conv")
    beyond = beyond_convolution(call.instruction, kind, ordered, flops)
    return KernelCost(flops=flops, seen_by_xla=flops, beyond=beyond)
