"""Branches decided by what is in a `jax.Ref`, or by the platform of the devices."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from mfu_jax.flops.traced.counting import count_model_flops

X, W = np.ones((4, 8), np.float32), np.ones((8, 8), np.float32)
PRODUCT = 2 * 4 * 8 * 8
ON_CPU = [jax.device_put(array, jax.devices("cpu")[0]) for array in (X, W)]


def test_a_branch_that_reads_a_reference_is_the_one_that_runs():
    def fn(x, w):
        calls = jax.new_ref(jnp.int32(0))

        @jax.jit
        def step(calls, x):
            calls[...] = calls[...] + 1
            with jax.named_scope("step"):
                return lax.cond(calls[...] == 2, lambda x: x @ w, lambda x: x @ w @ w, x)

        for _ in range(3):
            x = step(calls, x)
        return x

    count = count_model_flops(fn, X, W)
    assert (count.total, count.unaccounted) == ((2 + 1 + 2) * PRODUCT, ())
    assert count.by_scope == {"step": 5 * PRODUCT}


def test_a_counter_in_a_reference_is_followed_through_loops():
    def fn(x, w):
        step = jax.new_ref(jnp.int32(0))

        def body(x, _):
            x = lax.cond(step[...] % 3 == 0, lambda x: x @ w, lambda x: x, x)
            step[...] = step[...] + 1
            return x, None

        return lax.scan(body, x, None, length=7)[0]

    count = count_model_flops(fn, X, W)
    assert (count.total, count.unaccounted) == (3 * PRODUCT, ())  # steps 0, 3 and 6


def test_a_reference_with_data_leaves_the_branch_unknown():
    def fn(x, w):
        largest = jax.new_ref(x.max())
        return lax.cond(largest[...] > 0, lambda: x @ w, lambda: x @ w @ w)

    count = count_model_flops(fn, X, W)
    assert (count.total, len(count.unaccounted)) == (2 * PRODUCT, 1)


def by_platform(x, w):
    return lax.platform_dependent(
        x, w, cuda=lambda x, w: x @ w @ w, cpu=lambda x, w: x @ w, default=lambda x, w: x
    )


def test_a_branch_by_platform_is_that_of_the_arguments_devices():
    count = count_model_flops(by_platform, *ON_CPU)
    assert (count.total, count.unaccounted) == (PRODUCT, ())
    scanned = count_model_flops(
        lambda x, w: lax.scan(lambda x, _: (by_platform(x, w), None), x, None, length=5)[0],
        *ON_CPU,
    )
    assert (scanned.total, scanned.unaccounted) == (5 * PRODUCT, ())


def test_a_platform_that_no_branch_names_takes_the_default():
    def fn(x, w):
        return lax.platform_dependent(x, w, tpu=lambda x, w: x @ w, default=lambda x, w: x)

    assert count_model_flops(fn, *ON_CPU).total == 0


def test_without_devices_the_most_expensive_platform_is_counted_and_said():
    count = count_model_flops(by_platform, X, W)
    assert (count.total, len(count.unaccounted)) == (2 * PRODUCT, 1)
