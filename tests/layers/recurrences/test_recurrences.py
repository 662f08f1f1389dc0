"""Chunked recurrences against the recurrences themselves, token by token in numpy."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest
from mfu_jax.layers.recurrences.convolutions import short_convolution
from mfu_jax.layers.recurrences.delta_net import chunked_delta_rule

from tests.support.floats import assert_close_as_float32

B, S, H = 2, 21, 2
# Documents that end inside a chunk, at its border, and after one token.
SEGMENTS = np.stack([np.repeat([1, 2, 3], [5, 11, 5]), np.repeat([1, 2, 3], [8, 1, 12])])


def normal(*shape: int) -> np.ndarray:
    return np.random.default_rng(sum(shape)).normal(size=shape)


@pytest.mark.full
@pytest.mark.parametrize("chunk", [4, 8, 32])
def test_the_chunked_delta_rule_is_the_recurrence(chunk: int) -> None:
    q, k, v = normal(B, S, H, 3), normal(B, S, H, 3) / 2, normal(B, S, H, 4)
    beta, decay = 1 / (1 + np.exp(-normal(B, S, H))), -np.abs(normal(B, S, H))
    want = np.zeros((B, S, H, 4))
    for b in range(B):
        for h in range(H):
            state = np.zeros((3, 4))
            for t in range(S):
                if t and SEGMENTS[b, t] != SEGMENTS[b, t - 1]:
                    state = np.zeros((3, 4))
                state = state * np.exp(decay[b, t, h])
                held = k[b, t, h] @ state
                state += np.outer(k[b, t, h], beta[b, t, h] * (v[b, t, h] - held))
                want[b, t, h] = q[b, t, h] @ state
    arrays = (jnp.asarray(x, jnp.float32) for x in (q, k, v, beta, decay))
    got = chunked_delta_rule(*arrays, jnp.asarray(SEGMENTS), chunk=chunk)
    assert_close_as_float32(got, want, terms=S * 12)


def test_a_convolution_ends_where_the_document_begins() -> None:
    x, kernel = normal(B, S, 3), normal(4, 3)
    want = np.zeros_like(x)
    for b in range(B):
        for t in range(S):
            for back in range(4):
                if t - back >= 0 and SEGMENTS[b, t - back] == SEGMENTS[b, t]:
                    want[b, t] += x[b, t - back] * kernel[3 - back]
    arrays = (jnp.asarray(y, jnp.float32) for y in (x, kernel))
    got = short_convolution(*arrays, jnp.asarray(SEGMENTS))
    assert_close_as_float32(got, want, terms=4)
