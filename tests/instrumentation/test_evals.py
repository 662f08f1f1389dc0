"""Instrumented functions inside ``pause("eval")``: they belong to the eval, and are no steps."""

import asyncio
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import mfu_jax
from tests.support.sinks import ListSink

PEAK: dict[str, Any] = {"peak_tflops_per_device": 1.0}


@jax.jit
def train_step(w: jax.Array) -> tuple[jax.Array, dict[str, jax.Array]]:
    return w + 1.0, {"loss": w.sum()}


@jax.jit
def eval_step(w: jax.Array, x: jax.Array) -> dict[str, jax.Array]:
    return {"loss": (w * x).sum(), "accuracy": x.sum()}


def evaluated(pause: str, *, own: dict[str, float] | None = None) -> ListSink:
    """Two steps, and an eval of three calls after each."""
    sink = ListSink()
    with mfu_jax.MetricLogger(sinks=[sink], warmup_steps=0) as logger:
        train = mfu_jax.instrument(train_step, logger=logger, **PEAK)
        evaluate = mfu_jax.instrument(eval_step, logger=logger, **PEAK)
        w = jnp.zeros(())
        for step in range(2):
            w, _ = train(w)
            with logger.pause(pause):
                for x in (1.0, 2.0, 6.0):
                    evaluate(w, jnp.float32(x))
                if own:
                    logger.record_eval(step, own)
        train.close()
        evaluate.close()
    return sink


def test_calls_in_an_eval_are_no_steps_and_their_mean_is_the_evals() -> None:
    sink = evaluated("eval")
    assert sink.steps == [0, 1]
    assert sink.scalar("learning/loss") == [0.0, 1.0]
    assert sink.scalar("eval/loss") == [3.0, 6.0]
    assert sink.scalar("eval/accuracy") == [3.0, 3.0]
    assert all(record.scalars["goodput/eval_seconds"] > 0 for record in sink.records)


def test_what_the_loop_records_itself_counts() -> None:
    sink = evaluated("eval", own={"loss": 7.0})
    assert sink.scalar("eval/loss") == [7.0, 7.0]
    assert sink.scalar("eval/accuracy") == [3.0, 3.0]


def test_a_pause_of_the_loop_takes_the_calls_of_tasks_and_threads() -> None:
    sink = ListSink()
    logger = mfu_jax.MetricLogger(sinks=[sink], warmup_steps=0)
    train = mfu_jax.instrument(train_step, logger=logger, **PEAK)
    evaluate = mfu_jax.instrument(eval_step, logger=logger, **PEAK)

    def part(x: float) -> None:
        evaluate(jnp.float32(1), jnp.float32(x))

    async def main() -> None:
        w = jnp.zeros(())
        for _ in range(3):
            w, _ = train(w)
            with logger.pause("eval"):
                await asyncio.gather(*(asyncio.to_thread(part, x) for x in (1.0, 5.0)))
                part(6.0)

    asyncio.run(main())
    train(jnp.zeros(()))
    logger.close()
    assert sink.steps == [0, 1, 2, 3]
    assert sink.scalar("eval/loss") == [4.0, 4.0, 4.0, None]


@pytest.mark.parametrize("pause", ["sampling", "checkpoint"])
def test_calls_in_another_pause_are_no_steps_and_no_eval(pause: str) -> None:
    sink = evaluated(pause)
    assert sink.steps == [0, 1]
    assert not any(name.startswith("eval/") for r in sink.records for name in r.scalars)
