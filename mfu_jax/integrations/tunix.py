"""google-tunix: its ``PeftTrainer`` and the trainers derived from it (DPO, distillation, RL)."""

from __future__ import annotations

from typing import Any

from mfu_jax.integrations.built_steps import add_step, paused, resuming


def instrument_trainer(trainer: Any, **options: Any) -> Any:
    """Measures every training step of a tunix trainer, with the micro-batches that it accumulates.

    Evaluations and checkpoints are pauses.

    Args:
        trainer: a ``tunix.sft.peft_trainer.PeftTrainer``. Call this after its ``with_…`` methods,
            before ``train``.
        **options: of `mfu_jax.instrument`.

    Returns:
        The trainer; ``trainer.close()``, which ``train`` calls, also closes the step. The
        steps of a later ``train`` are numbered on.
    """
    jit_steps, train, close = trainer.jit_train_and_eval_step, trainer.train, trainer.close
    run_eval, checkpoints = trainer._run_eval, trainer.checkpoint_manager
    save = checkpoints.save
    accumulated = trainer.config.get_with_default("gradient_accumulation_steps", 1)
    if "logger" not in options:
        options = {"calls_per_step": accumulated} | options
    steps: list[Any] = []
    is_closed = False

    def jit_train_and_eval_step(*args: Any, **kwargs: Any) -> Any:
        train_step, eval_step = jit_steps(*args, **kwargs)
        if not steps or steps[-1].__wrapped__ is not train_step:
            add_step(steps, train_step, options)
            trainer._run_eval = paused(run_eval, "eval", steps[0])
            checkpoints.save = paused(save, "checkpoint", steps[0])
        return steps[-1], eval_step

    def train_again(*args: Any, **kwargs: Any) -> None:
        nonlocal options, is_closed
        if is_closed and steps:
            options, is_closed = resuming(steps[0], options), False
            steps.clear()
        train(*args, **kwargs)

    def close_both() -> None:
        nonlocal is_closed
        is_closed = True
        for step in reversed(steps):  # the first has the logger
            step.close()
        close()

    trainer.jit_train_and_eval_step = jit_train_and_eval_step
    trainer.train, trainer.close = train_again, close_both
    return trainer
