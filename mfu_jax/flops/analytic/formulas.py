"""One formula per component.

Shapes: T tokens, S sequence length, D model width, H heads, K key/value heads, h head width,
F hidden width of the MLP, V vocabulary, E experts. An ``[m,k] @ [k,n]`` matmul is m·k·n
multiply-adds, and its FLOPs are twice that.
"""

from __future__ import annotations

from fractions import Fraction

from mfu_jax.flops.analytic import names
from mfu_jax.flops.analytic.components import Cache, Component
from mfu_jax.flops.exact import Number, integral
from mfu_jax.flops.masks import Mask

Components = tuple[Component, ...]


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
        bias: whether it has ``[outputs]`` bias weights, which cost no matmul FLOPs.
        tokens: positions of one sequence that pass through it; None: all.
    """
    return Component(
        name=name,
        macs=copies * inputs * outputs,
        tokens=tokens,
        parameters=copies * (inputs + bias) * outputs,
        inputs=inputs,
        outputs=outputs,
    )


def norm(name: str, width: int, *, bias: bool = False, copies: int = 1) -> Component:
    """The scale (and bias) of a norm: ``[width]`` weights, no matmul."""
    return Component(name=name, parameters=copies * width * (1 + bias))


def vector(name: str, size: int) -> Component:
    """Weights that are multiplied elementwise or added: no matmul."""
    return Component(name=name, parameters=size)


def table(name: str, rows: int, width: int) -> Component:
    """A lookup table ``[rows, width]``: a gather, no matmul."""
    return Component(name=name, parameters=rows * width, table=True)


def head(vocab: int, width: int, *, tied: bool, bias: bool = False) -> Component:
    """The output head, ``[T, D] @ [D, V]``; if `tied`, it reuses the embedding table's weights."""
    return Component(
        name=names.LOGITS,
        macs=vocab * width,
        parameters=(0 if tied else vocab * width) + bias * vocab,
    )


def attention_scores(
    heads: int,
    qk_dim: int,
    v_dim: int,
    mask: Mask,
    name: str = "scores",
    *,
    cache: Cache | None = None,
) -> Components:
    """``Q·Kᵀ`` and ``P·V`` of one layer.

    Per head: ``[S, qk] @ [qk, S]`` and ``[S, S] @ [S, v]``; a masked pair costs nothing, so there
    are qk + v multiply-adds per head and kept pair. Grouped queries share keys, not work: H is the
    number of query heads.
    """
    return (
        Component(name=f"{name}_qk", kind="attention", macs=heads * qk_dim, mask=mask, cache=cache),
        Component(name=f"{name}_pv", kind="attention", macs=heads * v_dim, mask=mask),
    )


def attention(
    width: int,
    heads: int,
    kv_heads: int,
    head_dim: int,
    mask: Mask,
    *,
    value_dim: int = 0,
    bias: bool = False,
    output_bias: bool | None = None,
    output_width: int | None = None,
    output_gate: bool = False,
    shared_kv: bool = False,
    borrowed_kv: bool = False,
    qk_norm: bool = False,
    qk_norm_all_heads: bool = False,
    sinks: bool = False,
    tokens: int | None = None,
    kv_tokens: int | None = None,
    name: str = "attention",
) -> Components:
    """Multi-head attention: MHA (K = H), GQA, MQA (K = 1); fused projections cost the same.

    ``q [T,D]@[D,H·h]``, ``k, v [T,D]@[D,K·h]``, ``out [T,H·h]@[H·h,D]``, and the scores.

    Args:
        value_dim: width of a value head, if it differs from `head_dim`.
        bias: bias of q, k and v; `output_bias`: of the output projection (None: same as `bias`).
        output_width: width of the output projection's result, if not D.
        output_gate: the query projection also produces a gate of the output's size (qwen3-next).
        shared_kv: one projection produces both keys and values (gemma4's global layers).
        borrowed_kv: keys and values come from an earlier layer.
        qk_norm: a scale ``[h]`` each for queries and keys; `qk_norm_all_heads`: ``[H·h]`` and
            ``[K·h]``.
        sinks: one learned logit per head takes its share of the softmax.
        tokens: positions of one sequence, if not the text's (a vision tower).
        kv_tokens: positions of the attended sequence (cross attention).
    """
    output_bias = bias if output_bias is None else output_bias
    kv_tokens = tokens if kv_tokens is None else kv_tokens
    value_dim = value_dim or head_dim
    q_outputs = (1 + output_gate) * heads * head_dim
    parts = [projection(f"{name}/q_proj", width, q_outputs, bias=bias, tokens=tokens)]
    if not borrowed_kv:
        widths = {"k_proj": head_dim} if shared_kv else {"k_proj": head_dim, "v_proj": value_dim}
        parts.extend(
            projection(f"{name}/{part}", width, kv_heads * each, bias=bias, tokens=kv_tokens)
            for part, each in widths.items()
        )
    if qk_norm:
        normed = (heads, kv_heads) if qk_norm_all_heads else (1, 1)
        scales = sum(normed[:1] if borrowed_kv else normed)
        parts.append(norm(f"{name}/qk_norm", head_dim, copies=scales))
    if sinks:
        parts.append(vector(f"{name}/sinks", heads))
    cached = head_dim if shared_kv else head_dim + value_dim
    kept = Cache(kv_heads * cached, borrowed=borrowed_kv)
    parts.extend(attention_scores(heads, head_dim, value_dim, mask, f"{name}/scores", cache=kept))
    out, joined = width if output_width is None else output_width, heads * value_dim
    parts.append(projection(f"{name}/o_proj", joined, out, bias=output_bias, tokens=tokens))
    return tuple(parts)


