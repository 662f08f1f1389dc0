"""Trainers of public packages that know nothing of this one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from absl import flags as absl_flags

import mfu_jax
from tests.support.floats import assert_close_as_float32
from tests.support.sinks import ListSink

eqx = pytest.importorskip("equinox")
optax = pytest.importorskip("optax")


@pytest.mark.full
@pytest.mark.parametrize("donate", ["none", "all"])
def test_equinox_loop(donate: str) -> None:
    optimizer = optax.adam(1e-3)

    @eqx.filter_jit(donate=donate)
    def make_step(model: Any, opt_state: Any, x: jax.Array) -> tuple[Any, Any, jax.Array]:
        def loss_fn(model: Any) -> jax.Array:
            return jnp.mean(jax.vmap(model)(x) ** 2)

        loss, grads = eqx.filter_value_and_grad(loss_fn)(model)
        updates, opt_state = optimizer.update(grads, opt_state, model)
        return eqx.apply_updates(model, updates), opt_state, loss

    memory = ListSink()
    make_step = mfu_jax.instrument(make_step, sinks=[memory], peak_tflops_per_device=1)
    model = eqx.nn.MLP(4, 2, 8, 2, key=jax.random.key(0))
    opt_state = optimizer.init(eqx.filter(model, eqx.is_array))
    for rows in (16, 16, 16, 32):
        model, opt_state, loss = make_step(model, opt_state, jnp.ones((rows, 4)))
    make_step.close()
    first, rest = 2 * 16 * 4 * 8, 2 * 16 * (8 * 8 + 8 * 2)
    per_step = 2 * first + 3 * rest
    counted = [record.scalars["perf/per_device_tflops"] * 1e12 for record in memory.records]
    assert counted == pytest.approx([per_step] * 3 + [2 * per_step], rel=1e-12)
    assert make_step.flops.executed.total == 2 * per_step
    assert memory.records[-1].scalars["learning/loss"] == float(loss)


def fit_flow() -> Any:
    """Fits a small normalizing flow with flowjax's own training loop; returns its losses."""
    from flowjax.distributions import Normal
    from flowjax.flows import masked_autoregressive_flow
    from flowjax.train import fit_to_data

    key = jax.random.key(0)
    flow = masked_autoregressive_flow(
        key, base_dist=Normal(jnp.zeros(2)), flow_layers=2, nn_width=8, nn_depth=1
    )
    x = jax.random.normal(key, (100, 2))
    _, losses = fit_to_data(key, flow, x, max_epochs=2, batch_size=30, show_progress=False)
    return losses["train"]


@pytest.fixture
def flowjax_loops() -> Any:
    return pytest.importorskip("flowjax.train.loops")


@pytest.mark.full
def test_flowjax_in_three_lines(flowjax_loops: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    bare = fit_flow()
    memory = ListSink()
    step = mfu_jax.instrument(flowjax_loops.step, sinks=[memory], peak_tflops_per_device=1)
    monkeypatch.setattr(flowjax_loops, "step", step)
    ours = fit_flow()
    step.close()
    np.testing.assert_array_equal(bare, ours)
    assert len(memory.records) == 2 * (90 // 30)
    flops = step.flops
    # The layers are a scan of two: XLA keeps the loop, and what it carries, as it is written.
    assert flops.model.per_device == flops.executed.total > 0


@pytest.mark.full
def test_flowjax_by_flags(
    flowjax_loops: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    path = tmp_path / "metrics.jsonl"
    values = absl_flags.FlagValues()
    mfu_jax.flags.define(values)
    values(["train", f"--metrics_file={path}", "--peak_tflops_per_device=1", "--log_period=2"])
    step = mfu_jax.instrument(flowjax_loops.step, settings=mfu_jax.flags.settings(values))
    monkeypatch.setattr(flowjax_loops, "step", step)
    losses = fit_flow()
    step.close()
    records = [json.loads(line) for line in path.read_text().splitlines()]
    logged = [record["learning/loss"] for record in records]
    means = np.reshape(logged, (2, -1)).mean(1)
    assert_close_as_float32(means, np.asarray(losses), terms=3)
    assert all(record["perf/mfu"] > 0 for record in records)
