"""Token mixers without softmax, as PyTorch models implement them: linear attention, recurrences.

Shapes as in `formulas`. Elementwise recurrences (RWKV, RG-LRU) have no matmul of their own.
"""

from __future__ import annotations

from mfu_jax.flops.analytic.components import Cache, Component
from mfu_jax.flops.analytic.formulas import Components, norm, projection, short_convolution, vector


def lightning_attention(
    width: int, heads: int, head_dim: int, *, name: str = "lightning_attention"
) -> Components:
    """Linear attention with a decaying state ``[h, h]`` (MiniMax-01, arXiv 2501.08313).

    ``qkv [D, 3·H·h]``, a gate ``[D, H·h]``, ``out [H·h, D]``. The recurrence updates the state
    (k·vᵀ) and reads it (q·state): 2·h² multiply-adds per head and token.
    """
    joined = heads * head_dim
    return (
        projection(f"{name}/qkv_proj", width, 3 * joined),
        projection(f"{name}/gate_proj", width, joined),
        Component(
            name=f"{name}/core",
            kind="attention",
            macs=2 * joined * head_dim,
            cache=Cache(state=joined * head_dim),
        ),
        norm(f"{name}/norm", joined),
        projection(f"{name}/out_proj", joined, width),
    )


def kimi_delta_attention(
    width: int, heads: int, head_dim: int, *, kernel: int, low_rank: bool, name: str = "delta"
) -> Components:
    """Kimi delta attention (arXiv 2510.26692): a delta net whose decay differs per channel.

    ``q, k, v [D, H·h]`` and a depthwise convolution over them, ``b [D, H]``, the decay and the
    output gate ``[D, H·h]`` or, if low-rank, ``[D, h]`` and ``[h, H·h]``; ``out [H·h, D]``. The
    recurrence makes four passes over each head's state, like a gated delta net.
    """
    joined = heads * head_dim
    gates: Components = (projection(f"{name}/gate_proj", width, joined, copies=2),)
    if low_rank:
        gates = (
            projection(f"{name}/gate_proj", width, head_dim, copies=2),
            projection(f"{name}/gate_b", head_dim, joined, copies=2),
        )
    return (
        projection(f"{name}/in_proj", width, joined, copies=3),
        short_convolution(f"{name}/conv", kernel, 3 * joined),
        projection(f"{name}/in_proj_ba", width, heads),
        *gates,
        vector(f"{name}/decay", heads + joined),
        Component(
            name=f"{name}/core",
            kind="attention",
            macs=4 * joined * head_dim,
            cache=Cache(state=joined * head_dim),
        ),
        norm(f"{name}/norm", head_dim),
        projection(f"{name}/out_proj", joined, width),
    )


def gated_linear_recurrence(
    width: int, inner: int, heads: int, *, kernel: int, name: str = "recurrence"
) -> Components:
    """Griffin's recurrent block with an RG-LRU (arXiv 2402.19427), I channels in H blocks.

    Two branches ``[D, I]``, a depthwise convolution, two block-diagonal gates
    (``[I/H, I/H]`` for each of H blocks), ``out [I, D]``; the recurrence itself is elementwise.
    """
    block = inner // heads
    return (
        projection(f"{name}/in_proj", width, inner, bias=True, copies=2),
        short_convolution(f"{name}/conv", kernel, inner, bias=True),
        projection(f"{name}/gates", block, block, bias=True, copies=2 * heads),
        vector(f"{name}/decay", inner),
        projection(f"{name}/out_proj", inner, width, bias=True),
    )


def rwkv_time_mixing(width: int, inner: int, *, name: str = "time_mixing") -> Components:
    """RWKV-4's time mixing (arXiv 2305.13048): an elementwise recurrence between projections.

    Receptance, key and value ``[D, I]``, ``out [I, D]``; per channel a decay, a bonus and the
    share of the previous token that is mixed in.
    """
    return (
        projection(f"{name}/in_proj", width, inner, copies=3),
        vector(f"{name}/decay", 2 * inner),
        vector(f"{name}/shift", 3 * width),
        projection(f"{name}/out_proj", inner, width),
    )


def rwkv_channel_mixing(width: int, hidden: int, *, name: str = "channel_mixing") -> Components:
    """RWKV-4's feed-forward: key ``[D, F]``, value ``[F, D]``, receptance ``[D, D]``."""
    return (
        projection(f"{name}/wi", width, hidden),
        projection(f"{name}/receptance", width, width),
        vector(f"{name}/shift", 2 * width),
        projection(f"{name}/wo", hidden, width),
    )
