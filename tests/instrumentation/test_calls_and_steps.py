"""Several calls that make one step, and several steps in one call, against hand arithmetic."""

from __future__ import annotations

import itertools
import json
import threading
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import mfu_jax
from mfu_jax.errors import UserError
from mfu_jax.instrumentation import program_analysis
from mfu_jax.instrumentation.counts import count_program
from mfu_jax.instrumentation.options import resolve
from mfu_jax.instrumentation.outputs import select_metrics
from mfu_jax.instrumentation.program_analysis import ProgramAnalysis
from mfu_jax.logger.metric_logger import MetricLogger
from mfu_jax.logger.records.step_cost import StepCost
from tests.support.sinks import ListSink

ROWS, D, F = 2, 8, 4
# x @ w, and the gradient of w; x has none.
CALL_FLOPS = 2 * (2 * ROWS * D * F)
TOKENS = 64  # of a step
OPTIONS: dict[str, Any] = {
    "peak_tflops_per_device": 1.0,
    "tokens_per_step": TOKENS,
    "warmup_steps": 0,
}


def loss_of(w: jax.Array, x: jax.Array) -> jax.Array:
    return jnp.mean((x @ w) ** 2)


def batch(number: int) -> jax.Array:
    return jnp.full((ROWS, D), number / 10, jnp.float32)


def assert_rates(memory: ListSink, flops: int, steps: range) -> None:
    """Every step has these FLOPs and the tokens of one, and rates of its own time."""
    assert memory.steps == list(steps)
    assert memory.scalar("perf/per_device_tflops") == [flops / 1e12] * len(steps)
    assert memory.scalar("perf/per_device_tokens") == [TOKENS] * len(steps)
    for record in memory.records:
        seconds = record.scalars["perf/step_time_seconds"]
        assert record.scalars["perf/mfu"] == pytest.approx(flops / seconds / 1e12)
        assert record.scalars["perf/hfu"] == record.scalars["perf/mfu"]


@pytest.mark.full
def test_four_calls_with_accumulated_gradients_are_a_step() -> None:
    optimizer = optax.MultiSteps(optax.sgd(0.1), 4)

    @jax.jit
    def micro_step(w: jax.Array, state: Any, x: jax.Array) -> Any:
        loss, gradient = jax.value_and_grad(loss_of)(w, x)
        updates, state = optimizer.update(gradient, state, w)
        return optax.apply_updates(w, updates), state, loss

    def losses(step: Any) -> list[float]:
        w = jnp.ones((D, F))
        state, found = optimizer.init(w), []
        for number in range(14):  # the last two complete no step
            w, state, loss = step(w, state, batch(number))
            found.append(float(loss))
        return found

    memory = ListSink()
    step = mfu_jax.instrument(micro_step, calls_per_step=4, sinks=[memory], **OPTIONS)
    found = losses(step)
    assert found == losses(micro_step)
    step.close()
    assert_rates(memory, 4 * CALL_FLOPS, range(3))
    assert step.flops.model.per_device == CALL_FLOPS
    means = [np.mean(found[4 * i : 4 * i + 4], dtype=np.float32) for i in range(3)]
    assert memory.scalar("learning/loss") == pytest.approx(means)
    setup = dict(memory.texts)["setup/values"]
    assert "calls per step: 4\n" in setup
    assert f"tokens per device per call: {TOKENS / 4}" in setup
    ledger = dict(memory.texts)["ledger/micro_step"]
    assert ledger.splitlines()[1].startswith("  FLOPs per call per device ")
    assert step.ledger.to_json()["unit"] == "call"


@pytest.mark.full
def test_a_step_is_three_calls_that_accumulate_and_one_that_updates() -> None:
    memory = ListSink()
    logger = MetricLogger(calls_per_step=4, sinks=[memory], warmup_steps=0)
    options = {"logger": logger, "peak_tflops_per_device": 1.0, "tokens_per_step": TOKENS}

    @mfu_jax.instrument(**options)
    @jax.jit
    def accumulate(w: jax.Array, total: jax.Array, x: jax.Array) -> Any:
        loss, gradient = jax.value_and_grad(loss_of)(w, x)
        return total + gradient, {"loss": loss}

    @mfu_jax.instrument(metrics=lambda output: output[1], **options)
    @jax.jit
    def update(w: jax.Array, total: jax.Array) -> Any:
        normed = total @ total.T @ total  # so that the update has FLOPs, too
        return w - 0.1 * normed, {"norm": jnp.abs(total).sum()}

    w = jnp.ones((D, F))
    for _ in range(3):
        total = jnp.zeros((D, F))
        for number in range(3):
            total, _ = accumulate(w, total, batch(number))
        w, _ = update(w, total)
    logger.close()
    assert_rates(memory, 3 * CALL_FLOPS + 2 * (2 * D * F * D), range(3))
    assert None not in memory.scalar("learning/loss") + memory.scalar("learning/norm")


