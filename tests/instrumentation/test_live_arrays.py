"""What an observed loop keeps alive: the bare loop's arrays, and scalars of a step or two."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import mfu_jax
from tests.support.instrumented import PEAK
from tests.support.sinks import ListSink

BIG = (256, 256)
SCALAR_BYTES = 1024  # of all metrics under way; a weight or gradient has 262,144


def step_with(**options: Any) -> Any:
    def train_step(w: jax.Array, x: jax.Array) -> tuple[jax.Array, dict[str, Any]]:
        loss, gradient = jax.value_and_grad(lambda w: jnp.mean((x @ w) ** 2))(w)
        return w - 0.1 * gradient, {"loss": loss, "grads": {"w": gradient}, "state": gradient}

    return jax.jit(train_step, **options)


def grow(w: jax.Array, x: jax.Array) -> tuple[jax.Array, jax.Array]:
    return w + x, w * x


def live_bytes() -> int:
    gc.collect()
    return sum(array.nbytes for array in jax.live_arrays())


def peak_bytes(step: Callable[..., Any], **loop: Any) -> int:
    """The most bytes alive after a step, above those before the loop."""
    x = jnp.ones(BIG)
    before, most = live_bytes(), 0
    w = jnp.zeros(BIG)
    for number in range(5):
        w, out = step(w, x)
        if record := loop.get("record"):
            record(number, out)
        del out
        most = max(most, live_bytes() - before)
    return most


@pytest.mark.full
@pytest.mark.parametrize("donate", [(), (0,)])
def test_gradients_beside_the_loss_are_not_kept(donate: tuple[int, ...]) -> None:
    bare = peak_bytes(step_with(donate_argnums=donate))
    memory = ListSink()
    step = mfu_jax.instrument(step_with(donate_argnums=donate), sinks=[memory], **PEAK)
    ours = peak_bytes(step)
    step.close()
    assert ours <= bare + SCALAR_BYTES
    setup = dict(memory.texts)["setup/values"]
    assert "metrics left out: grads/w [256,256], state [256,256]" in setup
    assert all("learning/loss" in record.scalars for record in memory.records)


@pytest.mark.full
def test_a_step_of_big_outputs_is_timed_on_one_number() -> None:
    bare = peak_bytes(jax.jit(grow))
    memory = ListSink()
    step = mfu_jax.instrument(jax.jit(grow), sinks=[memory], **PEAK)
    ours = peak_bytes(step)
    step.close()
    assert ours <= bare + SCALAR_BYTES
    assert [record.step for record in memory.records] == [0, 1, 2, 3, 4]


@pytest.mark.full
def test_a_recording_loop_may_pass_its_whole_output() -> None:
    bare = peak_bytes(step_with())
    with mfu_jax.MetricLogger(sinks=[]) as logger:
        ours = peak_bytes(step_with(), record=logger.record)
    assert ours <= bare + SCALAR_BYTES
