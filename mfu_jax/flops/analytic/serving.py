"""FLOPs and bytes of serving: prefilling a prompt, and decoding one token after a context.

MFU of serving is FLOPs / (time × peak), MBU is bytes / (time × peak bandwidth). Bytes count what
must move once: the weights, and the keys, values and states that the masks let a token see.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from mfu_jax.errors import UserError
from mfu_jax.flops.analytic.architectures.families import build
from mfu_jax.flops.analytic.components import Cache, Component, Layers
from mfu_jax.flops.analytic.inputs.sources import as_model_config
from mfu_jax.flops.analytic.names import LOGITS, MULTI_TOKEN_PREDICTION
from mfu_jax.flops.exact import Number, integral
from mfu_jax.flops.masks import Full, Mask

_NOTHING_KEPT = Cache()
_EVERY_KEY = Full()  # for a part without a mask, which has a state but no keys


@dataclass(frozen=True, kw_only=True)
class ServingCost:
    """One forward pass over a batch, summed over its devices.

    Attributes:
        tokens: text tokens that pass through the model.
        flops: matmul FLOPs for the pairs that the masks keep (convention ``exact``).
        weight_bytes: bytes of weights read; for experts, the expected number in use under uniform
            routing.
        cache_read_bytes: bytes of keys, values and states read.
        cache_write_bytes: bytes of keys, values and states written.
    """

    tokens: int
    flops: Number
    weight_bytes: Number | float
    cache_read_bytes: Number
    cache_write_bytes: Number


def prefill_cost(
    config: Any,
    prompt_length: int,
    *,
    batch: int = 1,
    bytes_per_weight: Number = 2,
    bytes_per_cached_value: Number = 2,
    all_logits: bool = False,
) -> ServingCost:
    """The prefill of a prompt of `prompt_length` tokens for each of `batch` sequences.

    Args:
        config: a `ModelConfig`, a mapping, or any object with MaxText's field names.
        all_logits: whether the output head runs at every position, not only at the last.

    Raises:
        UserError: a field or argument is wrong.
    """
    _check(prompt_length=prompt_length, batch=batch)
    model = build(as_model_config(config).replace(max_target_length=prompt_length))
    flops: Number = 0
    written: Number = 0
    for repeats, part in _serving_parts(model):
        if part.name == LOGITS and not all_logits:
            part = part.replace(tokens=1)
        flops += repeats * part.forward_flops(prompt_length, "exact")
        written += repeats * _kept(part, (part.mask or _EVERY_KEY).keys_kept(prompt_length))
    return ServingCost(
        tokens=batch * prompt_length,
        flops=integral(batch * flops),
        weight_bytes=_weights_read(_serving_parts(model), batch * prompt_length, bytes_per_weight),
        cache_read_bytes=0,
        cache_write_bytes=integral(batch * written * bytes_per_cached_value),
    )


def decode_cost(
    config: Any,
    context_length: int,
    *,
    batch: int = 1,
    bytes_per_weight: Number = 2,
    bytes_per_cached_value: Number = 2,
) -> ServingCost:
    """Decoding one token for each of `batch` sequences: its sequence's `context_length`-th.

    It sees as many keys as this token adds pairs to the mask. Latent attention (MLA)
    attends to the cached latent directly. Towers and encoders ran in the prefill.

    Raises:
        UserError: a field or argument is wrong.

    >>> from mfu_jax.flops.analytic.inputs.overrides import load_model_config
    >>> cost = decode_cost(load_model_config("llama3-8b"), 8192)
    >>> cost.cache_read_bytes == 32 * 2 * 8 * 128 * 8192 * 2  # layers, k and v, heads, bytes
    True
    """
    _check(context_length=context_length, batch=batch)
    model = build(as_model_config(config).replace(max_target_length=context_length))
    text = [(repeats, p) for repeats, p in _serving_parts(model) if p.tokens is None]
    flops: Number = 0
    read: Number = 0
    written: Number = 0
    for repeats, part in text:
        cache = part.cache or _NOTHING_KEPT
        seen = 1 if part.mask is None else _seen_by_last(part.mask, context_length)
        macs = part.macs if cache.decode_macs is None else cache.decode_macs
        flops += repeats * 2 * macs * seen
        read += repeats * (seen * cache.width + cache.state)
        written += repeats * _kept(part, (part.mask or _EVERY_KEY).keys_per_token)
    return ServingCost(
        tokens=batch,
        flops=integral(batch * flops),
        weight_bytes=_weights_read(text, batch, bytes_per_weight),
        cache_read_bytes=integral(batch * read * bytes_per_cached_value),
        cache_write_bytes=integral(batch * written * bytes_per_cached_value),
    )


def _serving_parts(model: Layers) -> Iterator[tuple[int, Component]]:
    """Each component with its repeats, except multi-token prediction, which only trains."""
    for layer in model:
        if layer.name != MULTI_TOKEN_PREDICTION:
            yield from ((layer.repeats, part) for part in layer.components)


def _seen_by_last(mask: Mask, length: int) -> Number:
    """Number of keys that the last of `length` tokens sees."""
    return mask.pairs(length, "exact") - (mask.pairs(length - 1, "exact") if length > 1 else 0)


def _kept(part: Component, keys: Number) -> Number:
    cache = part.cache or _NOTHING_KEPT
    return 0 if cache.borrowed else keys * cache.width + cache.state


def _weights_read(
    parts: Iterable[tuple[int, Component]], tokens: int, bytes_per_weight: Number
) -> Number | float:
    """Bytes of the weights used by `tokens` tokens; zero for lookup tables (a row per token).

    With k of E experts per token, T tokens use E·(1 − (1 − k/E)ᵀ) under uniform routing.
    """
    weights: Number | float = 0
    for repeats, part in parts:
        if part.table:
            continue
        held = part.parameters
        if part.name == LOGITS and not held:
            held = int(part.macs)  # tied: the embedding table is read as a matrix
        if part.active_parameters is None or not held:
            weights += repeats * held
        elif tokens == 1:
            weights += repeats * part.active_parameters
        else:
            unused = (1 - part.active_parameters / held) ** tokens
            weights += repeats * held * (1 - unused)
    return weights * bytes_per_weight


def _check(**numbers: int) -> None:
    for name, value in numbers.items():
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise UserError(f"{name}={value!r}: expected a positive whole number")
