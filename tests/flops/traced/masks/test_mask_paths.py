"""Scores on several paths: each matmul needs the pairs of its own path, a product those of all.

One layer has H heads of width D over S tokens, so a pair costs 2·H·D in each of its two products.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest

from mfu_jax.flops.traced.counting import count_model_flops
from tests.support.small_functions import shape

LAYERS, S, H, D, WINDOW = 4, 24, 2, 8, 4
NEVER = -1e30
PRODUCT = 2 * LAYERS * H * D  # of one pair, in all layers
ALL = S * S
CAUSAL = S * (S + 1) // 2
LOCAL = S * WINDOW - WINDOW * (WINDOW - 1) // 2


def causal():
    return jnp.arange(S)[:, None] >= jnp.arange(S)


def local():
    return causal() & (jnp.arange(S)[:, None] - jnp.arange(S) < WINDOW)


def softmax(mask, s):
    return jax.nn.softmax(jnp.where(mask, s, NEVER))


def layers(probabilities):
    """Scanned layers with a flag each."""

    def fn(weights, flags, x):
        def layer(x, given):
            w, flag = given
            heads = jnp.tanh(x @ w).reshape(1, S, H, D)
            s = jnp.einsum("bqhd,bkhd->bhqk", heads, heads)
            y = jnp.einsum("bhqk,bkhd->bqhd", probabilities(s, flag), heads)
            return y.reshape(1, S, H * D), None

        return jax.lax.scan(layer, x, (weights, flags))[0]

    return fn


def counted(probabilities):
    """Exact attention FLOPs forward and of a whole step, and the step's labels."""
    fn = layers(probabilities)
    arguments = shape(LAYERS, H * D, H * D), shape(LAYERS, dtype=jnp.bool_), shape(1, S, H * D)
    forward = count_model_flops(fn, *arguments)
    step = count_model_flops(jax.value_and_grad(lambda *given: fn(*given).sum()), *arguments)
    exact = (each.activations - each.skipped.get("exact", 0) for each in (forward, step))
    return *exact, set(step.by_mask)


# What a flag may choose needs at most the causal pairs: scores, values, and both twice backward.
FLAGS = {
    "where between scores": lambda s, flag: jax.nn.softmax(
        jnp.where(flag, jnp.where(local(), s, NEVER), jnp.where(causal(), s, NEVER))
    ),
    "where between masks": lambda s, flag: softmax(jnp.where(flag, local(), causal()), s),
    "cond between probabilities": lambda s, flag: jax.lax.cond(
        flag, lambda: softmax(local(), s), lambda: softmax(causal(), s)
    ),
    "cond between masks": lambda s, flag: softmax(jax.lax.cond(flag, local, causal), s),
    "a flag in the mask": lambda s, flag: softmax(local() | (causal() & flag), s),
}


@pytest.mark.parametrize("name", FLAGS)
def test_layers_that_choose_a_mask_by_a_flag_need_the_pairs_of_either(name):
    forward, step, labels = counted(FLAGS[name])
    assert (forward, step) == (2 * PRODUCT * CAUSAL, 6 * PRODUCT * CAUSAL)
    assert "at most causal" in labels


def test_scores_that_are_used_without_a_mask_too_are_all_needed():
    forward, step, _ = counted(lambda s, flag: softmax(causal(), s) + s)
    assert (forward, step) == (2 * PRODUCT * ALL, 6 * PRODUCT * ALL)


def test_scores_under_two_masks_need_the_wider_and_each_value_product_its_own():
    def both(s, flag):
        return softmax(local(), s), softmax(causal(), s)

    def fn(q, k, v):
        s = jnp.einsum("bqhd,bkhd->bhqk", q, k)
        return [jnp.einsum("bhqk,bkhd->bqhd", p, v) for p in both(s, None)]

    count = count_model_flops(fn, *[shape(1, S, H, D)] * 3)
    pair = 2 * H * D
    assert count.total_in("exact") == pair * (CAUSAL + LOCAL + CAUSAL)
    assert count.by_mask == {"causal": 2 * pair * ALL, f"window {WINDOW}": pair * ALL}


@pytest.mark.parametrize("fill", [0, -1])
def test_a_fill_that_does_not_mask_leaves_every_pair_to_the_values(fill):
    forward, step, _ = counted(lambda s, flag: jax.nn.softmax(jnp.where(causal(), s, fill)))
    # Backward: the cotangent of the probabilities and that of the values need all pairs, those of
    # the queries and the keys the causal ones.
    assert forward == PRODUCT * (CAUSAL + ALL)
    assert step == forward + 2 * PRODUCT * (CAUSAL + ALL)


def test_a_learned_fill_leaves_every_pair_to_the_values():
    def fn(q, k, v, fill):
        s = jnp.where(causal(), jnp.einsum("bqhd,bkhd->bhqk", q, k), fill)
        return jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(s), v)

    count = count_model_flops(fn, *[shape(1, S, H, D)] * 3, shape())
    assert count.total_in("exact") == 2 * H * D * (CAUSAL + ALL)


