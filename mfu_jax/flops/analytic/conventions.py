"""Conventions for counting model FLOPs: what each counts, row by row.

Three conventions count every matmul and differ only in the attention pairs (`maxtext`, `exact`,
`dense`); `megatron` counts every matmul, with half of all pairs everywhere; the others are formulas
in a parameter count N. All count training FLOPs without recomputation.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from typing import NamedTuple

from mfu_jax.errors import UserError, nearest
from mfu_jax.flops.analytic.components import Component, ComponentKind, Layers
from mfu_jax.flops.analytic.model_configs.model import ModelConfig
from mfu_jax.flops.analytic.names import INDEXER, LOGITS, ROUTER, SHARED_GATE
from mfu_jax.flops.analytic.parameters import ParameterCount, parameters_of
from mfu_jax.flops.exact import Number, integral
from mfu_jax.flops.masks import Causal, Full, PairCounting, SlidingWindow, Strided


class FlopsRow(NamedTuple):
    """One component of one kind of layer, summed over its repeats.

    Attributes:
        layer: the layer's name.
        component: the component's name.
        kind: ``weight`` (an operand is a weight) or ``attention`` (both are activations).
        repeats: number of layers of this kind.
        forward_flops: per device and optimizer step, all repeats.
        training_flops: forward and backward, likewise.
        has_pairs: whether it is attention over token pairs; False for what runs token by token,
            such as the state of linear attention.
    """

    layer: str
    component: str
    kind: ComponentKind
    repeats: int
    forward_flops: Number
    training_flops: Number
    has_pairs: bool = False


@dataclass(frozen=True, kw_only=True)
class Convention:
    """One way to count FLOPs.

    Attributes:
        name: its key.
        summary: what it counts, in one line.
        source: where it comes from.
        rows: (config, model) → what it counts, row by row.
    """

    name: str
    summary: str
    source: str
    rows: Callable[[ModelConfig, Layers], list[FlopsRow]]


CONVENTIONS: dict[str, Convention] = {}


def register_convention(
    name: str, summary: str, source: str
) -> Callable[[Callable[[ModelConfig, Layers], list[FlopsRow]]], None]:
    """Registers the decorated function as the convention `name`."""

    def register(rows: Callable[[ModelConfig, Layers], list[FlopsRow]]) -> None:
        CONVENTIONS[name] = Convention(name=name, summary=summary, source=source, rows=rows)

    return register


def find_convention(name: str) -> Convention:
    """The convention with that name.

    Raises:
        UserError: the name is unknown; the message suggests the nearest one.
    """
    if name not in CONVENTIONS:
        raise UserError(
            f"convention={name!r} is not known; expected one of {', '.join(CONVENTIONS)}",
            hint=nearest(name, CONVENTIONS),
        )
    return CONVENTIONS[name]


def matmul_rows(
    config: ModelConfig,
    model: Layers,
    counting: PairCounting,
    change: Callable[[Component], Component] | None = None,
) -> list[FlopsRow]:
    """Every component with a matmul, its attention pairs counted according to `counting`."""
    rows = []
    sequences, length = config.sequences_per_step, config.step.max_target_length
    for layer in model:
        times = layer.repeats * sequences
        for part in layer.components:
            counted = change(part) if change else part
            if not counted.macs or counted.tokens == 0:
                continue
            forward = integral(counted.forward_flops(length, counting) * times)
            rows.append(
                FlopsRow(
                    layer.name,
                    part.name,
                    part.kind,
                    layer.repeats,
                    forward,
                    forward * (1 + counted.backward_multiple),
                    part.mask is not None,
                )
            )
    return rows


@register_convention("maxtext", "every matmul; causal S²/2, window S·W − W²/2", "MaxText")
def _maxtext(config: ModelConfig, model: Layers) -> list[FlopsRow]:
    return matmul_rows(config, model, "maxtext")


@register_convention("exact", "every matmul; the pairs a mask keeps, one by one", "this project")
def _exact(config: ModelConfig, model: Layers) -> list[FlopsRow]:
    return matmul_rows(config, model, "exact")


@register_convention(
    "dense", "every matmul; all S² pairs whatever the mask", "PyTorch's FLOP counter"
)
def _dense(config: ModelConfig, model: Layers) -> list[FlopsRow]:
    return matmul_rows(config, model, "dense")


@register_convention(
    "megatron",
    "every matmul but the router; S²/2 in every layer, windows or not",
    "Megatron-LM, 2025, num_floating_point_operations",
)
def _megatron(config: ModelConfig, model: Layers) -> list[FlopsRow]:
    return matmul_rows(config, model, "maxtext", lambda part: _as_megatron(config, part))


def _as_megatron(config: ModelConfig, part: Component) -> Component:
    if part.name.endswith(LOGITS):
        return part.replace(macs=part.macs * _padded_vocabulary(config) // config.vocab_size)
    if part.name.endswith((ROUTER, SHARED_GATE)):
        return part.replace(macs=0)
    if part.mask is None or isinstance(part.mask, Full):
        return part
    return part.replace(mask=Causal())


_LATENT_NORMS = ("attention/q_norm", "attention/kv_norm", "mtp/norms")


@register_convention(
    "megatron_bridge",
    "as megatron, windows exact; DeepSeek V4's sparse attention; one multiply-add a latent norm",
    "Megatron-Bridge, August 2026 (0494433), training/utils/flop_utils.py",
)
def _megatron_bridge(config: ModelConfig, model: Layers) -> list[FlopsRow]:
    """Windows as they are, and DeepSeek V4's own terms; no other indexer, no hyper-connection.

    Of V4's keys, a query has a whole window, half of the S/128 summaries, those selected of S/4,
    and the indexer scores all.
    """
    length = config.step.max_target_length
    compressed = bool(config.sparse_attention.compress_ratios)

    def pairs_per_query(part: Component) -> Number:
        if not isinstance(part.mask, Strided):
            return config.attention.sliding_window_size
        summaries = length // part.mask.ratio
        if part.name.startswith(INDEXER):
            return summaries
        chosen = min(part.mask.limit, summaries)
        return chosen * (
            1 - Fraction(chosen * part.mask.ratio, 2 * length)
        ) or summaries / Fraction(2)

    def counted(part: Component) -> Component:
        name, mask = part.name, part.mask
        if name in _LATENT_NORMS:
            return part.replace(macs=part.parameters)
        if name == "mamba2/core":  # 7 operations a state where the recurrence needs 4
            return part.replace(macs=Fraction(7 * part.macs, 4))
        unseen = ("hyper_", "mamba2/conv", f"{INDEXER}/reduce" if compressed else INDEXER)
        if name.startswith(unseen):
            return part.replace(macs=0)
        if name.startswith(INDEXER):
            part = part.replace(left_gradient=True, right_gradient=True)
        if compressed and mask is not None and not isinstance(mask, Full):
            return part.replace(macs=part.macs * pairs_per_query(part), mask=None)
        if isinstance(mask, SlidingWindow) and mask.size < length:
            return part.replace(macs=part.macs * mask.pairs(length, "exact"), mask=None, tokens=1)
        return _as_megatron(config, part)

    return matmul_rows(config, model, "maxtext", counted)


def _padded_vocabulary(config: ModelConfig) -> int:
    """Megatron pads the vocabulary to a multiple (128 × tensor parallelism) and counts that."""
    multiple = config.step.make_vocab_size_divisible_by or 1
    return -(-config.vocab_size // multiple) * multiple


@register_convention(
    "megatron_2021",
    "72·B·S·L·h²·(1 + S/6h + V/12Lh): MLP of 4h, all S² pairs, no recomputation",
    "Narayanan et al., arXiv 2104.04473, with 72 for 96 (no recomputation)",
)
def _megatron_2021(config: ModelConfig, model: Layers) -> list[FlopsRow]:
    layers = sum(
        layer.repeats for layer in model if any(part.mask is not None for part in layer.components)
    )
    tokens, width = _tokens(config), config.emb_dim
    return [
        _row("72·B·S·L·h²", "weight", 72 * tokens * layers * width**2, layers),
        _row("6·B·S·h·V", "weight", 6 * tokens * width * _padded_vocabulary(config)),
        _row(
            "12·B·S²·L·h", "attention", 12 * tokens * config.step.max_target_length * layers * width
        ),
    ]


def _register_formula(
    name: str,
    summary: str,
    source: str,
    parameters: Callable[[ParameterCount], int],
    *,
    attention: bool = False,
) -> None:
    """6·N per token, N of the `parameters`; with attention 12·L·H·Q·S, 3 × the dense QKᵀ and PV."""

    @register_convention(name, f"6·N{' + 12·L·H·Q·S' * attention} per token; N: {summary}", source)
    def rows(config: ModelConfig, model: Layers) -> list[FlopsRow]:
        counted = 6 * parameters(parameters_of(config, model)) * _tokens(config)
        found = [_row("6·N", "weight", counted)]
        if attention:
            pairs = config.step.max_target_length * _tokens(config)
            macs = sum(
                layer.repeats * part.macs
                for layer in model
                for part in layer.components
                if part.mask is not None
            )
            found.append(_row("12·L·H·Q·S", "attention", 6 * macs * pairs))
        return found


_register_formula(
    "palm",
    "all active weights",
    "PaLM, arXiv 2204.02311, appendix B",
    lambda count: count.active,
    attention=True,
)
_register_formula(
    "nanogpt",
    "all active weights but the position table",
    "nanoGPT, model.py, estimate_mfu",
    lambda count: count.active - count.positions,
    attention=True,
)
_register_formula(
    "6n", "all active weights", "Hoffmann et al., arXiv 2203.15556", lambda count: count.active
)
_register_formula(
    "6n_non_embedding",
    "active weights without tables and output head",
    "Kaplan et al., arXiv 2001.08361",
    lambda count: count.active_non_embedding,
)


def _tokens(config: ModelConfig) -> Number:
    return config.sequences_per_step * config.step.max_target_length


# In a formula, backward costs twice the forward.
_FORWARD_SHARE = Fraction(1, 3)


def _row(component: str, kind: ComponentKind, training: Number, repeats: int = 1) -> FlopsRow:
    forward, has_pairs = integral(training * _FORWARD_SHARE), kind == "attention"
    return FlopsRow("model", component, kind, repeats, forward, integral(training), has_pairs)