def test_a_run_of_too_few_calls_for_a_step_says_why_nothing_is_logged(
    caplog: pytest.LogCaptureFixture,
) -> None:
    logger = MetricLogger(calls_per_step=4, sinks=[memory := ListSink()])
    for _ in range(2):
        logger.observe_call("f", {"loss": 1.0}, StepCost(model_flops_per_device=1), None)
    logger.close()
    assert memory.records == []
    (message,) = caplog.messages
    assert message.startswith("the run ended after 2 calls, and nothing is logged: calls_per_step")


@pytest.mark.full
def test_two_functions_share_the_logger_and_the_files_of_the_first(tmp_path: Path) -> None:
    """As docs/integration.md and docs/phases.md have it: two halves of a step, one run folder."""
    first = mfu_jax.instrument(
        jax.jit(lambda w, x: {"loss": loss_of(w, x)}),
        run_dir=str(tmp_path),
        calls_per_step=2,
        **OPTIONS,
    )
    second = mfu_jax.instrument(
        jax.jit(lambda w: {"norm": jnp.sum(w.T @ w)}),
        metrics=lambda output: output,
        logger=first.logger,
    )
    memory = ListSink()
    logger = MetricLogger(sinks=[memory])  # a logger of the user's has its set-up, too
    logger.write_setup(texts={"config": "steps=2"})
    third = mfu_jax.instrument(jax.jit(lambda w: {"norm": jnp.sum(w)}), logger=logger)
    w = jnp.ones((D, F))
    for number in range(3):
        first(w, batch(number))
        second(w)
        third(w)
    first.close()
    third.logger.close()
    assert "devices: 1 × cpu" in dict(memory.texts)["setup/values"]
    assert logger.setup["texts"] == {"config": "steps=2"}
    log = (tmp_path / "metrics.jsonl.events.0.jsonl").read_text()
    assert log.count("devices") == 1, "the second step's set-up is what differs from the first's"
    assert '"tag":"setup/' in log
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [0, 1, 2]
    flops = 2 * ROWS * D * F + 2 * F * D * F
    assert [line["perf/per_device_tflops"] for line in lines] == [flops / 1e12] * 3
    assert [line["perf/per_device_tokens"] for line in lines] == [TOKENS] * 3
    for line in lines:  # relative to the peak of 1 TFLOP/s that the first was given
        assert line["perf/mfu"] == pytest.approx(flops / 1e12 / line["perf/step_time_seconds"])
    assert all("learning/loss" in line and "learning/norm" in line for line in lines)


def test_a_chip_of_its_own_or_traced_flops_are_not_the_first_functions() -> None:
    """It would have the H100 at 500 TFLOP/s, and refuse a convention that it was not given."""
    options = {"convention": "palm", "peak_tflops_per_device": 500.0, "sinks": []}
    first = mfu_jax.instrument(loss_of, flops_source={"model_name": "llama2-7b"}, **options)
    with first.logger as logger:
        second, _ = resolve(None, {"hardware": "h100"}, None, logger)
        third, _ = resolve(None, {}, {"model_name": "llama2-7b"}, logger)
    assert (second.peak_tflops_per_device, second.convention) == (None, "maxtext")
    assert (third.peak_tflops_per_device, third.convention) == (500.0, "palm")