def test_zeros_after_the_softmax_mask_the_values_and_not_the_scores():
    for after in (lambda p: jnp.where(causal(), p, 0), lambda p: p * causal()):
        forward, step, _ = counted(lambda s, flag, after=after: after(jax.nn.softmax(s)))
        assert forward == PRODUCT * (ALL + CAUSAL)
        assert step == forward + 2 * PRODUCT * (ALL + CAUSAL)


def test_masked_scores_of_transposed_and_split_heads():
    def fn(q, k, v):
        s = jnp.where(causal(), jnp.einsum("bqhd,bkhd->bhqk", q, k), NEVER)
        p = jax.nn.softmax(s.reshape(H // 2, 2, S, S).transpose(3, 0, 1, 2), axis=0)
        return jnp.einsum("kghq,kghd->qghd", p, v.reshape(S, H // 2, 2, D))

    count = count_model_flops(fn, *[shape(1, S, H, D)] * 3)
    assert count.total_in("exact") == 2 * 2 * H * D * CAUSAL


def test_a_branch_that_leaves_scores_unmasked_makes_the_count_a_bound():
    def fn(q, k, v, flag):
        s = jnp.einsum("bqhd,bkhd->bhqk", q, k)
        s = jax.lax.cond(flag, lambda: jnp.where(causal(), s, NEVER), lambda: s)
        return jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(s), v)

    count = count_model_flops(fn, *[shape(1, S, H, D)] * 3, shape(dtype=jnp.bool_))
    assert count.total_in("exact") == count.unknown_masks == 2 * 2 * H * D * ALL


def masked(s):
    return jnp.where(causal(), s, NEVER)


def test_a_sink_beside_the_keys_leaves_the_mask_of_the_values():
    """gpt-oss: one more column in the softmax, whose weight is dropped."""

    def probabilities(s, flag):
        sink = jnp.broadcast_to(flag.astype(s.dtype), (*s.shape[:-1], 1))
        return jax.nn.softmax(jnp.concatenate([masked(s), sink], -1))[..., :-1]

    forward, step, labels = counted(probabilities)
    assert (forward, step) == (2 * PRODUCT * CAUSAL, 6 * PRODUCT * CAUSAL)
    assert labels == {"causal"}


def test_values_under_slices_of_masked_scores_need_the_pairs_of_each():
    def fn(q, k, v):
        early, late = jnp.split(masked(jnp.einsum("bqhd,bkhd->bhqk", q, k)), [6], axis=2)
        return [jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(s), v) for s in (early, late)]

    count = count_model_flops(fn, *[shape(1, S, H, D)] * 3)
    assert count.total_in("exact") == 2 * H * D * (CAUSAL + CAUSAL)


def sink_first(s):
    sink = jnp.zeros((*s.shape[:-1], 1))
    return jax.nn.softmax(jnp.concatenate([sink, masked(s)], -1))[..., 1:]


def two_sinks_one_left(s):
    sink = jnp.zeros((*s.shape[:-1], 1))
    s = jnp.concatenate([jnp.concatenate([masked(s), sink], -1), sink], -1)
    return jax.nn.softmax(s)[..., :-1]


BOUNDED = {
    "maximum": lambda s: jnp.maximum(s, -2e30),
    "minimum": lambda s: jnp.minimum(s, 5.0),
    "clip": lambda s: jnp.clip(s, -2e30, 5.0),
}


@pytest.mark.parametrize("name", BOUNDED)
def test_bounds_of_masked_scores_leave_their_mask(name):
    forward, step, labels = counted(lambda s, flag: jax.nn.softmax(BOUNDED[name](masked(s))))
    assert (forward, step) == (2 * PRODUCT * CAUSAL, 6 * PRODUCT * CAUSAL)
    # JAX 0.12's gradient selects by the scores
    assert labels in ({"causal"}, {"causal", "at most causal"})


BENT = {
    "tanh": lambda s: 30 * jnp.tanh(s / 30),
    "logistic": jax.nn.sigmoid,
    "log2": lambda s: jnp.log2(1 + jnp.square(s)),
    "erf": jax.lax.erf,
}


@pytest.mark.parametrize("name", BENT)
def test_what_bends_scores_leaves_their_mask_and_so_does_its_gradient(name):
    """JAX 0.12 has primitives of its own for some, such as 1 - x**2."""
    forward, step, _ = counted(lambda s, flag: jax.nn.softmax(masked(BENT[name](s))))
    assert (forward, step) == (2 * PRODUCT * CAUSAL, 6 * PRODUCT * CAUSAL)


MOVED = {
    "a sink before the keys": (sink_first, S),
    "two sinks, one of them left": (two_sinks_one_left, S + 1),
    "masked and unmasked scores in one array": (
        lambda s: jax.nn.softmax(jnp.stack([masked(s), s], 2).reshape(1, 2 * H, S, S))[:, :H],
        S,
    ),
    "reversed": (lambda s: jax.nn.softmax(masked(s)[..., ::-1]), S),
}


@pytest.mark.parametrize("move", MOVED)
def test_values_under_masked_scores_that_moved_are_a_bound(move):
    probabilities, keys = MOVED[move]

    def fn(q, k, v):
        p = probabilities(jnp.einsum("bqhd,bkhd->bhqk", q, k))
        return jnp.einsum("bhqk,bkhd->bqhd", p, v)

    count = count_model_flops(fn, *[shape(1, S, H, D)] * 2, shape(1, keys, H, D))
    assert count.unknown_masks == 2 * H * D * S * keys


def test_values_of_each_row_of_masked_scores_are_a_bound():
    def fn(q, k, v):
        return jax.lax.map(lambda row: jax.nn.softmax(row) @ v, masked(q @ k.T))

    count = count_model_flops(fn, *[shape(S, D)] * 3)
    assert count.unknown_masks == 2 * D * ALL


def test_gradients_through_rows_of_masked_scores_are_a_bound():
    def fn(weights, x):
        q, k, v = (jnp.tanh(x @ w) for w in weights)
        return jnp.sum((jax.nn.softmax(masked(q @ k.T)[jnp.array([1, 3])]) @ v) ** 2)

    count = count_model_flops(jax.value_and_grad(fn), [shape(D, D)] * 3, shape(S, D))
    # Forward and backward: the scores of all rows, and the values of two.
    assert count.by_mask == {"at most causal": 3 * 2 * D * ALL}
    assert count.unknown_masks == 3 * 2 * D * 2 * S


def test_rows_of_a_mask_on_each_device_are_no_mask_from_the_first_row_on():
    mesh = jax.sharding.AbstractMesh((4,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    rows, whole = jax.sharding.PartitionSpec("x"), jax.sharding.PartitionSpec()

    def attend(q, mask, k, v):
        return jax.nn.softmax(jnp.where(mask, q @ k.T, NEVER)) @ v

    def fn(weights, x):
        q, k, v = (jnp.tanh(x @ w) for w in weights)
        specs = {"in_specs": (rows, rows, whole, whole), "out_specs": rows}
        return jax.shard_map(attend, mesh=mesh, **specs)(q, causal(), k, v)

    count = count_model_flops(fn, [shape(D, D)] * 3, shape(S, D))
    assert count.activations == count.unknown_masks == 2 * 2 * D * ALL
    assert count.skipped == {}


CUT = {
    "a slice": lambda s: s[..., 3:, :],
    "a block": lambda s: jax.lax.dynamic_slice_in_dim(s, jnp.argmax(s[0, 0, 0]), 5, 2),
    "some rows": lambda s: s[:, :, jnp.array([1, 3])],
    "the last row": lambda s: s[:, :, -1:],
}


@pytest.mark.parametrize("cut", CUT)
def test_scores_of_which_a_part_is_used_are_a_bound(cut):
    def fn(q, k, v):
        s = CUT[cut](masked(jnp.einsum("bqhd,bkhd->bhqk", q, k)))
        return jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(s), v)

    count = count_model_flops(fn, *[shape(1, S, H, D)] * 3)
    assert count.by_mask["at most causal"] == 2 * H * D * ALL


def test_unmasked_scores_of_which_a_part_is_used_are_a_bound():
    def fn(q, k, v):
        s = jnp.einsum("bqhd,bkhd->bhqk", q, k)[:, :, 1:]
        return jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(s), v)

    count = count_model_flops(fn, *[shape(1, S, H, D)] * 3)
    assert (count.by_mask, count.unknown_masks) == ({"at most all pairs": 2 * H * D * ALL}, 0)


def distance():
    return jnp.arange(S)[:, None] - jnp.arange(S)


LOST = {
    "blocks before it": lambda flag: jnp.arange(S)[:, None] // 4 >= jnp.arange(S) // 4,
    "every other key": lambda flag: distance() % 2 == 0,
    "a window of data": lambda flag: distance() < jnp.where(flag, 3, S),
    "documents": lambda flag: (d := jnp.cumsum(jnp.arange(S) % 8 == 0))[:, None] == d,
    "a window or data, negated": lambda flag: ~(local() | flag) | causal(),
    "a window or data in a triangle, negated": lambda flag: ~(causal() & (local() | flag)),
    "the sum of two masks": lambda flag: local().astype(int) + causal().astype(int) == 2,
    "a window dropped or none": lambda flag: jax.lax.cond(
        flag, lambda: ~local(), lambda: jnp.zeros((S, S), bool)
    ),
}


@pytest.mark.parametrize("mask", LOST)
def test_a_mask_that_is_not_followed_is_an_unknown_one(mask):
    forward, step, _ = counted(lambda s, flag: jnp.where(LOST[mask](flag), jax.nn.sigmoid(s), 0))
    assert (forward, step) == (2 * PRODUCT * ALL, 6 * PRODUCT * ALL)
    fn = layers(lambda s, flag: jnp.where(LOST[mask](flag), jax.nn.sigmoid(s), 0))
    arguments = shape(LAYERS, H * D, H * D), shape(LAYERS, dtype=jnp.bool_), shape(1, S, H * D)
    assert count_model_flops(fn, *arguments).unknown_masks == 2 * PRODUCT * ALL
