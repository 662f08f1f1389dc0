"""levanter's own trainer; runs where levanter is installed (scripts/test_libraries.sh)."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import optax
import pytest

from tests.support.examples import run_example
from tests.support.sinks import ListSink

pytest.importorskip("levanter")

import equinox as eqx
import haliax as hax
from levanter.callbacks import compute_validation_loss
from levanter.checkpoint import CheckpointerConfig
from levanter.tracker import NoopConfig
from levanter.trainer import Trainer, TrainerConfig

from mfu_jax.integrations.levanter import instrument_trainer

pytestmark = pytest.mark.full

STEPS, EVERY = 5, 2
BATCH, IN = hax.Axis("batch", 8), hax.Axis("in", 16)
HIDDEN, OUT = hax.Axis("hidden", 32), hax.Axis("out", 4)


class Mlp(eqx.Module):
    """Two layers."""

    first: hax.nn.Linear
    second: hax.nn.Linear

    def __call__(self, x: Any) -> Any:
        return self.second(hax.nn.relu(self.first(x)))


def init() -> Mlp:
    keys = jax.random.split(jax.random.key(0))
    return Mlp(
        hax.nn.Linear.init(IN, HIDDEN, key=keys[0]), hax.nn.Linear.init(HIDDEN, OUT, key=keys[1])
    )


def loss_fn(model: Mlp, batch: Any, *, key: Any = None) -> Any:
    return hax.mean(model(batch) ** 2).scalar(), {}


def batches() -> Iterator[Any]:
    for seed in range(2 * STEPS):
        yield hax.random.normal(jax.random.key(seed), (BATCH, IN))


def train(folder: Path, adapt: Any, times: int = 1) -> list[float]:
    config = TrainerConfig(
        id="run",
        num_train_steps=STEPS,
        train_batch_size=BATCH.size,
        tracker=NoopConfig(),
        require_accelerator=False,
        log_dir=folder,
        checkpointer=CheckpointerConfig(base_path=str(folder)),
    )
    losses: list[float] = []
    with Trainer(config, optax.adam(1e-3), loss_fn) as trainer:
        trainer.add_hook(lambda info: losses.append(float(info.loss)))
        evaluate = compute_validation_loss(loss_fn, [next(batches())])
        trainer.add_hook(evaluate, every=EVERY)
        adapt(trainer)
        for _ in range(times):
            trainer.train(trainer.initial_state(jax.random.key(1), model_init=init), batches())
    return losses


def artifacts(folder: Path) -> dict[str, bytes]:
    """The programs that levanter wrote down, by file."""
    saved = {file.name: file for file in (folder / "run" / "artifacts").iterdir()}
    assert len(saved) == 4
    return {
        n: gzip.open(f).read() if n.endswith(".gz") else f.read_bytes() for n, f in saved.items()
    }


def test_levanters_trainer_is_measured_and_unchanged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    bare = train(tmp_path / "bare", lambda trainer: trainer)
    memory, steps = ListSink(), []

    def adapt(trainer: Any) -> Any:
        trainer.add_hook(lambda _: steps.append(trainer._jit_train_step_fn_no_hook))
        return instrument_trainer(trainer, peak_tflops_per_device=1, sinks=[memory])

    assert train(tmp_path / "ours", adapt) == bare
    assert [record.step for record in memory.records] == list(range(STEPS))
    assert [record.scalars["learning/loss"] for record in memory.records] == bare[:STEPS]
    evaluated = [r.step for r in memory.records if "goodput/eval_seconds" in r.scalars]
    assert evaluated == [0, 2, 4]
    # levanter's log_jaxprs and log_xla_hlo, on by default, look at the same programs, silently.
    assert "while JAX traces" not in caplog.text
    assert artifacts(tmp_path / "ours") == artifacts(tmp_path / "bare")
    flops = steps[0].flops
    rows, hidden = BATCH.size, HIDDEN.size
    # Nothing needs a gradient of the first layer's input.
    by_hand = 2 * (2 * rows * IN.size * hidden) + 3 * (2 * rows * hidden * OUT.size)
    assert flops.model.per_device == flops.executed.total == by_hand // jax.device_count()


def test_a_trainer_that_trains_again_numbers_its_steps_on(tmp_path: Path) -> None:
    bare = train(tmp_path / "bare", lambda trainer: trainer, times=2)
    file = tmp_path / "metrics.jsonl"

    def adapt(trainer: Any) -> Any:
        return instrument_trainer(trainer, peak_tflops_per_device=1, metrics_file=str(file))

    assert train(tmp_path / "ours", adapt, times=2) == bare
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    assert [line["step"] for line in lines] == list(range(2 * STEPS))


def test_the_example(tmp_path: Path) -> None:
    batch, inputs, outputs = 64, 512, 256
    run = run_example("levanter_trainer", tmp_path)
    assert run.flops() == {2 * (2 * batch * inputs * outputs)}
