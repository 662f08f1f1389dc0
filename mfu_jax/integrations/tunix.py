"""google-tunix: its ``PeftTrainer`` and the trainers derived from it (DPO, distillation, RL)."""

from __future__ import annotations

from typing import Any

import mfu_jax
from mfu_jax.integrations.built_steps import paused


def instrument_trainer(trainer: Any, **options: Any) -> Any:
    """Measures every training step of a tunix trainer, with the micro-batches that it accumulates.

    Evaluations and checkpoints are pauses.

    Args:
        trainer: a ``tunix.sft.peft_trainer.PeftTrainer``. Call this after its ``with_…`` methods,
            before ``train``.
        **options: of `mfu_jax.instrument`.

    Returns:
        The trainer; ``trainer.close()``, which ``train`` calls, also closes the step.
    """
    jit_steps, close = trainer.jit_train_and_eval_step, trainer.close
    run_eval, checkpoints = trainer._run_eval, trainer.checkpoint_manager
    save = checkpoints.save
    accumulated = trainer.config.get_with_default("gradient_accumulation_steps", 1)
    if "logger" not in options:
        options = {"calls_per_step": accumulated} | options
    step: Any = None

    def jit_train_and_eval_step(*args: Any, **kwargs: Any) -> Any:
        nonlocal step
        train_step, eval_step = jit_steps(*args, **kwargs)
        if step is None or step.__wrapped__ is not train_step:
            step = mfu_jax.instrument(train_step, **options)
            trainer._run_eval = paused(run_eval, "eval", step)
            checkpoints.save = paused(save, "checkpoint", step)
        return step, eval_step

    def close_both() -> None:
        if step is not None:
            step.close()
        close()

    trainer.jit_train_and_eval_step, trainer.close = jit_train_and_eval_step, close_both
    return trainer
