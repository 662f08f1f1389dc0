"""Branches chosen by data: which one is counted, in every convention, and when it is said."""

from __future__ import annotations

import itertools

import jax
import jax.numpy as jnp
import pytest

from mfu_jax.flops.traced.counting import count_model_flops
from tests.support.small_functions import shape

S, D = 16, 4
SCORES_AND_VALUES = 2 * 2 * D  # FLOPs of a query-key pair
PROJECTION = 2 * S * D * D
DISTANCE = jnp.arange(S)[:, None] - jnp.arange(S)[None, :]
MASKS = {"causal": DISTANCE >= 0, "window 4": (DISTANCE >= 0) & (DISTANCE < 4)}
KEPT = {"causal": S * (S + 1) // 2, "window 4": 4 * S - 4 * 3 // 2}
FLAG = shape(dtype=jnp.int32)


def attention(mask=None):
    def attend(h):
        scores = h @ h.T
        if mask is not None:
            scores = jnp.where(mask, scores, -jnp.inf)
        return jax.nn.softmax(scores) @ h

    return attend


def choice(*branches):
    def fn(flag, w, x):
        return jax.lax.switch(flag, branches, x @ w)

    return fn


def count(*branches, fn=None):
    return count_model_flops(fn or choice(*branches), FLAG, shape(D, D), shape(S, D))


@pytest.mark.parametrize("order", list(itertools.permutations(MASKS)), ids=" then ".join)
def test_of_two_masks_the_one_that_keeps_more_is_counted_and_said(order):
    counted = count(*(attention(MASKS[name]) for name in order))
    assert counted.total == PROJECTION + S * S * SCORES_AND_VALUES
    assert counted.total_in("exact") == PROJECTION + KEPT["causal"] * SCORES_AND_VALUES
    assert counted.total_in("maxtext") == PROJECTION + S * S // 2 * SCORES_AND_VALUES
    assert counted.by_mask == {"causal": S * S * SCORES_AND_VALUES}
    (item,) = counted.unaccounted
    assert (item.name, item.times) == ("cond", 1)
    assert "causal" in item.reason
    assert "window 4" in item.reason


@pytest.mark.parametrize("masked_first", [True, False])
def test_a_masked_and_an_unmasked_branch(masked_first):
    branches = [attention(MASKS["causal"]), attention()]
    counted = count(*(branches if masked_first else branches[::-1]))
    assert counted.total_in("exact") == counted.total
    assert counted.by_mask == {}
    assert len(counted.unaccounted) == 1


def test_the_gradient_counts_the_same_branch():
    fn = choice(attention(MASKS["window 4"]), attention(MASKS["causal"]))

    def loss(w, x, flag):
        return jnp.sum(fn(flag, w, x) ** 2)

    counted = count_model_flops(jax.grad(loss), shape(D, D), shape(S, D), FLAG)
    assert counted.activations == 3 * S * S * SCORES_AND_VALUES
    kept = counted.activations - counted.skipped["exact"]
    assert kept == 3 * KEPT["causal"] * SCORES_AND_VALUES
    one = S * S * SCORES_AND_VALUES  # the gradient's branches see what either branch kept
    assert counted.by_mask == {"causal": one, "at most causal": 2 * one}
    # JAX 0.12 keeps the forward branches beside the gradient's
    assert {item.name for item in counted.unaccounted} == {"cond"}


def test_iterations_multiply_the_branch_that_is_counted():
    one = choice(attention(MASKS["window 4"]), attention(MASKS["causal"]))

    def fn(flag, w, x):
        return jax.lax.fori_loop(0, 3, lambda _, x: one(flag, w, x), x)

    counted = count(fn=fn)
    assert counted.skipped["exact"] == 3 * (S * S - KEPT["causal"]) * SCORES_AND_VALUES
    assert [item.times for item in counted.unaccounted] == [3]


def test_each_convention_counts_its_own_most_expensive_branch():
    """A window and two more products cost more than causal attention, but have fewer pairs."""

    def more(h):
        return attention(MASKS["window 4"])(h) + h @ (h.T @ h)

    both = [attention(MASKS["causal"]), more]
    dense, kept = (
        count(each, each).total_in(convention)
        for each, convention in ((more, "dense"), (both[0], "exact"))
    )
    assert count(more, more).total_in("exact") < kept
    for branches in (both, both[::-1]):
        counted = count(*branches)
        assert counted.total == dense
        assert counted.total_in("exact") == kept
        assert len(counted.unaccounted) == 1


def test_a_choice_inside_a_choice():
    def inner(h):
        flag = jnp.sum(h) > 0
        window, causal = (attention(MASKS[name]) for name in ("window 4", "causal"))
        return jax.lax.cond(flag, causal, window, h)

    counted = count(attention(MASKS["window 4"]), inner)
    assert counted.by_mask == {"causal": S * S * SCORES_AND_VALUES}
    assert counted.total_in("exact") == PROJECTION + KEPT["causal"] * SCORES_AND_VALUES
    assert sum(item.times for item in counted.unaccounted) == 2


@pytest.mark.parametrize("wide_first", [True, False])
def test_of_two_dtypes_the_wider_is_counted_and_said(wide_first):
    def of(dtype):
        return lambda x, w: (x.astype(dtype) @ w.astype(dtype)).astype(jnp.float32)

    branches = [of(jnp.float32), of(jnp.bfloat16)]
    if not wide_first:
        branches.reverse()

    def fn(flag, w, x):
        return jax.lax.switch(flag, branches, x, w)

    counted = count(fn=fn)
    assert counted.by_dtype == {"f32": PROJECTION}
    (item,) = counted.unaccounted
    assert "f32" in item.reason
    assert "bf16" in item.reason


def test_a_weight_and_an_activation_are_different_kinds():
    def fn(flag, w, x):
        h = x @ w
        return jax.lax.cond(flag > 0, lambda: h @ w, lambda: h @ h[:D])

    counted = count(fn=fn)
    assert counted.total == 2 * PROJECTION
    (item,) = counted.unaccounted
    assert "weights" in item.reason
    assert "activations" in item.reason


def test_branches_of_one_tally_need_no_word():
    counted = count(attention(MASKS["causal"]), lambda h: attention(MASKS["causal"])(jnp.tanh(h)))
    assert counted.by_mask == {"causal": S * S * SCORES_AND_VALUES}
    assert counted.unaccounted == ()
