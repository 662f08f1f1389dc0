"""What `instrument` finds to log in a step's output, and what it says to wrong use."""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import pytest

import mfu_jax
from mfu_jax.errors import UserError
from mfu_jax.instrumentation.outputs import select_metrics
from tests.support.instrumented import (
    PEAK,
    STEP_FLOPS,
    batch,
    make_state,
    run,
    train_step,
)
from tests.support.sinks import ListSink


def test_steps_with_nothing_to_log_are_timed_all_the_same() -> None:
    memory = ListSink()

    def grow(state: jax.Array) -> jax.Array:
        return state @ state * 1e-3

    step = mfu_jax.instrument(jax.jit(grow, donate_argnums=0), sinks=[memory], **PEAK)
    state = jnp.ones((8, 8))
    for _ in range(3):
        state = step(state)
    step.close()
    assert [r.scalars["perf/per_device_tflops"] * 1e12 for r in memory.records] == [2 * 8**3] * 3
    assert not any(name.startswith("learning/") for name in memory.records[0].scalars)


@pytest.mark.parametrize(
    ("output", "expected"),
    [
        (lambda a: {"loss": a, "grads": jnp.ones(3)}, {"loss"}),
        (lambda a: (jnp.ones((2, 2)), {"loss": a, "accuracy": a}), {"loss", "accuracy"}),
        (lambda a: (jnp.ones(3), jnp.int32(1), a), {"output_1", "loss"}),
        (lambda a: ((a, {"x": a}), jnp.ones(3)), {"loss"}),
        (lambda a: (jnp.ones(3), {"train_loss": a, "big": jnp.ones(3)}), {"train_loss"}),
        (lambda a: a, {"loss"}),
    ],
)
def test_metrics_are_found_in_the_output(output: Callable[..., Any], expected: set[str]) -> None:
    memory = ListSink()
    step = mfu_jax.instrument(jax.jit(output), sinks=[memory], **PEAK)
    step(jnp.float32(0.5))
    step.close()
    found = {n for n in memory.records[0].scalars if n.startswith("learning/")}
    assert found == {f"learning/{name}" for name in expected}


def test_metrics_beside_a_bare_loss_are_named_with_what_logs_them() -> None:
    """``(loss, aux)`` is what ``jax.value_and_grad(has_aux=True)`` returns; a state is none."""
    one, two = jnp.float32(1.0), jnp.float32(2.0)
    state = {"w": jnp.ones((2, 2)), "step": jnp.int32(7)}
    output = (state, (one, {"accuracy": two}))
    text, _, advice = select_metrics(output).left_out.partition("; to log them, pass metrics=")
    assert text == "accuracy in output[1][1]"
    assert eval(advice)(output) == {"loss": one, "accuracy": two}
    assert select_metrics((state, one)).left_out == ""


class Named(NamedTuple):
    state: Any
    loss: Any


@jax.tree_util.register_dataclass
@dataclasses.dataclass(slots=True)
class Slotted:
    state: Any
    loss: Any


@pytest.mark.parametrize("kind", [Named, Slotted])
def test_a_loss_is_found_among_named_fields(kind: Any, caplog: pytest.LogCaptureFixture) -> None:
    memory = ListSink()
    step = mfu_jax.instrument(jax.jit(lambda a: kind(jnp.ones(3), a)), sinks=[memory], **PEAK)
    for _ in range(2):
        step(jnp.float32(0.5))
    step.close()
    assert memory.scalar("learning/loss") == [0.5, 0.5]
    assert not caplog.records


@pytest.mark.full
def test_metrics_chosen_by_the_user() -> None:
    memory = ListSink()
    step = mfu_jax.instrument(
        jax.jit(train_step), metrics=lambda out: {"mine": out[1]["loss"]}, sinks=[memory], **PEAK
    )
    outputs = run(step)
    step.close()
    assert memory.scalar("learning/mine") == [float(metrics["loss"]) for _, metrics in outputs]


def test_two_functions_are_parts_of_one_step() -> None:
    memory = ListSink()
    logger = mfu_jax.MetricLogger(sinks=[memory], warmup_steps=0)
    critic = mfu_jax.instrument(jax.jit(train_step), logger=logger, **PEAK)
    actor = mfu_jax.instrument(jax.jit(train_step), logger=logger, **PEAK)
    actor.__name__ = "actor"
    state = make_state()
    for _ in range(2):
        with logger.step() as step:
            critic(state, batch())
            critic(state, batch())
            actor(state, batch(8))
            step.log(loss=1.5)
    logger.close()
    assert memory.scalar("perf/per_device_tflops") == [4 * STEP_FLOPS / 1e12] * 2
    assert memory.scalar("learning/loss") == [1.5, 1.5]
    assert {"learning/train_step/loss", "learning/actor/loss"} < set(memory.records[0].scalars)


