"""Keras on JAX: the callback of docs/clients.md, run as it stands there.

No dependency of the tests. With `pip install keras` (3.15 was tried) this file runs; without it is
skipped.
"""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest

from tests.support.paths import DOCS
from tests.support.sinks import ListSink

ROWS, INPUTS, HIDDEN, CLASSES = 32, 8, 16, 4
STEPS, EPOCHS = 3, 2


@pytest.fixture
def keras(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setenv("KERAS_BACKEND", "jax")
    return pytest.importorskip("keras")


def callback_of_the_page() -> Any:
    page = (DOCS / "clients.md").read_text(encoding="utf-8")
    match = re.search(r"^```python\n(import jax, keras, mfu_jax\n.*?)^```\n", page, re.S | re.M)
    assert match is not None
    names: dict[str, Any] = {}
    exec(match[1], names)
    return names["Mfu"]


def fit(keras: Any, *callbacks: Any) -> dict[str, list[float]]:
    keras.utils.set_random_seed(0)
    layers = [keras.layers.Dense(HIDDEN, activation="relu"), keras.layers.Dense(CLASSES)]
    model = keras.Sequential([keras.Input((INPUTS,)), *layers])
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile("adam", loss, metrics=["accuracy"])
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


def test_model_fit_with_the_callback(keras: Any) -> None:
    bare = fit(keras)
    memory = ListSink()
    callback = callback_of_the_page()(peak_tflops_per_device=1, sinks=[memory])
    assert fit(keras, callback) == bare
    records = memory.records
    assert [record.step for record in records] == list(range(EPOCHS * STEPS))
    # Keras logs the running mean of an epoch; its last value is the history's.
    assert records[-1].scalars["learning/loss"] == pytest.approx(bare["loss"][-1], rel=1e-6)
    evaluated = [i for i, r in enumerate(records) if r.scalars.get("goodput/eval_seconds")]
    assert evaluated == [STEPS - 1, 2 * STEPS - 1]  # validation is not a step's time
    flops = callback.step.flops
    assert (
        flops.model.per_device
        == flops.executed.total
        == 2 * (2 * ROWS * INPUTS * HIDDEN) + 3 * (2 * ROWS * HIDDEN * CLASSES)
    )
    assert flops.ledger.residual == 0
    assert {flag for record in records for flag in record.flags} == set()