def mlp(
    width: int,
    hidden: int,
    *,
    gated: bool,
    bias: bool = False,
    tokens: int | None = None,
    name: str = "mlp",
) -> Components:
    """Gated (``wi_0, wi_1 [D,F]``, ``wo [F,D]``) or plain (``wi [D,F]``, ``wo [F,D]``) MLP."""
    inputs = ("wi_0", "wi_1") if gated else ("wi",)
    return (
        *(projection(f"{name}/{part}", width, hidden, bias=bias, tokens=tokens) for part in inputs),
        projection(f"{name}/wo", hidden, width, bias=bias, tokens=tokens),
    )


def moe(
    width: int,
    hidden: int,
    *,
    experts: int,
    per_token: int,
    gated: bool,
    bias: bool = False,
    router_bias: bool = False,
    capacity_factor: Number | None = None,
    zero: int = 0,
    zero_per_token: Number = 0,
) -> Components:
    """A router ``[T,D]@[D,E]`` and, per token, `per_token` of E expert MLPs.

    Args:
        capacity_factor: None: no token is dropped and no slot padded (the model's FLOPs). A
            number: each expert computes ⌈capacity⌉ = factor·T·k/E slots, filled or not.
        zero: further experts that compute nothing; `zero_per_token`: of the `per_token` used.
    """
    used = per_token - zero_per_token
    slots = used if capacity_factor is None else integral(used * Fraction(capacity_factor))
    parts = [projection(names.ROUTER, width, experts + zero, bias=router_bias)]
    for part in mlp(width, hidden, gated=gated, bias=bias, name=names.EXPERTS):
        parts.append(
            part.replace(
                macs=integral(slots * part.macs),
                parameters=experts * part.parameters,
                active_parameters=int(used * part.parameters),
            )
        )
    return tuple(parts)


def short_convolution(
    name: str, kernel: int, channels: int, *, bias: bool = False, tokens: int | None = None
) -> Component:
    """A depthwise convolution along the sequence: `kernel` multiply-adds per channel and token."""
    return Component(
        name=name,
        macs=kernel * channels,
        tokens=tokens,
        parameters=(kernel + bias) * channels,
        cache=Cache(state=(kernel - 1) * channels),
    )


def hyper_connection(streams: int, width: int, name: str = "hyper_connection") -> Components:
    """Manifold-constrained hyper-connection around one block, over `streams` residual streams.

    The flattened streams ``[k·D]`` are projected to the weights of the input mix (k), of the
    output (k) and of the residual mix (k²); mixing the streams takes k·D and k²·D multiply-adds
    between activations. Spreading the output over the streams is elementwise.
    """
    outputs = 2 * streams + streams**2
    return (
        norm(f"{name}/norm", streams * width),
        projection(f"{name}/mix_proj", streams * width, outputs, bias=True),
        vector(f"{name}/scale", 3),
        Component(name=f"{name}/input_mix", kind="attention", macs=streams * width),
        Component(name=f"{name}/residual_mix", kind="attention", macs=streams**2 * width),
    )


def engram(
    width: int, *, streams: int, memory: int, kernel: int, name: str = "engram"
) -> Components:
    """n-gram memory with `memory` values per token, mixed into G residual `streams`.

    Keys ``[M, G·D]``, values ``[M, D]``, one gate per stream (key · stream: G·D multiply-adds
    between activations), and a depthwise convolution over the G·D channels.
    """
    channels = streams * width
    return (
        projection(f"{name}/key_proj", memory, channels, bias=True),
        projection(f"{name}/value_proj", memory, width, bias=True),
        Component(name=f"{name}/gate", kind="attention", macs=channels),
        short_convolution(f"{name}/conv", kernel, channels),
        norm(f"{name}/norms", width, copies=3 * streams),
    )


def multi_token_prediction(
    width: int, layer: Components, output: Component, name: str = "mtp"
) -> Components:
    """One multi-token-prediction module (DeepSeek-V3, arXiv 2412.19437).

    It joins the last hidden state and the next token's embedding, ``[2·D, D]``, runs one more
    decoder layer, and uses the main model's output head, whose weights it does not own.
    """
    shared = output.replace(name=f"{name}/{names.LOGITS}", parameters=0)
    return (
        norm(f"{name}/norms", width, copies=3),
        projection(f"{name}/projection", 2 * width, width),
        *layer,
        shared,
    )