@pytest.mark.full
def test_a_call_that_scans_four_steps_logs_each(tmp_path: Path) -> None:
    @jax.jit
    def four_steps(w: jax.Array, xs: jax.Array) -> Any:
        def body(w: jax.Array, x: jax.Array) -> Any:
            loss, gradient = jax.value_and_grad(loss_of)(w, x)
            return w - 0.1 * gradient, {"loss": loss, "norm": jnp.abs(gradient).sum()}

        return jax.lax.scan(body, w, xs)

    memory = ListSink()
    trace = {"profile_steps": "14", "profile_dir": str(tmp_path)}  # in the second call
    options = {**OPTIONS, **trace, "steps_per_call": 4, "start_step": 8}
    step = mfu_jax.instrument(four_steps, sinks=[memory], **options)
    w, losses, norms = jnp.ones((D, F)), [], []
    for number in range(3):
        w, metrics = step(w, jnp.stack([batch(number + i) for i in range(4)]))
        losses += metrics["loss"].tolist()
        norms += metrics["norm"].tolist()
    summary = step.close()
    assert_rates(memory, CALL_FLOPS, range(8, 20))
    assert step.flops.model.per_device == 4 * CALL_FLOPS
    assert memory.scalar("learning/loss") == losses
    assert memory.scalar("learning/norm") == norms
    seconds = memory.scalar("perf/step_time_seconds")
    assert seconds[4:8] == [seconds[4]] * 4
    assert [record.kind for record in memory.records] == ["compile"] * 4 + ["step"] * 8
    assert summary.steps == 8
    assert memory.records[-1].scalars["profile/last_step"] == 14
    assert sum(seconds) < summary.total_seconds


@pytest.mark.parametrize("widths", [(D, 10, 10), (10, 10), (D, 10)])
@pytest.mark.parametrize("is_named", [True, False])
def test_parameters_as_wide_as_a_call_has_steps_are_no_loss(
    widths: tuple[int, ...], is_named: bool
) -> None:
    @jax.jit
    def ten_steps(layers: Any, xs: jax.Array) -> Any:
        def loss_of(layers: Any, x: jax.Array) -> jax.Array:
            for w, b in layers:
                x = x @ w + b
            return jnp.mean(x**2)

        def body(layers: Any, x: jax.Array) -> Any:
            loss, gradient = jax.value_and_grad(loss_of)(layers, x)
            layers = jax.tree.map(lambda p, g: p - 0.01 * g, layers, gradient)
            return layers, {"train_loss": loss, "rows": x.mean(1)} if is_named else loss

        return jax.lax.scan(body, layers, xs)

    memory = ListSink()
    step = mfu_jax.instrument(ten_steps, sinks=[memory], steps_per_call=10, **OPTIONS)
    sizes = itertools.pairwise(widths)
    layers = [(np.full(size, 0.1, np.float32), np.arange(size[1]) / 10.0) for size in sizes]
    _, found = step(layers, np.ones((10, ROWS, widths[0]), np.float32))
    step.close()
    name = "train_loss" if is_named else "loss"
    assert memory.scalar(f"learning/{name}") == (found[name] if is_named else found).tolist()
    assert {n for n in memory.records[0].scalars if n.startswith("learning/")} == {
        f"learning/{name}"
    }


@pytest.mark.parametrize(
    "output",
    [
        {"loss": np.arange(4.0), "rate": np.float32(0.5)},  # the loop's own, beside a scan's
        (
            np.ones((4, 2)),
            {"loss": np.arange(4.0), "state": {"w": np.ones((2, 4)), "b": np.ones(4)}},
        ),
    ],
)
def test_a_mapping_with_a_loss_may_have_more_than_a_scans_outputs(output: Any) -> None:
    selection = select_metrics(output, steps=4)
    assert selection.read(output)["loss"].shape == (4,)
    assert "b" not in selection.text


@pytest.mark.parametrize("has_names", [True, False])
@pytest.mark.parametrize("steps", [4, 17])
def test_chosen_losses_are_those_of_each_step_of_a_call(has_names: bool, steps: int) -> None:
    scan = jax.jit(lambda w, xs: jax.lax.scan(lambda w, x: (w * 0.9, jnp.mean(w * x)), w, xs))
    memory = ListSink()
    step = mfu_jax.instrument(
        scan,
        metrics=lambda out: {"loss": out[1], "norm": out[0]} if has_names else out[1],
        steps_per_call=steps,
        sinks=[memory],
        **OPTIONS,
    )
    _, losses = step(jnp.float32(1.0), np.ones((steps, ROWS, 1), np.float32))
    step.close()
    mean = np.mean(losses, dtype=np.float32)  # docs/integration.md: of more than 16 steps
    expected = losses.tolist() if steps <= 16 else [pytest.approx(mean)] * steps
    assert memory.scalar("learning/loss") == expected


