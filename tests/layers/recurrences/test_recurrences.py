"""Chunked recurrences against the recurrences themselves, token by token in numpy."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from mfu_jax.layers.recurrences.convolutions import short_convolution
from mfu_jax.layers.recurrences.delta_net import chunked_delta_rule
from mfu_jax.layers.recurrences.mamba2 import Mamba2Spec, chunked_state_space

from mfu_jax.flops.analytic import mixers
from mfu_jax.flops.analytic.model_configs.attention import (
    LinearAttentionConfig,
    StateSpaceConfig,
)
from tests.support.floats import assert_close_as_float32
from tests.support.tiny_layers import tiny_builder

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


@pytest.mark.full
@pytest.mark.parametrize("chunk", [4, 8, 32])
def test_the_chunked_state_space_is_the_recurrence(chunk: int) -> None:
    u, decay = normal(B, S, 4, 3), -np.abs(normal(B, S, 4))
    b_in, c_out = normal(B, S, 2, 5), normal(B, S, 2, 5) + 0.1
    want = np.zeros((B, S, 4, 3))
    for b in range(B):
        for h in range(4):
            state = np.zeros((3, 5))
            for t in range(S):
                if t and SEGMENTS[b, t] != SEGMENTS[b, t - 1]:
                    state = np.zeros((3, 5))
                state = state * np.exp(decay[b, t, h]) + np.outer(u[b, t, h], b_in[b, t, h // 2])
                want[b, t, h] = state @ c_out[b, t, h // 2]
    arrays = (jnp.asarray(x, jnp.float32) for x in (u, b_in, c_out, decay))
    got = chunked_state_space(*arrays, jnp.asarray(SEGMENTS), chunk=chunk)
    assert_close_as_float32(got, want, terms=S * 15)


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


@pytest.mark.full
def test_mamba2_has_the_weights_that_are_counted() -> None:
    sizes = {"inner": 8, "heads": 4, "groups": 2, "state": 6, "kernel": 4}
    build = tiny_builder(5)
    layer = Mamba2Spec(**sizes).make(build)
    weights = sum(leaf.size for leaf in jax.tree.leaves(nnx.state(layer, nnx.Param)))
    counted = StateSpaceConfig(
        **{f"mamba_{name}": size for name, size in sizes.items()},
        mamba_conv_bias=True,
        mamba_norm=True,
    )
    config: Any = SimpleNamespace(
        emb_dim=5, state_space=counted, linear_attention=LinearAttentionConfig()
    )
    assert weights == sum(part.parameters for part in mixers.mamba2(config))
