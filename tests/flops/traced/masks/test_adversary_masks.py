"""Masks written in unusual ways: the pairs kept are those of the mask as a numpy array."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mfu_jax.flops.traced.counting import count_model_flops
from mfu_jax.flops.traced.masks.declared import attention_mask
from tests.support.jax_versions import respects_local_windows
from tests.support.small_functions import shape

B, S, T, H, D = 2, 12, 20, 3, 4
NEVER = -1e30


def positions(keys=S):
    return (jax.lax.broadcasted_iota(jnp.int32, (S, keys), d) for d in (0, 1))


def kept_pairs(keep, keys=S) -> int:
    """Counted one by one."""
    return int(np.sum(keep(*np.indices((S, keys)))))


def attention(mask):
    def fn(x, y, wq, wk, wv):
        q, k, v = ((a @ w).reshape(B, -1, H, D) for a, w in ((x, wq), (y, wk), (y, wv)))
        scores = mask(jnp.einsum("bqhd,bkhd->bhqk", q, k))
        return jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores), v)

    return fn


def causal(i, j):
    return i >= j


def window(i, j):
    return (i >= j) & (i - j < 4)


def chunked(i, j):
    return i // 5 == j // 5


def chunked_causal(i, j):
    return chunked(i, j) & causal(i, j)


def both_sides(i, j):
    return abs(i - j) < 4


def lower(dtype=bool):
    return np.tril(np.ones((S, S), dtype))


# What is done to the scores, and what it keeps of them.
MASKS = {
    "where not": (lambda s, i, j: jnp.where(j > i, NEVER, s), causal),
    "where not, negated": (lambda s, i, j: jnp.where(~(j <= i), NEVER, s), causal),
    "where not, constant": (lambda s, i, j: jnp.where(~lower(), NEVER, s), causal),
    "triu": (lambda s, i, j: jnp.where(jnp.triu(jnp.ones((S, S)), 1) == 1, NEVER, s), causal),
    "outside a window": (lambda s, i, j: jnp.where((j > i) | (i - j >= 4), NEVER, s), window),
    "window, twice": (
        lambda s, i, j: jnp.where(i - j < 4, jnp.where(j > i, NEVER, s), NEVER),
        window,
    ),
    "distance": (lambda s, i, j: jnp.where(abs(i - j) < 4, s, NEVER), both_sides),
    "too far": (lambda s, i, j: jnp.where(abs(j - i) >= 4, NEVER, s), both_sides),
    "floats": (lambda s, i, j: jnp.where(i.astype(float) - j + 0.5 > 0, s, NEVER), causal),
    "floats below": (
        lambda s, i, j: jnp.where(i.astype(float) - j - 0.5 < 0, s, NEVER),
        lambda i, j: i <= j,
    ),
    "bias, constant": (
        lambda s, i, j: s + np.where(lower(), 0, -1e9).astype(np.float32),
        causal,
    ),
    "bias, product": (lambda s, i, j: s + (1 - jnp.tril(jnp.ones((S, S)))) * -1e9, causal),
    "bias of ones": (lambda s, i, j: s + jnp.where(jnp.tril(jnp.ones((S, S))), 0.0, -1e9), causal),
    "numpy positions": (
        lambda s, i, j: jnp.where(np.arange(S)[:, None] >= jnp.arange(S), s, NEVER),
        causal,
    ),
    "chunks": (lambda s, i, j: jnp.where(chunked(i, j), s, NEVER), chunked),
    "causal in chunks": (lambda s, i, j: jnp.where(chunked_causal(i, j), s, NEVER), chunked_causal),
    "not in one chunk": (
        lambda s, i, j: jnp.where((i // 5 != j // 5) | (j > i), NEVER, s),
        chunked_causal,
    ),
    "causal in chunks, twice": (
        lambda s, i, j: jnp.where(j > i, NEVER, jnp.where(j // 5 == i // 5, s, NEVER)),
        chunked_causal,
    ),
    "chunks by lax.div": (
        lambda s, i, j: jnp.where(jax.lax.div(i, jnp.int32(5)) == jax.lax.div(j, 5), s, NEVER),
        chunked,
    ),
    "chunks of chunks": (
        lambda s, i, j: jnp.where(chunked(i, j) & (i // 10 == j // 10), s, NEVER),
        chunked,
    ),
    "chunks of shifted positions": (
        lambda s, i, j: jnp.where((i + 2) // 5 == (j + 2) // 5, s, NEVER),
        lambda i, j: (i + 2) // 5 == (j + 2) // 5,
    ),
    "a window in chunks": (
        lambda s, i, j: jnp.where(window(i, j) & chunked(i, j), s, NEVER),
        lambda i, j: window(i, j) & chunked(i, j),
    ),
    "chunks of numpy positions": (
        lambda s, i, j: jnp.where(
            (np.arange(S) // 5)[:, None] == jnp.asarray(np.arange(S) // 5), s, NEVER
        ),
        chunked,
    ),
    "chunks, constant": (
        lambda s, i, j: jnp.where(chunked_causal(*np.indices((S, S))), s, NEVER),
        chunked_causal,
    ),
    "chunks of keys before a later query": (
        lambda s, i, j: jnp.where(((i + 3) // 5 == j // 5) & (i + 3 >= j), s, NEVER),
        lambda i, j: ((i + 3) // 5 == j // 5) & (i + 3 >= j),
    ),
    "a window from a constant array": (
        lambda s, i, j: jnp.where((j <= i) & (i - j < jnp.array([4, 8])[0]), s, NEVER),
        window,
    ),
    "constant in a jitted layer": (
        lambda s, i, j: jax.jit(lambda s: jnp.where(lower(), s, NEVER))(s),
        causal,
    ),
}


@pytest.mark.parametrize("name", MASKS)
def test_pairs_kept(name):
    mask, keep = MASKS[name]
    fn = attention(lambda s: mask(s, *positions()))

    def loss(*args):
        return jnp.sum(fn(*args) ** 2)

    width = H * D
    args = (shape(B, S, width), shape(B, S, width), *[shape(width, width)] * 3)
    forward = 2 * 2 * B * H * S * S * D
    for count, dense in (
        (count_model_flops(fn, *args), forward),
        (count_model_flops(jax.grad(loss, (0, 1, 2, 3, 4)), *args), 3 * forward),
    ):
        assert count.activations == dense
        assert count.total - count.total_in("exact") == dense * (S * S - kept_pairs(keep)) // S**2


NO_MASKS = {
    "a choice of two scores": lambda s, i, j: jnp.where(i >= j, s * 2, s),
    "a small bias": lambda s, i, j: s + jnp.where(i >= j, 0.0, -1.0),
    "a prefix beside the triangle": lambda s, i, j: jnp.where((i >= j) | (s[0, 0] > 0), s, NEVER),
    "not all of the triangle is dropped": lambda s, i, j: jnp.where(
        (i >= j) & (s[0, 0] > 0), NEVER, s
    ),
    "everything": lambda s, i, j: jnp.where(np.ones((S, S), bool), s, NEVER),
}


@pytest.mark.parametrize("name", NO_MASKS)
def test_what_may_keep_every_pair_saves_nothing(name):
    fn = attention(lambda s: NO_MASKS[name](s, *positions()))
    width = H * D
    args = (shape(B, S, width), shape(B, S, width), *[shape(width, width)] * 3)
    assert count_model_flops(fn, *args).skipped == {}


def attend(q, k, v, **how):
    return jax.nn.dot_product_attention(q, k, v, **how)


@respects_local_windows
def test_attention_whose_operands_are_arguments():
    """No projections around it: queries, keys and values are what the function is given."""
    q, kv = shape(B, S, H, D), shape(B, T, H, D)
    dense = 2 * 2 * B * H * S * T * D

    def loss(q, k, v, **how):
        return jnp.sum(attend(q, k, v, **how) ** 2)

    for how, keep in (
        ({"is_causal": True}, causal),
        ({"local_window_size": (3, 2)}, lambda i, j: (i - j <= 3) & (j - i <= 2)),
        ({"local_window_size": 3, "is_causal": True}, window),
    ):
        skipped = 2 * 2 * B * H * D * (S * T - kept_pairs(keep, T))
        count = count_model_flops(lambda *a, how=how: attend(*a, **how), q, kv, kv)
        assert (count.total, count.skipped["exact"]) == (dense, skipped)
        gradient = jax.grad(lambda *a, how=how: loss(*a, **how), (0, 1, 2))
        count = count_model_flops(gradient, q, kv, kv)
        assert (count.total, count.skipped["exact"]) == (3 * dense, 3 * skipped)


def test_a_declared_mask_over_arguments():
    q = shape(B, S, H, D)
    dense, kept = 2 * 2 * B * H * S * S * D, 2 * 2 * B * H * D * (S * (S + 1) // 2)

    def loss(q, k, v):
        return jnp.sum(attend(q, k, v) ** 2)

    def declared_inside(q, k, v):
        with attention_mask("causal"):
            return loss(q, k, v)

    with attention_mask("causal"):
        around = count_model_flops(jax.grad(loss, (0, 1, 2)), q, q, q)
    for count in (around, count_model_flops(jax.grad(declared_inside, (0, 1, 2)), q, q, q)):
        assert (count.total, count.total_in("exact")) == (3 * dense, 3 * kept)


ROW, COLUMN = np.indices((S, S))
WINDOWS = np.stack([causal(ROW, COLUMN) & (size > ROW - COLUMN) for size in (2, 5, S)])

# What is done to the scores, a band that holds it, and how that is labelled.
AT_MOST = {
    "dilated": (lambda s, i, j: jnp.where((i >= j) & ((i - j) % 3 == 0), s, NEVER), causal),
    "a window and sinks": (
        lambda s, i, j: jnp.where((i >= j) & ((i - j < 4) | (j < 2)), s, NEVER),
        causal,
    ),
    "a computed window": (
        lambda s, i, j: jnp.where(
            (i >= j) & (i - j < jnp.argmax(jnp.sin(jnp.arange(9.0)))), s, NEVER
        ),
        causal,
    ),
    "blocks before it": (
        lambda s, i, j: jnp.where((i >= j) & (i // 5 >= j // 4), s, NEVER),
        causal,
    ),
    "dilated, constant": (
        lambda s, i, j: jnp.where(causal(ROW, COLUMN) & ((ROW - COLUMN) % 11 == 0), s, NEVER),
        causal,
    ),
    "a window for each head, constant": (lambda s, i, j: jnp.where(WINDOWS, s, NEVER), causal),
}


@pytest.mark.parametrize("name", AT_MOST)
def test_what_is_not_recognised_is_a_bound_that_says_so(name):
    fn = attention(lambda s: AT_MOST[name][0](s, *positions()))
    width = H * D
    args = (shape(B, S, width), shape(B, S, width), *[shape(width, width)] * 3)
    count = count_model_flops(fn, *args)
    dense = 2 * 2 * B * H * S * S * D
    assert count.by_mask == {"at most causal": dense}
    assert count.skipped["exact"] == dense * (S * S - kept_pairs(AT_MOST[name][1])) // S**2


def test_chunks_have_their_name_and_maxtexts_triangles():
    count = count_model_flops(
        attention(lambda s: MASKS["causal in chunks"][0](s, *positions())),
        *[shape(B, S, H * D)] * 2,
        *[shape(H * D, H * D)] * 3,
    )
    dense = 2 * 2 * B * H * S * S * D
    assert count.by_mask == {"causal in chunks of 5": dense}
    assert dense - count.skipped["maxtext"] == 2 * B * H * D * (5**2 + 5**2 + 2**2)
