"""Attention whose mask is data: counted with every pair, and said so."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
import pytest

from mfu_jax import attention_mask, count_model_flops

B, S, H, D = 2, 16, 2, 8
HEADS = [jax.ShapeDtypeStruct((B, H, S, D), jnp.float32)] * 3
MASK = jax.ShapeDtypeStruct((B, 1, S, S), jnp.bool_)
VERY_NEGATIVE = -0.7 * float(jnp.finfo(jnp.float32).max)  # MaxText's
PRODUCT = 2 * B * H * S * S * D

Masking = Callable[[jax.Array, jax.Array], jax.Array]


def filled(scores: jax.Array, mask: jax.Array) -> jax.Array:
    return jnp.where(mask, scores, -jnp.inf)


def added(scores: jax.Array, mask: jax.Array) -> jax.Array:
    return scores + jnp.where(mask, 0.0, -1e9)


def multiplied(scores: jax.Array, mask: jax.Array) -> jax.Array:
    return scores + (1.0 - mask.astype(jnp.float32)) * jnp.finfo(jnp.float32).min


def sum_added(scores: jax.Array, mask: jax.Array) -> jax.Array:
    keys = (1.0 - mask[:, :, :1].astype(jnp.float32)) * -1e9
    return scores + (jnp.where(mask, 0.0, -1e9) + keys)


def as_maxtext(scores: jax.Array, mask: jax.Array) -> jax.Array:
    bias = jnp.where(mask, 0.0, VERY_NEGATIVE)
    return jnp.where(bias >= VERY_NEGATIVE * 0.5, scores, VERY_NEGATIVE)


def attention(
    masking: Masking, q: jax.Array, k: jax.Array, v: jax.Array, mask: jax.Array
) -> jax.Array:
    scores = jnp.einsum("bhqd,bhkd->bhqk", q, k) / D**0.5
    return jnp.einsum("bhqk,bhkd->bhqd", jax.nn.softmax(masking(scores, mask)), v).sum()


@pytest.mark.parametrize("masking", [filled, added, multiplied, sum_added, as_maxtext])
def test_a_mask_that_is_data_is_counted_in_full_and_told(masking: Masking) -> None:
    def of(q: jax.Array, k: jax.Array, v: jax.Array, mask: jax.Array) -> jax.Array:
        return attention(masking, q, k, v, mask)

    count = count_model_flops(of, *HEADS, MASK)
    assert (count.unknown_masks, count.total) == (2 * PRODUCT, 2 * PRODUCT)
    both = count_model_flops(jax.value_and_grad(of, argnums=(0, 1, 2)), *HEADS, MASK)
    assert (both.unknown_masks, both.total) == (6 * PRODUCT, 6 * PRODUCT)
    with attention_mask("causal"):
        declared = count_model_flops(of, *HEADS, MASK)
    assert (declared.unknown_masks, declared.by_mask) == (0, {"causal": 2 * PRODUCT})


@pytest.mark.parametrize("is_first", [True, False])
def test_a_known_mask_beside_one_that_is_data_bounds_it(is_first: bool) -> None:
    """As EasyDeL's attention fills scores: by the triangle, then by the documents."""

    def of(q: jax.Array, k: jax.Array, v: jax.Array, mask: jax.Array) -> jax.Array:
        masks = [jnp.tril(jnp.ones((S, S), bool)), mask]
        first, then = masks if is_first else reversed(masks)
        return attention(lambda scores, _: filled(filled(scores, first), then), q, k, v, mask)

    count = count_model_flops(jax.value_and_grad(of, argnums=(0, 1, 2)), *HEADS, MASK)
    assert (count.unknown_masks, count.by_mask) == (0, {"at most causal": 6 * PRODUCT})


def test_masks_that_are_known_and_dropout_are_none_of_these() -> None:
    def causal(q: jax.Array, k: jax.Array, v: jax.Array, mask: jax.Array) -> jax.Array:
        triangle = jnp.tril(jnp.ones((S, S), bool))
        return attention(filled, q, k, v, triangle & mask)

    def dropout(q: jax.Array, k: jax.Array, v: jax.Array, keep: jax.Array) -> jax.Array:
        scores = jax.nn.softmax(jnp.einsum("bhqd,bhkd->bhqk", q, k))
        return jnp.einsum("bhqk,bhkd->bhqd", jnp.where(keep, scores / 0.9, 0.0), v).sum()

    assert count_model_flops(causal, *HEADS, MASK).unknown_masks == 0
    assert count_model_flops(jax.grad(dropout), *HEADS, MASK).unknown_masks == 0
