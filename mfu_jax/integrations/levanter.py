"""levanter (and marin, which trains with it): its ``Trainer``."""

from __future__ import annotations

from typing import Any

from levanter.checkpoint import Checkpointer

import mfu_jax
from mfu_jax.integrations.built_steps import paused, sharing

# The trainer's cached properties, which an attribute of that name replaces: with and without hooks
# inside the step.
_STEPS = ("_jit_train_step_fn", "_jit_train_step_fn_no_hook")
_EVALUATIONS = ("compute_validation_loss", "cb_tagged_lm_evaluate", "cb_tagged_evaluate")


def instrument_trainer(trainer: Any, **options: Any) -> Any:
    """Measures every training step of a levanter trainer; evaluations and checkpoints are pauses.

    Args:
        trainer: a ``levanter.trainer.Trainer``. Call this inside its ``with``, before ``train``.
        **options: of `mfu_jax.instrument`.

    Returns:
        The trainer; the end of ``train`` closes the step.
    """
    train = trainer.train

    def measured_train(*args: Any, **kwargs: Any) -> Any:
        shared = options
        for name in _STEPS:
            step = mfu_jax.instrument(getattr(trainer, name), **shared)
            setattr(trainer, name, step)
            shared = sharing(step, options)
        for hook in trainer.hooks.hooks:
            _pause_in(hook.fn, step)
        with step.logger:
            return train(*args, **kwargs)

    trainer.train = measured_train
    return trainer


def _pause_in(callback: Any, step: Any) -> None:
    """Makes a pause of what a callback of levanter does when it is due."""
    function: Any = getattr(callback, "fn", None)
    owner = getattr(function, "__self__", None)
    if isinstance(owner, Checkpointer):
        owner.save_checkpoint = paused(owner.save_checkpoint, "checkpoint", step)
    elif getattr(function, "__qualname__", "").startswith(_EVALUATIONS):
        callback.fn = paused(function, "eval", step)