@pytest.mark.parametrize(
    ("output", "options"),
    [
        (lambda a: (jnp.ones(3), {"loss": a * jnp.ones(32)}), {}),
        (lambda a: a * jnp.ones((4, 8)), {"metrics": lambda out: out}),
        (lambda a: a * jnp.ones((4, 8)), {"metrics": lambda out: {"loss": out, "big": out}}),
    ],
)
def test_a_loss_of_each_example_is_logged_as_its_mean(output: Any, options: Any) -> None:
    memory = ListSink()
    step = mfu_jax.instrument(jax.jit(output), sinks=[memory], **PEAK, **options)
    step(jnp.float32(0.5))
    step.close()
    found = {k: v for k, v in memory.records[0].scalars.items() if k.startswith("learning/")}
    assert found == {"learning/loss": 0.5}


class Collection:
    """Shaped like one of clu.metrics."""

    def __init__(self, total: Any) -> None:
        self.total = total

    def compute(self) -> dict[str, Any]:
        return {"loss": self.total / 2}


jax.tree_util.register_pytree_node(
    Collection, lambda c: ((c.total,), None), lambda _, leaves: Collection(*leaves)
)


def test_what_cannot_be_read_gets_a_hint_that_works() -> None:
    memory = ListSink()
    jitted = jax.jit(lambda a: (jnp.ones(3), Collection(a)))
    step = mfu_jax.instrument(jitted, sinks=[memory], **PEAK)
    step(jnp.float32(3))
    step.close()
    assert "pass metrics=lambda output: output[1].compute()" in memory.texts[0][1]
    hinted = mfu_jax.instrument(
        jitted, metrics=lambda output: output[1].compute(), sinks=[memory], **PEAK
    )
    hinted(jnp.float32(3))
    hinted.close()
    assert memory.records[-1].scalars["learning/loss"] == 1.5


def test_scalars_without_a_loss_among_them_get_a_hint_that_works() -> None:
    memory = ListSink()
    jitted = jax.jit(lambda a: (a, {"accuracy": a.mean(), "w": a, "margin": a.max()}))
    step = mfu_jax.instrument(jitted, sinks=[memory], **PEAK)
    step(jnp.ones((8, 8)))
    step.close()
    hint = "if accuracy, margin in output[1] are metrics, pass metrics=lambda output: output[1]"
    assert hint in memory.texts[0][1]
    hinted = mfu_jax.instrument(jitted, metrics=lambda output: output[1], sinks=[memory], **PEAK)
    hinted(jnp.ones((8, 8)))
    hinted.close()
    assert memory.records[-1].scalars["learning/accuracy"] == 1.0


def test_metrics_that_fail_on_the_output_leave_the_times(caplog: pytest.LogCaptureFixture) -> None:
    memory = ListSink()
    step = mfu_jax.instrument(
        jax.jit(train_step), metrics=lambda out: out["loss"], sinks=[memory], **PEAK
    )
    run(step)
    step.close()
    (line,) = caplog.messages
    assert re.search(r"(?s)metrics of train_step are not logged: metrics=… failed.*usually", line)
    assert all(record.scalars["perf/step_time_seconds"] > 0 for record in memory.records)


def raises(*parts: str) -> Any:
    return pytest.raises(UserError, match="(?s)" + ".*".join(parts))


def test_a_short_vector_is_named_with_what_logs_it() -> None:
    jitted = jax.jit(lambda x: (x, {"loss": jnp.sum(x), "kl": jnp.stack([x[0], 2 * x[0]])}))
    memory = ListSink()
    found = mfu_jax.instrument(jitted, sinks=[memory], **PEAK)
    found(jnp.ones(3))
    found.close()
    assert "learning/kl/0" not in memory.records[0].scalars
    hint = (
        "metrics left out: kl [2]: scalars are found automatically; to log vectors of at most 16 "
        "numbers, too, pass metrics=lambda output: output[1]"
    )
    assert hint in memory.texts[0][1].splitlines()
    memory = ListSink()
    hinted = mfu_jax.instrument(jitted, metrics=lambda output: output[1], sinks=[memory], **PEAK)
    hinted(jnp.ones(3))
    hinted.close()
    assert memory.scalar("learning/loss") == [3.0]
    assert (memory.scalar("learning/kl/0"), memory.scalar("learning/kl/1")) == ([1.0], [2.0])
    assert "metrics left out" not in memory.texts[0][1]


