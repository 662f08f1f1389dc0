"""kauldron's own trainer; runs where kauldron is installed (scripts/test_libraries.sh)."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
import pytest
from flax import linen as nn

pytest.importorskip("kauldron")

from kauldron import kd

from mfu_jax.integrations import kauldron
from tests.support.examples import run_example
from tests.support.sinks import ListSink

pytestmark = pytest.mark.full

STEPS, LOG_EVERY, EVAL_EVERY, SAVE_EVERY = 6, 2, 4, 3
BATCH, IN, HIDDEN, OUT = 8, 16, 32, 4


class Mlp(nn.Module):
    """Two layers."""

    x: kd.kontext.Key = kd.kontext.REQUIRED

    @nn.compact
    def __call__(self, x: Any) -> Any:
        return nn.Dense(OUT, use_bias=False)(nn.relu(nn.Dense(HIDDEN, use_bias=False)(x)))


Losses = list[tuple[str, int, dict[str, Any]]]
WRITTEN: Losses = []


class Writer(kd.train.metric_writer.NoopWriter):
    """Keeps the losses that kauldron writes, of its trainer and its evaluator."""

    def write_step_metrics(self, *, step: int, aux: Any, **_: Any) -> None:
        WRITTEN.append((self.collection, step, aux.compute().loss_values))


def examples() -> dict[str, Any]:
    random = np.random.default_rng(0)
    inputs, targets = random.normal(size=(64, IN)), random.normal(size=(64, OUT))
    return {"x": inputs.astype(np.float32), "y": targets.astype(np.float32)}


def trainer(folder: Path) -> Any:
    def data(epochs: int | None) -> Any:
        return kd.data.InMemoryPipeline(loader=examples, batch_size=BATCH, num_epochs=epochs)

    loss = {"preds": "preds", "targets": "batch.y"}
    return kd.train.Trainer(
        workdir=folder,
        train_ds=data(None),
        model=Mlp(x="batch.x"),
        optimizer=optax.adam(1e-3),
        train_losses={"l2": kd.losses.L2(**loss), "small": kd.losses.L2(weight=0.1, **loss)},
        num_train_steps=STEPS,
        log_metrics_every=LOG_EVERY,
        writer=Writer(),
        checkpointer=kd.ckpts.Checkpointer(save_interval_steps=SAVE_EVERY),
        evals={"eval": kd.evals.Evaluator(run=kd.evals.EveryNSteps(EVAL_EVERY), ds=data(1))},
    )


def train(folders: Sequence[Path], around: Any) -> tuple[Any, Losses]:
    """The last parameters, and what was written."""
    WRITTEN.clear()
    with around:
        for folder in folders:
            state, _ = trainer(folder).train()
    return jax.tree.map(np.asarray, state.params), list(WRITTEN)


def test_kauldrons_trainer_is_measured_and_unchanged(tmp_path: Path) -> None:
    bare_params, bare = train([tmp_path / "bare"], contextlib.nullcontext())
    memory, steps = ListSink(), []

    @contextlib.contextmanager
    def instrumented() -> Iterator[None]:
        with kauldron.instrumented(peak_tflops_per_device=1, sinks=[memory]) as found:
            steps.extend(found)
            yield

    params, written = train([tmp_path / "ours"], instrumented())
    jax.tree.map(np.testing.assert_array_equal, params, bare_params)
    assert written == bare
    # kauldron runs one step more than num_train_steps.
    assert [record.step for record in memory.records] == list(range(STEPS + 1))
    losses = {
        record.step: {
            name.removeprefix("learning/"): value
            for name, value in record.scalars.items()
            if name.startswith("learning/")
        }
        for record in memory.records
    }
    assert {step: found for step, found in losses.items() if found} == {
        step: {
            "l2": values["losses/l2"],
            "small": values["losses/small"],
            "loss": values["losses/total"],
        }
        for collection, step, values in bare
        if collection == "train"
    }
    # Both come before kauldron's step of that number. An evaluation joins the record of the step
    # before; a checkpoint, before which all records are written, that of the step after.
    paused = {
        name: [r.step for r in memory.records if f"goodput/{name}_seconds" in r.scalars]
        for name in ("eval", "checkpoint")
    }
    assert paused == {"eval": [0, 3], "checkpoint": [0, 3, 6]}
    flops = steps[0].flops
    # Nothing needs a gradient of the first layer's input.
    by_hand = 2 * (2 * BATCH * IN * HIDDEN) + 3 * (2 * BATCH * HIDDEN * OUT)
    assert flops.model.per_device == flops.executed.total == by_hand // jax.device_count()


def test_the_programs_of_logged_and_other_steps_are_told_of_once(tmp_path: Path) -> None:
    memory = ListSink()
    train([tmp_path], kauldron.instrumented(peak_tflops_per_device=1, sinks=[memory]))
    changes = [text for tag, text in memory.texts if tag.startswith("recompiled/")]
    assert len(changes) == 2  # with and without summaries, with losses and without


def test_trainers_that_train_one_after_another_are_one_run(tmp_path: Path) -> None:
    memory = ListSink()
    around = kauldron.instrumented(peak_tflops_per_device=1, sinks=[memory])
    train([tmp_path / "a", tmp_path / "b"], around)
    assert [record.step for record in memory.records] == list(range(2 * (STEPS + 1)))


def test_the_example(tmp_path: Path) -> None:
    batch, inputs, outputs = 64, 512, 256
    run = run_example("kauldron_train", tmp_path)
    assert run.flops() == {2 * (2 * batch * inputs * outputs)}
