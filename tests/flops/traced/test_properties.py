"""Properties of the traced count that hold for every program."""

from __future__ import annotations

import resource

import jax
import jax.numpy as jnp
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.ad_checkpoint import checkpoint_name

from mfu_jax.flops.traced.counting import _counted, count_model_flops
from tests.support.work import count_calls

B, S, D = 2, 6, 4
POLICIES = jax.checkpoint_policies
CHOICES = [
    "no checkpoint",
    None,
    POLICIES.everything_saveable,
    POLICIES.nothing_saveable,
    POLICIES.dots_saveable,
    POLICIES.dots_with_no_batch_dims_saveable,
    POLICIES.save_only_these_names("hidden"),
    POLICIES.save_anything_except_these_names("hidden"),
    POLICIES.save_and_offload_only_these_names(
        names_which_can_be_saved=["scores"],
        names_which_can_be_offloaded=["hidden"],
        offload_src="device",
        offload_dst="pinned_host",
    ),
]


def mlp(w, x):
    return x + checkpoint_name(jnp.tanh(x @ w["a"]), "hidden") @ w["b"]


def attention(w, x):
    q, v = x @ w["a"], x @ w["b"]
    scores = checkpoint_name(jnp.einsum("bsd,btd->bst", q, x), "scores")
    return x + jnp.einsum("bst,btd->bsd", jax.nn.softmax(scores), v)


def linear(w, x):
    return x @ w["a"]


# One product with a D×D matrix, and one with an S×S matrix of scores.
PROJECTION, PAIRS = 2 * B * S * D * D, 2 * B * S * S * D
FORWARD = {mlp: 2 * PROJECTION, attention: 2 * PROJECTION + 2 * PAIRS, linear: PROJECTION}

blocks = st.lists(
    st.tuples(
        st.sampled_from(list(FORWARD)),
        st.sampled_from(CHOICES),  # around one layer
        st.integers(1, 3),  # layers
        st.booleans(),  # scanned
        st.booleans(),  # jitted
    ),
    min_size=1,
    max_size=3,
)


def checkpointed(fn, policy):
    return fn if policy == "no checkpoint" else jax.checkpoint(fn, policy=policy)


def build(program, outer, *, remat: bool):
    """The loss of a program (and of its twin without any checkpoint)."""

    def stack(w, x):
        for kind, policy, repeats, scanned, jitted in program:
            layer = checkpointed(kind, policy) if remat else kind
            layer = jax.jit(layer) if jitted else layer
            if scanned:
                layers = jax.tree.map(lambda p, n=repeats: jnp.stack([p] * n), w)
                x, _ = jax.lax.scan(lambda x, w, f=layer: (f(w, x), None), x, layers)
            else:
                for _ in range(repeats):
                    x = layer(w, x)
        return x

    whole = checkpointed(stack, outer) if remat else stack
    return lambda w, x: jnp.sum(whole(w, x) ** 2)


@pytest.mark.full
@settings(max_examples=40, deadline=None, derandomize=True)
@given(blocks, st.sampled_from(CHOICES), st.booleans())
def test_remat_never_changes_the_model_count(program, outer, with_value):
    matrix = jax.ShapeDtypeStruct((D, D), "float32")
    w, x = {"a": matrix, "b": matrix}, jax.ShapeDtypeStruct((B, S, D), "float32")
    differentiate = jax.value_and_grad if with_value else jax.grad
    step = differentiate(build(program, outer, remat=True), (0, 1))
    plain = differentiate(build(program, outer, remat=False), (0, 1))
    count, twin = count_model_flops(step, w, x), count_model_flops(plain, w, x)
    assert (count.forward, count.backward) == (twin.forward, twin.backward)
    forward = sum(repeats * FORWARD[kind] for kind, _, repeats, _, _ in program)
    assert (count.forward, count.backward) == (forward, 2 * forward)
    assert twin.rematerialized == 0
    assert 0 <= count.rematerialized <= 2 * forward
    if with_value:
        # JAX's own names for what it does again add up to the same.
        _, as_written = _counted(step, (w, x), {})
        named = sum(n for m, n in as_written.flops.items() if m.phase == "rematerialized")
        assert count.rematerialized == named


@pytest.mark.full
def test_tracing_a_405b_step_takes_little_work_and_memory():
    """Llama 3.1 405B: 126 layers scanned, width 16384, 128 heads of 128, 8 of them for keys."""
    layers, width, mlp_width, vocabulary, heads, kv_heads, size = (
        126, 16384, 53248, 128256, 128, 8, 128,
    )  # fmt: skip
    batch, sequence = 8, 8192

    def weight(*sizes):
        return jax.ShapeDtypeStruct(sizes, "bfloat16")

    params = {
        "embedding": weight(vocabulary, width),
        "head": weight(width, vocabulary),
        "layers": {
            "q": weight(layers, width, heads, size),
            "k": weight(layers, width, kv_heads, size),
            "v": weight(layers, width, kv_heads, size),
            "o": weight(layers, heads, size, width),
            "gate": weight(layers, width, mlp_width),
            "up": weight(layers, width, mlp_width),
            "down": weight(layers, mlp_width, width),
        },
    }

    def layer(x, w):
        q, k, v = (jnp.einsum("bsd,dhk->bshk", x, w[name]) for name in "qkv")
        x += jnp.einsum("bshk,hkd->bsd", jax.nn.dot_product_attention(q, k, v), w["o"])
        return x + (jax.nn.silu(x @ w["gate"]) * (x @ w["up"])) @ w["down"], None

    def loss(params, tokens):
        x, _ = jax.lax.scan(jax.checkpoint(layer), params["embedding"][tokens], params["layers"])
        return jnp.sum(jax.nn.logsumexp(x @ params["head"], axis=-1))

    @jax.jit
    def step(params, tokens):
        value, gradient = jax.value_and_grad(loss)(params, tokens)
        return value, jax.tree.map(lambda p, g: p - g, params, gradient)

    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    tokens_of_batch = jax.ShapeDtypeStruct((batch, sequence), "int32")
    count, calls = count_calls(lambda: count_model_flops(step, params, tokens_of_batch))
    assert calls < 1_000_000
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 2 * 2**20  # KiB
    matrices = 2 * width * (heads + kv_heads) * size + 3 * width * mlp_width
    tokens = batch * sequence
    weights = 2 * tokens * (layers * matrices + width * vocabulary)
    pairs = layers * 2 * 2 * batch * heads * sequence**2 * size
    assert count.total == 3 * (weights + pairs)
    assert count.weights == 3 * weights
    # jax.nn keeps the scores, and so their cotangent, in float32: that meets q and k.
    assert count.by_dtype == {"bf16": count.total - pairs, "f32": pairs}