def test_errors_say_what_to_do() -> None:
    step = mfu_jax.instrument(jax.jit(train_step), sinks=[], **PEAK)
    with raises("logged no call", "expected", "usually", "use what instrument"):
        _ = step.flops
    run(step, 1)
    step.close()
    with raises("called after close", "expected", "usually", "close it after"):
        step(make_state(), batch())
    with raises("given int", "expected the function", "usually", "pass the jitted"):
        mfu_jax.instrument(3)
    with raises("'log_perod'", "expected", "did you mean 'log_period'", "usually"):
        mfu_jax.instrument(train_step, log_perod=3)
    with raises("flops_source='trace'", "traced, analytic, value", "did you mean 'traced'"):
        mfu_jax.instrument(train_step, flops_source="trace")
    with (
        mfu_jax.MetricLogger(sinks=[]) as logger,
        raises("both given", "expected", "usually", "pass it to MetricLogger"),
    ):
        mfu_jax.instrument(train_step, logger=logger, log_period=3)
    with (
        mfu_jax.MetricLogger(sinks=[]) as logger,
        raises(r"b = instrument\(g, logger=a.logger\)", r"sinks=.*make_sink\('jsonl', path\)"),
    ):
        mfu_jax.instrument(train_step, logger=logger, run_dir="runs/a")
    with raises("no argument 'tokens'", r"b = instrument\(g, logger=a.logger\)", "make_sink"):
        mfu_jax.MetricLogger(calls_per_step=5, tokens=3)


@pytest.mark.parametrize("option", [{"prometheus_textfile": "a.prom"}, {"fsync_seconds": 1.0}])
def test_an_option_of_the_logger_is_not_ignored_beside_one(option: Any) -> None:
    with mfu_jax.MetricLogger(sinks=[]) as logger, raises(next(iter(option)), "both given"):
        mfu_jax.instrument(train_step, logger=logger, **option)


@pytest.mark.parametrize(
    "option",
    [
        {"metrics": "loss"},
        {"segment_ids": 4},
        {"logger": "console"},
        {"sinks": "console"},
        {"sinks": ["console"]},
        {"settings": {"log_period": 3}},
    ],
)
def test_an_option_of_the_wrong_kind_is_refused_at_once(option: Any) -> None:
    (name,) = option
    with raises(f"{name}=", "expected", "usually"):
        mfu_jax.instrument(jax.jit(train_step), **option)


class Broken:
    def __call__(self, x: jax.Array) -> jax.Array:
        raise TypeError("his own")


def _broken(x: jax.Array, y: int = 0) -> jax.Array:
    raise TypeError("his own")


@pytest.mark.parametrize(
    "step", [_broken, Broken(), Broken().__call__, functools.partial(_broken, y=1)]
)
def test_a_type_error_of_the_step_itself_stays_one(step: Any) -> None:
    instrumented = mfu_jax.instrument(step, sinks=[], **PEAK)
    with pytest.raises(TypeError, match="his own"):
        instrumented(batch())


def test_functions_that_cannot_be_jitted_say_so() -> None:
    step = mfu_jax.instrument(lambda x: float(x.sum()), sinks=[], **PEAK)
    with raises("cannot be jitted", "expected", "usually", "with logger.step"):
        step(batch())


def test_a_step_without_outputs_is_left_alone_inside_a_trace(
    caplog: pytest.LogCaptureFixture,
) -> None:
    step = mfu_jax.instrument(jax.jit(lambda x: None), sinks=[], **PEAK)
    jax.jit(lambda x: step(x))(batch())
    step.close()
    (line,) = caplog.messages
    assert "while JAX traces" in line


def test_calls_inside_another_trace_are_left_alone(caplog: pytest.LogCaptureFixture) -> None:
    memory = ListSink()
    step = mfu_jax.instrument(jax.jit(train_step), sinks=[memory], **PEAK)
    for _ in range(2):
        shapes = jax.eval_shape(step, make_state(), batch())
        assert shapes[1]["loss"].shape == ()
    jax.jit(lambda state, x: step(state, x))(make_state(), batch())
    run(step, 3)
    jax.eval_shape(step, make_state(), batch())
    step.close()
    assert [record.step for record in memory.records] == [0, 1, 2]
    (line,) = caplog.messages
    assert re.search("(?s)while JAX traces.*expected.*usually.*outermost", line)


def test_a_closed_logger_takes_no_step() -> None:
    logger = mfu_jax.MetricLogger(sinks=[])
    step = mfu_jax.instrument(jax.jit(train_step), logger=logger, **PEAK)
    run(step, 1)
    logger.close()
    with raises("after close", "expected", "usually", "close it after"):
        run(step, 1)
    with raises("after close", "expected", "usually"), logger.step() as scope:
        scope.log(loss=1.0)
