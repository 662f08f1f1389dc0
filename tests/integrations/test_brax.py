"""brax's PPO in its own loop; runs where brax is installed (scripts/test_libraries.sh)."""

from __future__ import annotations

import logging
from itertools import pairwise
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from tests.support.examples import run_example
from tests.support.sinks import ListSink

envs = pytest.importorskip("brax.envs")

from brax.training.agents.ppo import train as ppo  # noqa: E402

from mfu_jax.integrations import brax  # noqa: E402
from mfu_jax.integrations.built_steps import instrumented_jit  # noqa: E402

EPOCHS, TIMESTEPS = 2, 2048
ENVS, BATCH, MINIBATCHES, UNROLL, UPDATES = 16, 16, 2, 4, 2

pytestmark = pytest.mark.full


def train() -> Any:
    """Parameters that PPO finds, and what it reports after each epoch."""
    reports: list[tuple[int, dict[str, float]]] = []
    _, params, _ = ppo.train(
        environment=envs.get_environment("fast"),
        num_timesteps=TIMESTEPS,
        episode_length=64,
        num_envs=ENVS,
        num_evals=EPOCHS + 1,
        batch_size=BATCH,
        num_minibatches=MINIBATCHES,
        unroll_length=UNROLL,
        num_updates_per_batch=UPDATES,
        progress_fn=lambda step, metrics: reports.append((step, dict(metrics))),
    )
    return jax.tree.map(np.asarray, params), reports


def network(widths: list[int], rows: int, *, trained: bool) -> int:
    """FLOPs of a network's matmuls; nothing needs a gradient of the first one's input."""
    matmuls = [2 * rows * m * n for m, n in pairwise(widths)]
    return 3 * sum(matmuls) - matmuls[0] if trained else sum(matmuls)


def flops_of_an_epoch() -> int:
    """By hand: acting; then updates of policy and value, and the last states' values."""
    environment = envs.get_environment("fast")
    policy = [environment.observation_size, *[32] * 4, 2 * environment.action_size]
    value = [environment.observation_size, *[256] * 5, 1]
    rows = BATCH * UNROLL
    update = network(policy, rows, trained=True) + network(value, rows, trained=True)
    update += network(value, BATCH, trained=False)
    acting = network(policy, MINIBATCHES * rows, trained=False)
    training_steps = TIMESTEPS // EPOCHS // (MINIBATCHES * rows)
    return training_steps * (acting + UPDATES * MINIBATCHES * update)


def test_ppo_is_measured_and_unchanged() -> None:
    params, reports = train()
    memory = ListSink()
    with brax.instrumented(peak_tflops_per_device=1, sinks=[memory]) as steps:
        measured_params, measured_reports = train()
    jax.tree.map(np.testing.assert_array_equal, params, measured_params)
    losses = [report.get("training/total_loss") for _, report in reports]
    assert losses == [report.get("training/total_loss") for _, report in measured_reports]
    (epoch,) = steps
    assert epoch.flops.model.per_device == flops_of_an_epoch() // jax.device_count()
    assert epoch.ledger.residual == 0
    assert len(memory.records) == EPOCHS
    # The evaluations, whose policy is compiled in the first one, are no part of an epoch's time.
    assert all("goodput/eval_seconds" in record.scalars for record in memory.records)


def test_ppo_that_trains_again_goes_on_in_one_run() -> None:
    memory = ListSink()
    with brax.instrumented(peak_tflops_per_device=1, sinks=[memory]) as steps:
        train()
        train()
    assert [record.step for record in memory.records] == list(range(2 * EPOCHS))
    assert [step.flops.model.per_device for step in steps] == [
        flops_of_an_epoch() // jax.device_count()
    ] * 2
    assert all("goodput/eval_seconds" in record.scalars for record in memory.records)


def test_a_step_that_nothing_jits_is_told(caplog: pytest.LogCaptureFixture) -> None:
    with (
        caplog.at_level(logging.WARNING, "mfu_jax"),
        instrumented_jit("no_such_step", sinks=[]) as steps,
    ):
        jax.jit(lambda x: x + 1)(1)
    assert steps == []
    assert "nothing called 'no_such_step' was jitted, only <lambda>" in caplog.text


def test_the_example(tmp_path: Path) -> None:
    # Twice as many epochs and steps, so an epoch as above.
    assert run_example("brax_ppo", tmp_path).flops() == {flops_of_an_epoch()}