@pytest.mark.full
def test_a_late_count_is_in_every_step_of_a_few_long_calls(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    all_called = threading.Event()
    wait = ProgramAnalysis._wait

    def count_late(*args: Any, **kwargs: Any) -> Any:
        assert all_called.wait(30)
        return count_program(*args, **kwargs)

    def waited(analysis: ProgramAnalysis) -> Any:
        assert all_called.wait(30)  # all steps are waiting before the first one's cost is asked for
        return wait(analysis)

    monkeypatch.setattr(program_analysis, "count_program", count_late)
    monkeypatch.setattr(ProgramAnalysis, "_wait", waited)
    memory = ListSink()
    scan = jax.jit(lambda w, xs: jax.lax.scan(lambda w, x: (w, loss_of(w, x)), w, xs))
    step = mfu_jax.instrument(scan, sinks=[memory], steps_per_call=128, **OPTIONS)
    for _ in range(3):
        step(np.ones((D, F), np.float32), np.ones((128, ROWS, D), np.float32))
    all_called.set()
    step.close()
    assert memory.steps == list(range(3 * 128))
    assert None not in memory.scalar("perf/hfu")


@pytest.mark.full
def test_given_flops_are_those_of_a_step_however_it_is_called() -> None:
    plain = jax.jit(lambda w, x: (w, {"loss": loss_of(w, x)}))
    for options, calls in (({"calls_per_step": 2}, 4), ({"steps_per_call": 2}, 1)):
        memory = ListSink()
        step = mfu_jax.instrument(plain, flops_source=1000, sinks=[memory], **options, **OPTIONS)
        for _ in range(calls):
            step(jnp.ones((D, F)), batch(1))
        step.close()
        assert memory.scalar("perf/per_device_tflops") == [1000 / 1e12] * 2
        assert memory.scalar("perf/per_device_tokens") == [TOKENS] * 2


def test_a_loop_that_records_says_how_many_steps_a_call_ran() -> None:
    memory = ListSink()
    cost = StepCost(model_flops_per_device=90, tokens_per_device=7, peak_flops_per_sec=1e3)
    with MetricLogger(sinks=[memory], warmup_steps=0) as logger:
        for last in (2, 5):
            metrics = {"loss": np.arange(3.0) + last, "rate": 0.5}
            logger.record(last, metrics, step_time_seconds=0.3, cost=cost, steps=3)
    assert memory.steps == list(range(6))
    assert memory.scalar("perf/step_time_seconds") == pytest.approx([0.1] * 6)
    assert memory.scalar("perf/per_device_tflops") == [30 / 1e12] * 6
    assert memory.scalar("perf/per_device_tokens") == pytest.approx([7 / 3] * 6)
    assert memory.scalar("perf/mfu") == pytest.approx([0.3] * 6)
    assert memory.scalar("learning/loss") == [2, 3, 4, 5, 6, 7]
    assert memory.scalar("learning/rate") == [0.5] * 6


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"calls_per_step": 0}, "calls_per_step=0: expected at least 1"),
        ({"steps_per_call": 0}, "steps_per_call=0: expected at least 1"),
        ({"calls_per_step": 2, "steps_per_call": 2}, "at most one above 1"),
    ],
)
def test_counts_that_cannot_be_are_refused(keys: dict[str, int], words: str) -> None:
    with pytest.raises(UserError, match=words):
        mfu_jax.instrument(jax.jit(loss_of), sinks=[], **keys)


def test_a_record_of_no_steps_is_refused() -> None:
    with MetricLogger(sinks=[]) as logger, pytest.raises(UserError, match="steps=0"):
        logger.record(0, {}, steps=0)


def test_calls_per_step_is_the_loggers() -> None:
    with pytest.raises(UserError, match="calls_per_step"):
        mfu_jax.instrument(jax.jit(loss_of), logger=MetricLogger(sinks=[]), calls_per_step=2)


def test_a_call_of_several_steps_is_refused_where_the_logger_joins_calls() -> None:
    with (
        MetricLogger(sinks=[], calls_per_step=2) as logger,
        pytest.raises(
            UserError, match=r"(?s)steps_per_call=2 and .* calls_per_step=2: .*at most one"
        ),
    ):
        mfu_jax.instrument(jax.jit(loss_of), logger=logger, steps_per_call=2)
