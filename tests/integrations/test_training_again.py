"""Trainers that train again, are interrupted, or measure nothing: stand-ins for the libraries.

They have what the adapters use of each library; the libraries themselves are in the other files.
"""

from __future__ import annotations

import functools
import importlib
import json
import sys
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import mfu_jax.integrations
from mfu_jax.integrations import tunix
from mfu_jax.logger.metric_logger import MetricLogger
from tests.support.sinks import ListSink

Adapter = Callable[..., Any]


@pytest.fixture
def adapter(monkeypatch: pytest.MonkeyPatch) -> Iterator[Adapter]:
    """Imports the adapter of a library whose modules are the given ones."""

    def of(name: str, **modules: Any) -> Any:
        for module, attributes in modules.items():
            stand_in = types.ModuleType(module)
            vars(stand_in).update(attributes)
            monkeypatch.setitem(sys.modules, module.replace("__", "."), stand_in)
        monkeypatch.setattr(mfu_jax.integrations, name, None, raising=False)
        module = f"mfu_jax.integrations.{name}"
        monkeypatch.delitem(sys.modules, module, raising=False)
        monkeypatch.setitem(sys.modules, module, None)  # is taken out again at the end
        del sys.modules[module]
        return importlib.import_module(module)

    return of


def lines_of(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def steps_of(folder: Path) -> list[int]:
    return [line["step"] for line in lines_of(folder)]


class KerasModel:
    run_eagerly, jit_compile = False, True

    def _make_function(self, step: Any) -> Any:
        return step

    def make_train_function(self, *, force: bool) -> None:
        self.train_function = self._make_function(jax.jit(jnp.sum))

    def fit(self, callback: Any, batches: int = 3, *, is_interrupted: bool = False) -> dict:
        logs: dict[str, float] = {}
        callback.model = self
        callback.on_train_begin()
        for _ in range(batches):
            self.train_function(jnp.ones(3))
        callback.on_test_begin()
        if is_interrupted:
            raise KeyboardInterrupt
        callback.on_test_end()
        callback.on_epoch_end(0, logs)
        callback.on_train_end()
        return logs


@pytest.fixture
def callback(adapter: Adapter) -> Any:
    class Callback:
        model: Any = None

    parts = {
        "callbacks": types.SimpleNamespace(Callback=Callback),
        "backend": types.SimpleNamespace(backend=lambda: "jax"),
    }
    return adapter("keras", keras=parts).MfuCallback


def test_a_keras_callback_without_metrics_or_batches_lets_fit_go_on(callback: Any) -> None:
    assert KerasModel().fit(callback(enable_mfu=False)) == {}
    assert KerasModel().fit(callback(sinks=[]), batches=0) == {}


@pytest.mark.parametrize("is_same", [True, False])
def test_a_keras_fit_after_an_interrupted_one(
    callback: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture, *, is_same: bool
) -> None:
    options = {"peak_tflops_per_device": 1, "run_dir": str(tmp_path)}
    model, first = KerasModel(), callback(**options)
    with pytest.raises(KeyboardInterrupt):
        model.fit(first, is_interrupted=True)
    model.fit(first if is_same else callback(**options))
    assert "still open" not in caplog.text
    assert first.step is None
    if is_same:
        assert steps_of(tmp_path) == list(range(6))
    else:  # a new run, as if the first had ended
        assert steps_of(tmp_path) == list(range(3))
        assert len((tmp_path / "metrics.jsonl.previous1").read_text().splitlines()) == 3


class LevanterTrainer:
    def __init__(self, hooks: list[Any]) -> None:
        self.hooks = types.SimpleNamespace(hooks=[types.SimpleNamespace(fn=fn) for fn in hooks])

    @functools.cached_property
    def _jit_train_step_fn(self) -> Any:
        return jax.jit(lambda x: jnp.sum(x * 2))

    @functools.cached_property
    def _jit_train_step_fn_no_hook(self) -> Any:
        return jax.jit(lambda x: jnp.sum(x * 3))

    def train(self, steps: int = 4) -> float:
        for step in range(steps):
            is_first = step == 0
            fn = self._jit_train_step_fn if is_first else self._jit_train_step_fn_no_hook
            loss = fn(jnp.ones(4))
            for hook in self.hooks.hooks:
                hook.fn.fn(step)
        return float(loss)


def test_levanter_trains_again(
    adapter: Adapter, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    class Checkpointer:
        def save_checkpoint(self) -> None: ...

        def on_step(self, step: int) -> None:
            self.save_checkpoint()

    levanter = adapter("levanter", levanter={}, levanter__checkpoint={"Checkpointer": Checkpointer})
    checkpoints = Checkpointer()
    hook = types.SimpleNamespace(fn=checkpoints.on_step)
    trainer = LevanterTrainer([hook])
    bare = trainer._jit_train_step_fn
    levanter.instrument_trainer(trainer, peak_tflops_per_device=1, run_dir=str(tmp_path))
    for times in (1, 2):
        assert trainer.train() == 12.0
        assert steps_of(tmp_path) == list(range(4 * times))
        assert trainer._jit_train_step_fn is bare
        assert vars(checkpoints) == {}
    # A checkpoint writes all records first, so its seconds are in the next one.
    saved = [line["step"] for line in lines_of(tmp_path) if "goodput/checkpoint_seconds" in line]
    assert saved == [1, 2, 3, 5, 6, 7]
    assert "close" not in caplog.text


class TunixTrainer:
    config = types.SimpleNamespace(get_with_default=lambda _, default: default)
    checkpoint_manager: Any
    factor = 1.0

    def __init__(self) -> None:
        self.checkpoint_manager = types.SimpleNamespace(save=lambda: None)
        self.clear_jit_cache()

    def clear_jit_cache(self) -> None:
        self._step = jax.jit(functools.partial(jnp.multiply, self.factor))

    def jit_train_and_eval_step(self) -> Any:
        return self._step, None

    def _run_eval(self) -> None: ...

    def run_steps(self) -> None:
        step, _ = self.jit_train_and_eval_step()
        for _ in range(3):
            step(2.0)
            self._run_eval()

    def train(self) -> None:
        self.run_steps()
        self.close()

    def close(self) -> None:
        self.checkpoint_manager.save()


def test_tunix_trains_again_and_with_another_loss(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    trainer = tunix.instrument_trainer(
        TunixTrainer(), peak_tflops_per_device=1, run_dir=str(tmp_path)
    )
    trainer.run_steps()
    trainer.clear_jit_cache()  # as with_loss_fn() does
    trainer.run_steps()
    trainer.close()
    assert steps_of(tmp_path) == list(range(6))
    trainer.train()
    assert steps_of(tmp_path) == list(range(9))
    assert all("goodput/eval_seconds" in line for line in lines_of(tmp_path))
    assert "close" not in caplog.text


def test_an_evaluation_that_ends_maxtexts_run_ends(
    adapter: Adapter, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Logger:
        def mark_eval_loop_start(self) -> None: ...
        def buffer_and_write_metrics(self) -> None: ...

    def jit_steps() -> Any:
        return jax.jit(lambda x: (x, {"scalar": {"learning/loss": x}})), None

    utils = types.SimpleNamespace(jit_train_and_eval_step=jit_steps)
    maxtext = adapter(
        "maxtext",
        maxtext={},
        maxtext__common={},
        maxtext__common__metric_logger={"MetricLogger": Logger},
        maxtext__utils={"train_utils": utils},
    )
    memory = ListSink()
    with maxtext.instrumented(peak_tflops_per_device=1, sinks=[memory]) as steps:
        train_step, _ = utils.jit_train_and_eval_step()
        for _ in range(3):
            train_step(1.0)
        Logger().mark_eval_loop_start()
        inside = steps[0].logger._spans.open
    assert isinstance(steps[0].logger, MetricLogger)
    assert inside is not None
    assert steps[0].logger._spans.open is None
    assert [record.step for record in memory.records] == [0, 1, 2]
    assert "goodput/eval_seconds" in memory.records[-1].scalars
