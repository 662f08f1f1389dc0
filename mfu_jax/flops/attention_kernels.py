"""Fused attention kernels: the facts that the traced and the executed count both need.

To add a kernel, add a row to `KERNELS`. The row says how a jaxpr and HLO name the kernel and which
matmuls it runs; both counts then know which of them the model needs and which ones are recomputed.
A kernel that is not attention needs no row: a Pallas kernel is counted by its body, and the cost of
a custom call without one is registered with `mfu_jax.kernels.register_kernel`.

Its program for the tests is recorded by tests/support/program_kernels.py.
"""

from __future__ import annotations

import functools
import re
from collections import Counter
from dataclasses import dataclass
from fractions import Fraction
from typing import Literal

# S = Q·Kᵀ and O = P·V forward; dP = dO·Vᵀ, dV = Pᵀ·dO, dQ = dS·K and dK = dSᵀ·Q backward.
Product = Literal["S", "O", "dP", "dV", "dQ", "dK"]
# Products that contract or produce V's head width; the others use that of Q and K.
OF_VALUE_WIDTH = frozenset({"O", "dP", "dV"})


@dataclass(frozen=True, kw_only=True)
class AttentionKernel:
    """One attention kernel, forward or backward. Its operands begin with Q, K and V.

    Attributes:
        name: pattern to search for in its name as a Pallas kernel, in a jaxpr or in HLO. Two rows
            may share names if only one of them runs dQ.
        scope: pattern to search for in the names around a kernel that has no name of its own. Of
            several rows, the one with dK and dV has two results [keys, heads, width].
        operands: how many operands it has if its scope is a common word; then its first ones are
            [batch, positions, heads, width], and after Q, K and V come dO and two numbers per row.
        primitives: JAX primitives that call it.
        targets: its custom-call targets in HLO.
        products: the matmuls that it runs over all pairs of query and key.
        recomputed: those that another kernel, or the same one earlier, has already run.
        sequence_dim: dimension of Q and K that holds positions; None if a parameter names it.
        mask_type: parameter of the primitive, and key of the backend_config, that names the mask.
        window: the same for the number of keys that a query sees, itself included.
    """

    name: str = r"(?!)"  # matches nothing
    scope: str = r"(?!)"
    operands: int | None = None
    primitives: tuple[str, ...] = ()
    targets: tuple[str, ...] = ()
    products: tuple[Product, ...]
    recomputed: tuple[Product, ...] = ()
    sequence_dim: int | None = -2
    mask_type: str = ""
    window: str = ""

    @property
    def needed(self) -> tuple[Product, ...]:
        """The products that the model needs: all but the recomputed ones."""
        return tuple((Counter(self.products) - Counter(self.recomputed)).elements())

    @property
    def share_recomputed(self) -> Fraction:
        """The recomputed share of its FLOPs."""
        return Fraction(len(self.recomputed), len(self.products))


