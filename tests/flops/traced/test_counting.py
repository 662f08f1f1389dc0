"""The traced count against arithmetic written out by hand."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest

from mfu_jax.errors import UserError
from mfu_jax.flops.executed.counting import executed_flops
from mfu_jax.flops.traced.counting import count_model_flops
from tests.support.small_functions import shape

# The reference transformer: batch, sequence, width, MLP, vocabulary, heads, layers.
B, S, D, F, V, H, L = 2, 128, 64, 256, 512, 4, 4

# Per layer: four D×D projections, two D×F of the MLP, scores and values over all S² pairs.
REFERENCE_LAYER = 4 * 2 * B * S * D * D + 2 * 2 * B * S * D * F + 2 * 2 * B * S * S * D
REFERENCE_FORWARD = L * REFERENCE_LAYER + 2 * B * S * D * V


def reference_layer(x, p):
    with jax.named_scope("attention"):
        q, k, v = ((x @ p[name]).reshape(B, S, H, D // H) for name in ("q", "k", "v"))
        scores = jnp.einsum("bshd,bthd->bhst", q, k)
        scores = jnp.where(jnp.tril(jnp.ones((S, S), bool)), scores, -1e9)
        values = jnp.einsum("bhst,bthd->bshd", jax.nn.softmax(scores), v)
        x = x + values.reshape(B, S, D) @ p["o"]
    with jax.named_scope("mlp"):
        return x + jax.nn.gelu(x @ p["up"]) @ p["down"]


def reference_params():
    shapes = dict.fromkeys("qkvo", (L, D, D)) | {"up": (L, D, F), "down": (L, F, D)}
    layers = {name: shape(*sizes) for name, sizes in shapes.items()}
    return {"layers": layers, "embedding": shape(V, D), "head": shape(D, V)}


def reference_step(scanned: bool, remat: bool):
    layer = jax.checkpoint(reference_layer) if remat else reference_layer

    def loss(params, tokens):
        x = params["embedding"][tokens]
        if scanned:
            x, _ = jax.lax.scan(lambda x, p: (layer(x, p), None), x, params["layers"])
        else:
            for i in range(L):
                x = layer(x, jax.tree.map(lambda p, i=i: p[i], params["layers"]))
        logits = x @ params["head"]
        return jax.nn.logsumexp(logits).sum() - logits.sum()

    @jax.jit
    def step(params, tokens):
        value, gradient = jax.value_and_grad(loss)(params, tokens)
        return value, jax.tree.map(lambda p, g: p - 0.1 * g, params, gradient)

    return step


@pytest.mark.full(keep=["False-True", "True-True", "True-False"])
@pytest.mark.parametrize("scanned", [True, False])
@pytest.mark.parametrize("remat", [True, False])
def test_reference_transformer(scanned, remat):
    count = count_model_flops(
        reference_step(scanned, remat), reference_params(), shape(B, S, dtype=jnp.int32)
    )
    assert count.forward == REFERENCE_FORWARD
    assert count.backward == 2 * REFERENCE_FORWARD
    assert count.total == 452_984_832
    # Full remat does the forward of every layer again, but for the MLP's last matmul.
    again = L * (REFERENCE_LAYER - 2 * B * S * F * D)
    assert count.rematerialized == (again if remat else 0) == (100_663_296 if remat else 0)
    assert count.activations == 3 * L * 2 * 2 * B * S * S * D
    assert count.weights == count.total - count.activations
    assert count.by_dtype == {"f32": count.total}
    assert count.by_primitive == {"dot_general": count.total}
    assert count.by_scope == {
        "attention": 3 * L * (4 * 2 * B * S * D * D + 2 * 2 * B * S * S * D),
        "mlp": 3 * L * 2 * 2 * B * S * D * F,
        "": 3 * 2 * B * S * D * V,
    }
    assert count.unaccounted == ()


@pytest.mark.full
@pytest.mark.parametrize(("scanned", "remat"), [(True, True), (True, False), (False, False)])
def test_traced_equals_executed_on_cpu(scanned, remat):
    """The CPU compiler merges what an *unrolled* checkpoint does again: that one is left out."""
    arguments = reference_params(), shape(B, S, dtype=jnp.int32)
    step = reference_step(scanned, remat)
    count = count_model_flops(step, *arguments)
    executed = executed_flops(step.lower(*arguments).compile())
    assert executed.total == count.total + count.rematerialized
    assert executed.forward == count.forward
    assert executed.by_scope["mlp"] == count.by_scope["mlp"] + (
        L * 2 * B * S * D * F if remat else 0  # the first matmul of the MLP again
    )


def test_wrong_example_arguments_are_a_user_error():
    with pytest.raises(UserError, match=r"(?s)could not be traced.*eval_shape"):
        count_model_flops(lambda w, x: x @ w, shape(3, 4), shape(5, 6))
    with pytest.raises(UserError, match="pass the function and its arguments separately"):
        count_model_flops(3)


def test_a_random_key_made_inside_counts_like_one_passed_in() -> None:
    def noisy(w, x, key):
        keep = jax.random.bernoulli(jax.random.fold_in(key, 1), 0.5, x.shape)
        return jnp.sum((x * keep) @ w)

    def with_own_key(w, x):
        return noisy(w, x, jax.random.key(0))

    w, x = shape(8, 4), shape(2, 8)
    key = jax.eval_shape(lambda: jax.random.key(0))
    own = count_model_flops(jax.value_and_grad(with_own_key), w, x)
    passed = count_model_flops(jax.value_and_grad(noisy), w, x, key)
    assert own.total == passed.total == 2 * (2 * 2 * 8 * 4)
    assert not own.unaccounted


def test_an_exported_function_is_listed():
    """Its jaxpr is gone: there is only its StableHLO."""
    x = shape(4, 8)
    call = jax.export.export(jax.jit(lambda x: x @ x.T))(x).call
    count = count_model_flops(call, x)
    assert [item.name for item in count.unaccounted] == ["call_exported"]
