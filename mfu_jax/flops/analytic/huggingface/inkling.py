"""Inkling 1 and 2: learned biases by distance, and convolutions, in place of positions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mfu_jax.flops.analytic.huggingface.common import (
    decoder,
    every,
    experts,
    heads,
    layer_types,
    model_type,
)
from mfu_jax.flops.analytic.huggingface.fields import Fields
from mfu_jax.flops.analytic.model_configs.layers import FULL, MESSAGES, SLIDING
from mfu_jax.flops.analytic.model_configs.model import ModelConfig


def _inkling(c: Fields, kinds: list[str]) -> dict[str, Any]:
    """What all have in common."""
    return {
        "logits_via_embedding": False,  # transformers never ties them
        "embedding_norm": True,
        "layer_types": kinds,
        "in_windows": [
            ("num_query_heads", c.size("swa_num_attention_heads")),
            ("num_kv_heads", c.size("swa_num_key_value_heads")),
            ("head_dim", c.size("swa_head_dim")),
            ("relative_extent", c.size("sliding_window_size")),
            ("projected_taps", 0),
        ],
        "sliding_window_size": c.size("sliding_window_size"),
        "relative_dim": c.size("d_rel"),
        "relative_extent": c.size("rel_extent"),
        "conv_kernel": c.size("conv_kernel_size"),
        **heads(c),
    }


_KINDS = {"hybrid": FULL, "hybrid_sliding": SLIDING}


@model_type("inkling_text")
def inkling_text(c: Fields) -> ModelConfig:
    """Norms on queries and keys; the router scores the shared experts too; two learned scales."""
    local, layers = c.list_of(int, "local_layer_ids"), c.size("num_hidden_layers")
    window = every(6, FULL, SLIDING)
    kinds = layer_types(
        c, lambda i: window(i) if local is None else SLIDING if i in local else FULL, **_KINDS
    )
    if c.has("dense_intermediate_size"):
        c = c.with_values(
            moe_intermediate_size=c.size("intermediate_size"),
            intermediate_size=c.size("dense_intermediate_size"),
        )
    return decoder(
        c,
        qk_norm="head",
        shared_expert_gate=True,
        further_vectors=layers,
        **experts(c, c.size("dense_mlp_idx", 0, zero=True)),
        **_inkling(c, kinds),
    )


@model_type("inkling2_text", "inkling2_loop_text")
def inkling2_text(c: Fields) -> ModelConfig:
    """Gates and sinks from the input, scaled queries, and attention residuals.

    Each block reads a mixture of the model's input, the outputs of every `n` layers so far, and the
    current stream, chosen by a learned query (full attention: by three, for q, k and v).

    In a loop, a run of layers repeats on the same input. From the second pass on, four inputs of
    each layer take from messages, chosen likewise from the outputs of the previous pass.
    """
    layers, width, rows = c.size("num_hidden_layers"), c.size("hidden_size"), c.size("vocab_size")
    kinds = layer_types(c, every(6, FULL, SLIDING), **_KINDS)
    common = _inkling(c, kinds)
    scales, of_windows = (
        sizes["num_query_heads"] * (sizes["head_dim"] + sizes["relative_dim"])
        for sizes in (common, {**common, **dict(common["in_windows"])})
    )
    block = c.size("n_layers_per_attn_res_block")
    queries = [(3 if kind == FULL else 1) * (i > 0) for i, kind in enumerate(kinds)]
    mixed = [-(-i // block) + 1 for i in range(layers + 1)]
    sources = [queries[i] * mixed[i] + mixed[i + 1] for i in range(layers)]
    total, loop = sum(sources) + mixed[-1], {}
    vectors = (sum(queries) + layers + 1 + 2 * kinds.count(FULL)) * width
    vectors += sum(scales if kind == FULL else of_windows for kind in kinds)
    if c.model_type == "inkling2_loop_text":
        start, end, passes, rank = _loop(c, block)
        inside = end - start
        # Of the previous pass: its blocks but the first's input, and its output.
        again = sum(sources[start:end]) + 4 * inside * (inside // block)
        total, vectors = total + (passes - 1) * again, vectors + 4 * inside * width
        looped = [f"{MESSAGES}+{kind}" for kind in kinds[start:end]]
        common["layer_types"] = kinds[:start] + looped + kinds[end:]
        loop = {
            "layer_passes": (1,) * start + (passes,) * inside + (1,) * (layers - end),
            "message_rank": rank,
        }
    outputs = c.size("unpadded_vocab_size")
    if outputs > rows:
        c.fail("unpadded_vocab_size", f"expected at most vocab_size={rows}")
    return decoder(
        c,
        mlp_dim=0,
        vocab_size=outputs,
        attention_output_gate=True,
        projected_sinks=True,
        projected_taps=True,
        residual_sources=total,
        further_vectors=vectors + (rows - outputs) * width,
        **experts(c, 0),
        **common,
        **loop,
    )


def _loop(c: Fields, block: int) -> tuple[int, ...]:
    """First layer and end of the loop, its passes, and the rank of its gates."""
    nested = c.get("loop_config") or {}
    if not isinstance(nested, Mapping):
        c.fail("loop_config", "expected an object")
    inner = c.with_values(**{_LOOP[key]: nested[key] for key in _LOOP if key in nested})
    start, end, *others = (inner.size(name) for name in _LOOP.values())
    if start % block or end % block or not start <= end <= c.size("num_hidden_layers"):
        inner.fail(_LOOP["core_start"], f"expected loops of whole blocks of {block} layers")
    return start, end, *others


_LOOP = {
    "core_start": "loop_layer_index_start",
    "core_end": "loop_layer_index_end",
    "num_passes": "loop_num_passes",
    "gate_rank": "loop_gate_rank",
}