# With separate backward kernels, dP is counted in the one that computes dQ.
KERNELS = (
    AttentionKernel(
        name=r"^_?flash_attention_kernel|^splash_\w*_fwd",
        products=("S", "O"),
    ),
    AttentionKernel(
        name=r"^_?flash_attention_dkv_kernel$|flash_m[hq]a_(bwd_)?dkv",
        products=("S", "dP", "dV", "dK"),
        recomputed=("S", "dP"),
    ),
    AttentionKernel(
        name=r"^_?flash_attention_dq_kernel$|flash_m[hq]a_(bwd_)?dq|splash_\w*_dq",
        products=("S", "dP", "dQ"),
        recomputed=("S",),
    ),
    AttentionKernel(  # fused, under the same names as the next one
        name=r"splash_\w*_dkv",
        products=("S", "dP", "dV", "dK", "dQ"),
        recomputed=("S",),
    ),
    AttentionKernel(
        name=r"splash_\w*_dkv",
        products=("S", "dP", "dV", "dK"),
        recomputed=("S", "dP"),
    ),
    AttentionKernel(  # jax.experimental.pallas.ops.gpu.attention
        name=r"^mha_forward$|^pallas_flash_attention(_fwd_res)?$",  # the latter: tokamax
        products=("S", "O"),
        sequence_dim=-3,
    ),
    AttentionKernel(  # once for dK and dV, once for dQ
        name=r"^mha_backward$|^pallas_flash_attention_vjp$",
        products=("S", "dP", "dV", "dK", "S", "dP", "dQ"),
        recomputed=("S", "S", "dP"),
        sequence_dim=-3,
    ),
    AttentionKernel(  # tokamax on Hopper and Blackwell
        scope=r"\bPallasMosaicGpuFlashAttention\b",
        products=("S", "O"),
        sequence_dim=-3,
    ),
    AttentionKernel(
        scope=r"\bPallasMosaicGpuFlashAttentionVjp\b",
        products=("S", "dP", "dV", "dK"),
        recomputed=("S", "dP"),
        sequence_dim=-3,
    ),
    AttentionKernel(
        scope=r"\bPallasMosaicGpuFlashAttentionVjp\b",
        products=("S", "dP", "dQ"),
        recomputed=("S",),
        sequence_dim=-3,
    ),
    AttentionKernel(  # jax.experimental.pallas.ops.gpu.attention_mgpu, of Hopper
        scope=r"(^|/)(entry|fa3_kernel)(/(mpmd_map|core_map))?$",
        operands=3,
        products=("S", "O"),
        sequence_dim=-3,
    ),
    AttentionKernel(
        scope=r"(^|/)anonymous(/(mpmd_map|core_map))?$",
        operands=6,
        products=("S", "dP", "dV", "dK"),
        recomputed=("S", "dP"),
        sequence_dim=-3,
    ),
    AttentionKernel(
        scope=r"(^|/)anonymous(/(mpmd_map|core_map))?$",
        operands=6,
        products=("S", "dP", "dQ"),
        recomputed=("S",),
        sequence_dim=-3,
    ),
    AttentionKernel(
        primitives=("dot_product_attention_fwd_wrapper", "dot_product_attention_fp8_fwd_wrapper"),
        targets=(
            "__cudnn$fmhaSoftmax",
            "__cudnn$fmhaSoftmaxF8",
            "__cudnn$fmhaSoftmaxDropout",
            "__cudnn$fmhaScaleBiasSoftmax",
            "__cudnn$fmhaScaleBiasSoftmaxDropout",
        ),
        products=("S", "O"),
        sequence_dim=None,
        mask_type="mask_type",
        window="sliding_window_length",
    ),
    AttentionKernel(
        primitives=("dot_product_attention_bwd_wrapper", "dot_product_attention_fp8_bwd_wrapper"),
        targets=(
            "__cudnn$fmhaSoftmaxBackward",
            "__cudnn$fmhaSoftmaxBackwardF8",
            "__cudnn$fmhaSoftmaxDropoutBackward",
            "__cudnn$fmhaScaleBiasSoftmaxBackward",
            "__cudnn$fmhaScaleBiasSoftmaxDropoutBackward",
        ),
        products=("S", "dP", "dV", "dQ", "dK"),
        recomputed=("S",),
        sequence_dim=None,
        mask_type="mask_type",
        window="sliding_window_length",
    ),
    AttentionKernel(  # TransformerEngine: cuDNN's on NVIDIA, CK's on AMD
        primitives=("te_fused_attn_forward_ffi_wrapper",),
        targets=("te_fused_attn_forward_ffi",),
        products=("S", "O"),
        sequence_dim=None,
    ),
    AttentionKernel(
        primitives=("te_fused_attn_backward_ffi_wrapper",),
        targets=("te_fused_attn_backward_ffi",),
        products=("S", "dP", "dV", "dQ", "dK"),
        recomputed=("S",),
        sequence_dim=None,
    ),
)

BY_PRIMITIVE = {primitive: kernel for kernel in KERNELS for primitive in kernel.primitives}
BY_TARGET = {target: kernel for kernel in KERNELS for target in kernel.targets}


@functools.lru_cache(maxsize=1024)
def kernels_named(name: str) -> tuple[AttentionKernel, ...]:
    """The rows matching a Pallas kernel's name: several if only the body distinguishes them."""
    return tuple(kernel for kernel in KERNELS if re.search(kernel.name, name))


Dimensions = tuple[int, ...]


@functools.lru_cache(maxsize=1024)
def kernel_in_scope(
    scope: str, operands: tuple[Dimensions, ...], results: tuple[Dimensions, ...]
) -> AttentionKernel | None:
    """The row of a kernel without a name; None if it is not an attention kernel.

    Args:
        scope: the names around it.
        operands: dimensions of its operands.
        results: dimensions of its results.
    """
    fitting = [
        kernel
        for kernel in KERNELS
        if re.search(kernel.scope, scope)
        and kernel.operands in (None, len(operands))
        and (kernel.operands is None or _has_shapes_of_attention(operands, results))
    ]
    has_dk = len(results) == 2 and results[0][:-1] == results[1][:-1]
    chosen = [kernel for kernel in fitting if ("dK" in kernel.products) == has_dk]
    return (*chosen, *fitting, None)[0]


def _has_shapes_of_attention(
    operands: tuple[Dimensions, ...], results: tuple[Dimensions, ...]
) -> bool:
    """Whether operands are Q, K, V and, backward, dO and two numbers per head and query."""
    q, k, v, *rest = operands
    if not results or k != v or [len(q), len(k), len(results[0])] != [4, 4, 4]:
        return False
    batch, queries, heads, width = q
    shared = (k[0], heads % max(1, k[2]), k[3]) == (batch, 0, width)
    return shared and (not rest or rest == [q, *[(batch, heads, queries)] * 2])


# Splash attention's backward pass sums o · do with an einsum outside its kernels.
BESIDE_KERNELS = "jit(_splash_attention)/"
_ATTENTION = re.compile(r"attention|fmha|flash|splash|(?<![a-z])m[hq]a(?![a-z])", re.IGNORECASE)


def is_attention(name: str) -> bool:
    """Whether a kernel's name or target marks it as attention; it may have no row.

    >>> [is_attention(name) for name in ("my_flash_fwd", "mqa", "quantized_matmul")]
    [True, True, False]
    """
    return _ATTENTION.search(name) is not None
