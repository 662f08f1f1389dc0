"""Steps that a function of somebody else's builds, found by name."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from mfu_jax.errors import UserError
from mfu_jax.integrations.built_steps import instrumented_jit, paused
from mfu_jax.settings import Settings
from tests.support.sinks import ListSink

ROWS, WIDTH, OUT = 2, 8, 4
FLOPS = 2 * (2 * ROWS * WIDTH * OUT)  # forward, and the gradient of the weights


def update(w: Any, x: Any) -> Any:
    loss, gradient = jax.value_and_grad(lambda w: jnp.sum((x @ w) ** 2))(w)
    return w - 0.1 * gradient, loss


def other(x: Any) -> Any:
    return x * 2


JITS = {
    "called": lambda function: jax.jit(function, donate_argnums=0),
    "decorator": lambda function: jax.jit(donate_argnums=0)(function),
    "partial": lambda function: functools.partial(jax.jit, donate_argnums=0)(function),
}


@pytest.mark.parametrize("jit", JITS)
def test_the_named_function_is_measured_however_it_is_jitted(jit: str) -> None:
    memory = ListSink()
    before = jax.jit
    with instrumented_jit("update", peak_tflops_per_device=1, sinks=[memory]) as steps:
        step, also = JITS[jit](update), jax.jit(other)
        w = jnp.ones((WIDTH, OUT))
        for _ in range(3):
            w, _ = step(w, also(jnp.ones((ROWS, WIDTH))))
    assert jax.jit is before
    assert [len(steps), len(memory.records)] == [1, 3]
    assert steps[0].flops.model.per_device == FLOPS


def test_an_error_inside_is_the_users_and_the_patch_ends() -> None:
    before, memory = jax.jit, ListSink()

    def fails() -> None:
        with instrumented_jit("update", sinks=[memory]):
            step = jax.jit(update)
            step(jnp.ones((WIDTH, OUT)), jnp.ones((ROWS, WIDTH)))
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fails()
    assert jax.jit is before
    assert [record.step for record in memory.records] == [0]


def test_wrong_options_are_said_where_the_step_is_jitted() -> None:
    with pytest.raises(UserError, match="peak"), instrumented_jit("update", peak=1):
        jax.jit(update)


def test_a_paused_function_is_no_part_of_a_step() -> None:
    memory = ListSink()
    with instrumented_jit("update", peak_tflops_per_device=1, sinks=[memory]) as steps:
        step, w = jax.jit(update), jnp.ones((WIDTH, OUT))
        evaluate = paused(lambda w: float(w.sum()), "eval", steps[0])
        for _ in range(3):
            w, _ = step(w, jnp.ones((ROWS, WIDTH)))
            evaluate(w)
    assert all("goodput/eval_seconds" in record.scalars for record in memory.records)


def test_a_function_built_twice_goes_on_in_one_run(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """As brax's ``train`` does when it is called twice; also with the settings of flags."""

    def fit(scale: float) -> None:
        def update(w: Any, x: Any) -> Any:
            return w * scale, jnp.sum(x @ w)

        step, w = jax.jit(update), jnp.ones((WIDTH, OUT))
        for _ in range(3):
            w, _ = step(w, jnp.ones((ROWS, WIDTH)))

    settings = Settings(run_dir=str(tmp_path), peak_tflops_per_device=1)
    with instrumented_jit("update", settings=settings) as steps:
        fit(0.9)
        fit(0.8)
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == list(range(6))
    assert [step.flops.executed.total for step in steps] == [FLOPS // 2] * 2
    assert "still open" not in caplog.text
