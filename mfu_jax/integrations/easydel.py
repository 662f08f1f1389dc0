"""EasyDeL: its ``Trainer`` and the trainers derived from it (SFT, DPO, ORPO, GRPO, …)."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

from mfu_jax.integrations.built_steps import add_step, closing, paused


def scalars_of(output: Any) -> dict[str, Any]:
    """The metrics of EasyDeL's step, ``(state, LossMetrics)``, by name."""
    metrics = output[1]
    named = {name: getattr(metrics, name, None) for name in ("loss", "accuracy", "learning_rate")}
    return {name: value for name, value in named.items() if value is not None}


def instrument_trainer(trainer: Any, **options: Any) -> Any:
    """Measures every training step of an EasyDeL trainer; evaluations and checkpoints are pauses.

    Our step N is EasyDeL's N + 1; of a run that it resumed, the numbers go on from there.

    Args:
        trainer: an ``easydel.trainers.BaseTrainer``. Call this before ``train``.
        **options: of `mfu_jax.instrument`.

    Returns:
        The trainer; the end of ``train`` closes the step. A second ``train`` is measured, too.
    """
    train, evaluate = trainer.train, trainer.eval

    def measured_train(*args: Any, **kwargs: Any) -> Any:
        steps: list[Any] = []
        resumed = {} if "logger" in options else {"start_step": int(trainer.model_state.step)}
        with contextlib.ExitStack() as stack:
            stack.enter_context(closing(steps))
            bare = trainer.sharded_training_step_function
            add_step(steps, bare, resumed | options, metrics=scalars_of)

            def paused_eval(model_state: Any) -> Iterator[Any]:
                with steps[0].logger.pause("eval"):
                    yield from evaluate(model_state)

            replaced = {
                "sharded_training_step_function": steps[0],
                "eval": paused_eval,
                "_save_state": paused(trainer._save_state, "checkpoint", steps[0]),
            }
            for name, value in replaced.items():
                stack.enter_context(mock.patch.object(trainer, name, value))
            return train(*args, **kwargs)

    trainer.train = measured_train
    return trainer
