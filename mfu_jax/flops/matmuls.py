"""One formula a component.

Shapes: T tokens, S sequence length, D model width, H heads, K key/value heads, h head width, F hidden
width of the MLP, V vocabulary, E experts. An ``[m,k] @ [k,n]`` matmul is m·k·n multiply-adds.
"""

from __future__ import annotations

from mfu_jax.flops.components import Component
from mfu_jax.flops.masks import Mask


def projection(
    name: str,
    inputs: int,
    outputs: int,
    *,
    bias: bool = False,
    tokens: int | None = None,
    copies: int = 1,
) -> Component:
    """A dense layer, ``[T, inputs] @ [inputs, outputs]``, or `copies` of it side by side.

    Args:
        bias: whether it adds ``[outputs]`` weights, which cost no matmul FLOPs.
        tokens: positions of one sequence that pass through it; None: all.
    """
    return Component(
        name=name,
        macs=copies * inputs * outputs,
        tokens=tokens,
        parameters=copies * (inputs + bias) * outputs,
    )


def norm(name: str, width: int, *, bias: bool = False, copies: int = 1) -> Component:
    """The scale (and bias) of a norm: ``[width]`` weights, no matmul."""
    return Component(name=name, parameters=copies * width * (1 + bias))


def table(name: str, rows: int, width: int) -> Component:
    """A lookup table ``[rows, width]``: a gather, no matmul."""
    return Component(name=name, parameters=rows * width, table=True)


def head(vocab: int, width: int, *, tied: bool, bias: bool = False) -> Component:
    """The output head, ``[T, D] @ [D, V]``; tied: its weights are the embedding table."""
    return Component(
        name="logits",
        macs=vocab * width,
        parameters=(0 if tied else vocab * width) + bias * vocab,
        active_parameters=vocab * (width + bias),
        shared=tied,
    )


def attention_scores(
    heads: int, qk_dim: int, v_dim: int, mask: Mask, name: str = "scores"
) -> tuple[Component, ...]:
    """``Q·Kᵀ`` and ``P·V`` of one layer.

    Per head: ``[S, qk] @ [qk, S]`` and ``[S, S] @ [S, v]``; a masked pair costs nothing, so there
    are qk + v multiply-adds for each head and pair that the mask keeps. Grouped queries share
    keys, not the work: H is the number of query heads.
    """
    return (
        Component(name=f"{name}_qk", kind="attention", macs=heads * qk_dim, mask=mask),
        Component(name=f"{name}_pv", kind="attention", macs=heads * v_dim, mask=mask),
    )


def attention(
    width: int,
    heads: int,
    kv_heads: int,
    head_dim: int,
    mask: Mask,
    *,
    bias: bool = False,
    output_bias: bool | None = None,
    v_dim: int | None = None,
    output_width: int | None = None,
    output_gate: bool = False,
    shared_kv: bool = False,
    borrowed_kv: bool = False,
    qk_norm: bool = False,
    name: str = "attention",
) -> tuple[Component, ...]:
    """Multi-head attention: MHA (K = H), GQA, MQA (K = 1); fused projections cost the same.

    ``q [T,D]@[D,H·h]``, ``k, v [T,D]@[D,K·h]``, ``out [T,H·h]@[H·h,D]``, and the scores.

    Args:
        bias: of q, k and v; `output_bias` of the output (None: as `bias`).
        v_dim: width of a value head where it differs from `head_dim`.
        output_width: width that the output projects to, where it is not D.
        output_gate: the query projection also makes a gate of the output's size (qwen3-next).
        shared_kv: one projection makes keys and values (gemma4's global layers).
        borrowed_kv: keys and values come from an earlier layer.
        qk_norm: one ``[h]`` scale each for queries and keys.
    """
    v_dim = head_dim if v_dim is None else v_dim
    output_bias = bias if output_bias is None else output_bias
    parts = [
        projection(f"{name}/q_proj", width, (1 + output_gate) * heads * head_dim, bias=bias),
    ]
    if not borrowed_kv:
        parts.append(projection(f"{name}/k_proj", width, kv_heads * head_dim, bias=bias))
        if not shared_kv:
            parts.append(projection(f"{name}/v_proj", width, kv_heads * v_dim, bias=bias))
    if qk_norm:
        parts.append(norm(f"{name}/qk_norm", head_dim, copies=1 if borrowed_kv else 2))
    parts.extend(attention_scores(heads, head_dim, v_dim, mask, f"{name}/scores"))
    out = output_width or width
    parts.append(projection(f"{name}/o_proj", heads * v_dim, out, bias=output_bias))
    return tuple(parts)


def mlp(
    width: int, hidden: int, *, gated: bool, bias: bool = False, name: str = "mlp"
) -> tuple[Component, ...]:
    """Gated (``wi_0, wi_1 [D,F]``, ``wo [F,D]``) or plain (``wi [D,F]``, ``wo [F,D]``) MLP."""
    inputs = ("wi_0", "wi_1") if gated else ("wi",)
    return (
        *(projection(f"{name}/{part}", width, hidden, bias=bias) for part in inputs),
        projection(f"{name}/wo", hidden, width, bias=bias),
    )
