"""Keras's ``model.fit`` on JAX; runs where Keras is installed (scripts/test_libraries.sh)."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mfu_jax.errors import UserError
from tests.support.examples import run_example
from tests.support.sinks import ListSink

os.environ.setdefault("KERAS_BACKEND", "jax")
keras = pytest.importorskip("keras")

from mfu_jax.integrations.keras import MfuCallback  # noqa: E402

ROWS, INPUTS, HIDDEN, CLASSES = 32, 8, 16, 4
STEPS, EPOCHS = 4, 2

pytestmark = pytest.mark.full


def fit(*callbacks: Any, **compiled: Any) -> dict[str, list[float]]:
    keras.utils.set_random_seed(0)
    layers = [keras.layers.Dense(HIDDEN, activation="relu"), keras.layers.Dense(CLASSES)]
    model = keras.Sequential([keras.Input((INPUTS,)), *layers])
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile("adam", loss, metrics=["accuracy"], **compiled)
    x = np.random.default_rng(0).normal(size=(STEPS * ROWS, INPUTS)).astype("float32")
    data = (x, np.arange(len(x)) % CLASSES)
    history = model.fit(
        *data,
        batch_size=ROWS,
        epochs=EPOCHS,
        validation_data=data,
        callbacks=list(callbacks),
        verbose=0,
    )
    assert np.isfinite(model.evaluate(*data, verbose=0)[0])  # after fit, nothing of ours is left
    return history.history


@pytest.mark.parametrize("steps_per_execution", [1, 2])
def test_model_fit_with_the_callback(steps_per_execution: int) -> None:
    bare = fit(steps_per_execution=steps_per_execution)
    memory = ListSink()
    callback = Kept(peak_tflops_per_device=1, sinks=[memory])
    measured = fit(callback, steps_per_execution=steps_per_execution)
    assert all(0 < value <= 1 for value in measured.pop("mfu") + measured.pop("hfu"))
    assert measured == bare
    records = memory.records
    assert [record.step for record in records] == list(range(EPOCHS * STEPS))
    # Keras logs the running mean of an epoch; its last value is the history's.
    assert records[-1].scalars["learning/loss"] == pytest.approx(bare["loss"][-1], rel=1e-6)
    evaluated = [i for i, r in enumerate(records) if r.scalars.get("goodput/eval_seconds")]
    assert evaluated == [STEPS - 1, 2 * STEPS - 1]  # validation is not a step's time
    flops = callback.kept.flops
    assert (
        flops.model.per_device
        == flops.executed.total
        == 2 * (2 * ROWS * INPUTS * HIDDEN) + 3 * (2 * ROWS * HIDDEN * CLASSES)
    )
    assert flops.ledger.residual == 0
    assert {flag for record in records for flag in record.flags} == set()


class Kept(MfuCallback):
    """Its step can be asked after the end."""

    kept: Any

    def on_train_end(self, logs: Any = None) -> None:
        self.kept = self.step
        super().on_train_end(logs)


def test_a_callback_that_measures_nothing_lets_fit_go_on() -> None:
    assert fit(MfuCallback(enable_mfu=False)) == fit()


def test_a_step_that_jax_does_not_compile_is_refused_with_the_way_out() -> None:
    with pytest.raises(UserError, match="jit_compile=True"):
        fit(MfuCallback(), run_eagerly=True)


def test_the_example(tmp_path: Path) -> None:
    rows, inputs, hidden = 512, 64, 256
    run = run_example("keras_fit", tmp_path)
    assert run.flops() == {2 * (2 * rows * inputs * hidden) + 3 * (2 * rows * hidden)}
